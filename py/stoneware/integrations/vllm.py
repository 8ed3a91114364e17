"""Stoneware's kernels in vLLM: `plugin`, which the entry point vllm.general_plugins calls in each of its processes.

| layer | scales | vLLM's list of kernels |
|---|---|---|
| `RowScaledMM` | fp8 weights: one, or of rows; x: one, or of rows | `_POSSIBLE_FP8_KERNELS` |
| `BlockScaledMM` | fp8 weights: 128x128; x: 1x128 | `_POSSIBLE_FP8_BLOCK_KERNELS` |
| `FoldedMxfp8` | MXFP8 weights: 1x32, folded into 128x128 (`vllm_mxfp8`); x: 1x128 | `_POSSIBLE_MXFP8_KERNELS` |
| `unquantized_gemm` | none: bfloat16 and float16 | what `UnquantizedLinearMethod` dispatches to |

They are tried first; where one refuses, with a reason, vLLM goes on with its own. Which of all kernels, torch's among
them, runs a shape is what Stoneware's table measured. `--linear-backend` with another name leaves them out. Experts are
in `vllm_experts`, and run with STONEWARE_ENGINES_EXPERTS=1.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.integrations import vllm_experts, vllm_mxfp8
from stoneware.integrations.hosts import unfit
from stoneware.nn.recipes import BLOCK, UNIT
from stoneware.ops.matmul.api import matmul
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize
from stoneware.runtime import environment

BACKEND = "stoneware"
"""The name of the kernels in `_LINEAR_BACKEND_KERNEL_MAP`."""

_BITS_16 = (torch.bfloat16, torch.float16)

_HOPPER = 90


_LOG = logging.getLogger("stoneware.integrations")


def plugin() -> None:
    """What the entry point calls: `register`. If it fails, this is logged, and vLLM starts with its own kernels."""
    try:
        register()
    except UnsupportedError as error:
        _LOG.warning("vLLM runs its own kernels: %s", error)


@functools.cache
def register() -> None:
    """Puts the kernels before vLLM's own; once in a process.

    Raises:
      UnsupportedError: vLLM is missing, or has other interfaces.
    """
    try:
        from vllm.model_executor.kernels import linear as kernels
        from vllm.model_executor.layers import linear as layers
        from vllm.platforms import PlatformEnum

        row, block, mxfp8 = _kernels()
        own_dispatch, backends = layers.dispatch_unquantized_gemm, kernels._LINEAR_BACKEND_KERNEL_MAP
        kernels._POSSIBLE_MXFP8_KERNELS.setdefault(PlatformEnum.CPU, [])
        lists = [
            (of_platform[platform], kernel)
            for of_platform, kernel in (
                (kernels._POSSIBLE_FP8_KERNELS, row),
                (kernels._POSSIBLE_FP8_BLOCK_KERNELS, block),
                (kernels._POSSIBLE_MXFP8_KERNELS, mxfp8),
            )
            for platform in (PlatformEnum.CUDA, PlatformEnum.CPU)
        ]
    except (ImportError, AttributeError, KeyError) as error:
        raise unfit("vllm", error) from error
    for candidates, kernel in lists:
        candidates.insert(0, kernel)
    backends[BACKEND] = {row, block, mxfp8}

    @functools.wraps(own_dispatch)
    def dispatch(linear_backend: str = "auto") -> Callable[..., torch.Tensor]:
        own = own_dispatch(linear_backend)
        if linear_backend not in ("auto", BACKEND) or why_not_here() is not None:
            return own
        return functools.partial(unquantized_gemm, own)

    layers.dispatch_unquantized_gemm = dispatch
    if environment.engines_experts():
        vllm_experts.register(why_not_here)


def why_not_here(compute_capability: int | None = None) -> str | None:
    """Why the kernels do not run on vLLM's platform, or None.

    Args:
      compute_capability: 90 for Hopper; None asks vLLM.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None if environment.engines_on_cpu() else "runs on a CPU only with STONEWARE_ENGINES_ON_CPU=1, for tests"
    if not current_platform.is_cuda():
        return "requires CUDA"
    if compute_capability is None:
        capability = current_platform.get_device_capability()
        compute_capability = capability and capability.to_int()
    return None if compute_capability == _HOPPER else f"is built for Hopper (90), not for {compute_capability}"


