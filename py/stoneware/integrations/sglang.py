"""Stoneware's kernels in SGLang: `plugin`, which the entry point sglang.srt.plugins calls in each of its processes.

A hook around `dispatch_w8a8_block_fp8_linear` returns Stoneware's linear for fp8 weights with 128x128 scales, on
Hopper. Other blocks, other GPUs and an explicit --fp8-gemm-backend stay with SGLang.

With STONEWARE_ENGINES_EXPERTS=1 a hook around `MoeRunner.run` runs experts of SGLang's Triton runner on
`sw.grouped_mm`, in bfloat16 or in fp8 with 128x128 scales.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.integrations.hosts import unfit
from stoneware.nn.experts import frozen_matmul, routed
from stoneware.nn.recipes import BLOCK, UNIT
from stoneware.ops.grouped_mm.api import grouped_mm
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize
from stoneware.runtime import environment

TARGET = "sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear"
EXPERTS_TARGET = "sglang.srt.layers.moe.moe_runner.runner.MoeRunner.run"

_HOPPER = (9, 0)


_LOG = logging.getLogger("stoneware.integrations")


def plugin() -> None:
    """What the entry point calls: `register`. If it fails, this is logged, and SGLang starts with its own kernels."""
    try:
        register()
    except UnsupportedError as error:
        _LOG.warning("SGLang runs its own kernels: %s", error)


@functools.cache
def register() -> None:
    """Registers the hook; SGLang applies it before its engine starts.

    Raises:
      UnsupportedError: SGLang is missing, or has other interfaces.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(TARGET, dispatch, HookType.AROUND)
        if environment.engines_experts():
            HookRegistry.register(EXPERTS_TARGET, run_experts, HookType.AROUND)
    except (ImportError, AttributeError) as error:
        raise unfit("sglang", error) from error


