"""Stoneware's kernels in SGLang: `plugin`, which the entry point sglang.srt.plugins calls in each of its processes.

A hook around `dispatch_w8a8_block_fp8_linear` returns Stoneware's linear for fp8 weights with 128x128 scales, on
Hopper. Other blocks, other GPUs and an explicit --fp8-gemm-backend stay with SGLang.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.integrations.hosts import unfit
from stoneware.nn.recipes import BLOCK, UNIT
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize
from stoneware.runtime import environment

TARGET = "sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear"

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
    if not is_auto:
        return f"--fp8-gemm-backend={backend.value} was chosen"
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