def unquantized_gemm(
    own: Callable[..., torch.Tensor],
    layer: torch.nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., k] @ weight [n, k].t() + bias in 16 bits, by `sw.matmul`; by vLLM's own function where that does not fit.

    A weight of another form (packed, for example) or with a size that is not a multiple of 16 goes to `own`.
    """
    fits = (
        weight.ndim == 2
        and x.dtype == weight.dtype
        and x.dtype in _BITS_16
        and x.shape[-1] == weight.shape[1]
        and not (weight.shape[0] % UNIT or weight.shape[1] % UNIT)
        and weight.stride(1) == 1
    )
    if not fits:
        return own(layer, x, weight, bias)
    y: torch.Tensor = matmul(x.reshape(-1, x.shape[-1]), weight.t(), bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def why_not_config(config: Any, unit: int) -> str | None:
    """Why a layer of vLLM cannot use the kernels, or None.

    Args:
      config: vLLM's FP8ScaledMMLinearLayerConfig.
      unit: of both sizes of the weight.
    """
    if config.out_dtype not in (*_BITS_16, torch.float32):
        return f"returns 16 or 32 bits, not {config.out_dtype}"
    if any(size % unit for size in config.weight_shape):
        return f"requires sizes that are multiples of {unit}, not {list(config.weight_shape)}"
    return None


@functools.cache
def _kernels() -> tuple[Any, Any, Any]:
    """The kernels of fp8 with scales of rows, of blocks, and of MXFP8; their bases are vLLM's."""
    from vllm.model_executor.kernels import linear as kernels

    class Here:
        """The platforms of all kernels."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            reason = why_not_here(compute_capability)
            return reason is None, reason

    class RowScaledMM(Here, kernels.FP8ScaledMMLinearKernel):
        """fp8 with one scale, or one for each row, of x and of the weight."""

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            x, weight = c.activation_quant_key.scale.group_shape, c.weight_quant_key.scale.group_shape
            if not (x.is_per_token() or x.is_per_tensor()):
                return False, f"takes one scale of x or one for each row, not {tuple(x)}"
            if not (weight.is_per_channel() or weight.is_per_tensor() or weight.is_per_token()):
                return False, f"takes one scale of the weight or one for each row, not {tuple(weight)}"
            reason = why_not_config(c, UNIT)
            return reason is None, reason

        def apply_scaled_mm(
            self,
            *,
            A: torch.Tensor,
            B: torch.Tensor,
            out_dtype: torch.dtype,
            As: torch.Tensor,
            Bs: torch.Tensor,
            bias: torch.Tensor | None,
            output_shape: list[int],
        ) -> torch.Tensor:
            """A [m, k] with As [m, 1] or one scale; B [k, n], a transposed weight, with Bs [n, 1] or one scale."""
            if As.numel() == 1 and Bs.numel() == 1:
                scales = As.reshape(1), Bs.reshape(1)
            else:
                scales = As.reshape(-1, 1).expand(A.shape[0], 1), Bs.reshape(1, -1).expand(1, B.shape[1])
            y: torch.Tensor = scaled_mm(A, B, *scales, bias, out_dtype)
            return y.view(*output_shape)

    class BlockScaledMM(Here, kernels.Fp8BlockScaledMMLinearKernel):
        """fp8 with a scale for each 1x128 elements of x and each 128x128 of the weight."""

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            fits, reason = super().can_implement(config)
            if not fits:
                return fits, reason
            x, weight = config.activation_quant_key.scale.group_shape, config.weight_quant_key.scale.group_shape
            if (tuple(x), tuple(weight)) != ((1, BLOCK), (BLOCK, BLOCK)):
                return (
                    False,
                    f"takes scales of 1x{BLOCK} and {BLOCK}x{BLOCK} elements, not {tuple(x)} and {tuple(weight)}",
                )
            reason = why_not_config(config, BLOCK)
            return reason is None, reason

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            """A [m, k] with As [m, k / 128]; B [n, k] with Bs [n / 128, k / 128]."""
            y: torch.Tensor = scaled_mm(A, B.t(), As, Bs.t(), None, self.config.out_dtype)
            return y

    class FoldedMxfp8(Here, kernels.Mxfp8LinearKernel):
        """MXFP8 weights with scales of 128x128 elements, see `vllm_mxfp8`; x is quantized in 1x128."""

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            if c.bmm_batch_size is not None:
                return False, "takes no batches of weights"
            if any(size % BLOCK for size in c.weight_shape):
                return False, f"requires sizes that are multiples of {BLOCK}, not {list(c.weight_shape)}"
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            """weight [n, k], weight_scale [n, k / 32] of exponents in uint8 -> scales of 128x128, or 16 bits."""
            # A copy, because tied layers share their memory.
            weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            scale = vllm_mxfp8.fold(weight, layer.weight_scale, "a layer")
            layer.weight = weight
            if scale is not None:
                layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """x [..., k] in 16 bits."""
            weight, rows = layer.weight, x.reshape(-1, x.shape[-1])
            if weight.dtype == torch.bfloat16:
                y = matmul(rows, weight.to(x.dtype).t(), bias)
            else:
                values, scale = quantize(rows, "block")
                y = scaled_mm(values, weight.t(), scale, layer.weight_scale.t(), bias, x.dtype)
            return y.view(*x.shape[:-1], weight.shape[0])

    return RowScaledMM, BlockScaledMM, FoldedMxfp8
