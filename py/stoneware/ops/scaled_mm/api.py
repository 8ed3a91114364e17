"""scaled_mm: the call, its backends, and its plan cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import quoted
from stoneware.kernels.config import Config
from stoneware.ops.dispatch import Operation
from stoneware.ops.plan_cache import OpPlans
from stoneware.ops.scaled_mm import checks, reference, sm90, vendor
from stoneware.ops.triton_aot import TritonAot
from stoneware.specs.scaled_mm import SPEC
from stoneware.specs.scaled_mm_problem import Problem

__all__ = ["OPERATION", "Problem", "scaled_mm"]

_TRITON = TritonAot(SPEC, lambda problem: (int(problem.scale_a == "row"), int(problem.scale_b == "row")))

OPERATION = Operation(SPEC, sm90.BACKEND, _TRITON, vendor.BACKEND, reference.BACKEND)

_is_compiling = torch.compiler.is_dynamo_compiling


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    epilogue: Callable[..., Any] | None = None,
    inputs: Sequence[torch.Tensor] = (),
    out: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """Multiplies two fp8 matrices with scales: scale_a * scale_b * (a @ b) + bias.

    The arguments are those of torch._scaled_mm. The shape of a scale determines its kind. Sliced
    views are used without a copy.

    Block scales are those of DeepSeek-V3: one scale per 1 x 128 elements of a, and one per 128 x 128
    elements of a weight b, or per 128 x 1; k must then be a multiple of 128.

    Differentiable, to any order, in its scales and its bias; a and b are frozen.

    Args:
      a: [m, k] float8_e4m3fn or float8_e5m2, row-major; m >= 0, k and a.stride(0) multiples
        of 16.
      b: [k, n] of these dtypes, column-major (a row-major weight [n, k], transposed); n and
        b.stride(1) multiples of 16.
      scale_a: float32; one element, [m, 1] with one per row of a, or [m, k / 128]; any strides.
      scale_b: float32; one element, [1, n] with one per column of b, or [k / 128, ceil(n / 128)],
        or with its rows padded to a multiple of 4 like torch requires, or [k / 128, n]; any strides.
      bias: [n] of the out dtype, or None.
      out_dtype: torch.bfloat16, torch.float16 or torch.float32.
      epilogue: epilogue(acc, *inputs), a function on torch tensors that computes the result from the float32 sums,
        inside the kernel; docs/epilogues.md. None returns the sums, rounded.
      inputs: the tensors that it gets.
      out: [m, n] of the out dtype, row-major, out.stride(0) a multiple of 16 bytes; None allocates
        it. It must not share memory with an input; that is not checked, and the result would be
        undefined.
      backend: run this backend only: "sm90", "triton_aot", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows.
      use_fast_accum: True sums in the tensor core, with about 14 bits of mantissa. False, for
        training, adds the sum of each 128 elements of k in float32, like block scales always do.

    Returns:
      out, or what the epilogue returns.

    Raises:
      TypeError: an argument is not a tensor, or has the wrong dtype.
      ValueError: a shape, stride, pointer or device breaks a rule.
      ForwardOnlyError: the call would need a gradient of a or b, a gradient together with out, or a
        tangent.
      UnsupportedError: no backend, or not the requested one, can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # Not among the checks: a plan that was made for True would be found for 1, which equals it.
    if use_fast_accum is not True and use_fast_accum is not False:
        raise TypeError(f"use_fast_accum={quoted(use_fast_accum)} must be a bool; pass True or False")
    if epilogue is not None or inputs != ():
        from stoneware.ops import fused

        result: torch.Tensor = fused.call(
            _PLANS, epilogue, inputs, a, b, scale_a, scale_b, bias, out, out_dtype, use_fast_accum, backend, config
        )
        return result
    if _is_compiling():
        return _traced(a, b, scale_a, scale_b, bias, out, out_dtype, use_fast_accum, backend, config)
    return _PLANS.call(a, b, scale_a, scale_b, bias, out, out_dtype, use_fast_accum, backend, config)


class _Plans(OpPlans):
    operation = OPERATION
    checks = checks
    has_gradients = True


_PLANS = _Plans()
_traced = _Plans.operator