def dispatch(
    own: Callable[..., Any], weight_block_size: Sequence[int] | None = None, *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """The linear for a block size: Stoneware's, with SGLang's own for what it does not take."""
    linear: Callable[..., Any] = own(weight_block_size, *args, **kwargs)
    if weight_block_size is not None and tuple(weight_block_size) != (BLOCK, BLOCK):
        return linear
    return linear if why_not_here() is not None else functools.partial(block_linear, linear)


def why_not_here() -> str | None:
    """Why the kernels do not run here, or None."""
    try:
        from sglang.srt.layers.quantization.fp8_utils import get_fp8_gemm_runner_backend

        backend = get_fp8_gemm_runner_backend()
        is_auto = backend.is_auto()
    except (ImportError, AttributeError) as error:
        raise unfit("sglang", error) from error
    return f"--fp8-gemm-backend={backend.value} was chosen" if not is_auto else _why_not_device()


def _why_not_device() -> str | None:
    if not torch.cuda.is_available():
        return None if environment.engines_on_cpu() else "runs on a CPU only with STONEWARE_ENGINES_ON_CPU=1, for tests"
    capability = torch.cuda.get_device_capability()
    return None if capability == _HOPPER else f"is built for Hopper, not for compute capability {capability}"


def block_linear(
    own: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: Sequence[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """input @ weight.t() + bias in fp8 with block scales.

    Args:
      own: SGLang's linear, for other blocks, scales that are not float32, and sizes that are no multiples of 16.
      input: [..., k] in 16 bits, or float8_e4m3fn with its scales.
      weight: [n, k] float8_e4m3fn.
      block_size: of the weight's scales.
      weight_scale: [ceil(n / 128), k / 128] float32.
      input_scale: [..., k / 128] float32 for an input in fp8.
      bias: [n] of the result's dtype.

    Returns:
      [..., n] in the input's dtype, bfloat16 for fp8.
    """
    n, k = weight.shape
    fits = (
        tuple(block_size) == (BLOCK, BLOCK)
        and weight_scale.dtype == torch.float32
        and tuple(weight_scale.shape) == (-(-n // BLOCK), k // BLOCK)
        and not (n % UNIT or k % BLOCK)
    )
    if not fits:
        return own(input, weight, block_size, weight_scale, input_scale, bias)
    rows = input.reshape(-1, k)
    if input_scale is None:
        x, x_scale, dtype = *quantize(rows, "block"), input.dtype
    else:
        x, x_scale, dtype = rows, input_scale.reshape(-1, k // BLOCK), torch.bfloat16
    y: torch.Tensor = scaled_mm(x, weight.t(), x_scale, weight_scale.t(), bias, dtype)
    return y.view(*input.shape[:-1], n)


def run_experts(
    own: Callable[..., Any], runner: Any, dispatch_output: Any, quant_info: Any, *args: Any, **kwargs: Any
) -> Any:
    """The experts of an SGLang MoeRunner, by `sw.grouped_mm` or, for what that does not take, by `own`.

    Args:
      own: SGLang's MoeRunner.run.
      runner: the MoeRunner.
      dispatch_output: SGLang's StandardDispatchOutput with x [m, k] in bfloat16, and the experts of each token.
      quant_info: SGLang's TritonMoeQuantInfo, with w13 [experts, 2 n, k] and w2 [experts, k, n].

    Returns:
      SGLang's StandardCombineInput with [m, k] in bfloat16.
    """
    try:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        reason = why_not_experts(runner, dispatch_output, quant_info)
    except (ImportError, AttributeError) as error:
        raise unfit("sglang", error) from error
    if reason is not None:
        return own(runner, dispatch_output, quant_info, *args, **kwargs)

    def matmul(
        rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, offs: torch.Tensor
    ) -> torch.Tensor:
        return grouped_mm(rows, weight.mT, offs) if scale is None else frozen_matmul(rows, weight, scale, offs)

    def feed_forward(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        gate, up = matmul(rows, quant_info.w13_weight, quant_info.w13_scale, offs).chunk(2, -1)
        return matmul(torch.nn.functional.silu(gate) * up, quant_info.w2_weight, quant_info.w2_scale, offs)

    weights, experts = dispatch_output.topk_output.topk_weights, dispatch_output.topk_output.topk_ids
    weights = weights.masked_fill(experts < 0, 0) * (runner.config.routed_scaling_factor or 1)  # -1: rows of padding
    y = routed(dispatch_output.hidden_states, experts, weights, quant_info.w13_weight.shape[0], feed_forward)
    return StandardCombineInput(hidden_states=y)


def why_not_experts(runner: Any, dispatch_output: Any, quant_info: Any) -> str | None:
    """Why a call of `run_experts` stays with SGLang, or None."""
    config, x = runner.config, dispatch_output.hidden_states
    if not runner.runner_backend.is_triton() or runner.lora_enabled or not _is_auto():
        return "runs only for --moe-runner-backend=auto where SGLang takes Triton, without LoRA"
    if config.activation != "silu" or not config.is_gated:
        return "takes silu with a gate"
    options = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
    flags = ("apply_router_weight_on_input", "no_combine")
    if any(getattr(config, name) is not None for name in options) or any(getattr(config, name) for name in flags):
        return f"takes none of {', '.join((*options, *flags))}"
    if config.num_experts is None or config.num_experts != config.num_local_experts:
        return "takes experts that are all on this GPU"
    formats = {dispatch_output.format.name, dispatch_output.topk_output.format.name}
    if formats != {"STANDARD"} or x.dtype != torch.bfloat16:
        return f"takes the standard form of routing with bfloat16, not {formats} with {x.dtype}"
    weights = (quant_info.w13_weight, quant_info.w2_weight)
    scales = (quant_info.w13_scale, quant_info.w2_scale)
    others = ("b13", "b2", "w13_zp", "w2_zp", "a13_scale", "a2_scale")
    kinds = ("use_mxfp8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
    if any(getattr(quant_info, name) is not None for name in others) or any(
        getattr(quant_info, name) for name in (*kinds, "fuse_swiglu_interleaved")
    ):
        return "takes bfloat16, and fp8 with 128x128 scales"
    is_fp8 = quant_info.use_fp8_w8a8
    dtype, unit = (torch.float8_e4m3fn, BLOCK) if is_fp8 else (torch.bfloat16, UNIT)
    if any(weight.dtype != dtype for weight in weights) or any(size % unit for size in weights[1].shape[1:]):
        return f"takes {dtype} with sizes that are multiples of {unit}"
    if not is_fp8:
        return None if scales == (None, None) else "takes no scales of 16-bit weights"
    expected = [(len(weight), weight.shape[1] // BLOCK, weight.shape[2] // BLOCK) for weight in weights]
    shapes = [tuple(scale.shape) for scale in scales if scale is not None and scale.dtype == torch.float32]
    blocks = tuple(quant_info.block_shape or ())
    return None if (blocks, shapes) == ((BLOCK, BLOCK), expected) else "takes float32 scales of 128x128 elements"


def _is_auto() -> bool:
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    return bool(get_moe_runner_backend().is_auto()) and _why_not_device() is None
