"""grouped_mm: the call, its backends, and its plan cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.kernels.config import Config
from stoneware.ops.dispatch import Operation
from stoneware.ops.grouped_mm import checks, reference, sm90, vendor
from stoneware.ops.plan_cache import OpPlans
from stoneware.specs.grouped_mm import SPEC
from stoneware.specs.grouped_mm_problem import Problem

__all__ = ["OPERATION", "Problem", "grouped_mm"]

OPERATION = Operation(SPEC, sm90.BACKEND, vendor.BACKEND, reference.BACKEND)

_is_compiling = torch.compiler.is_dynamo_compiling


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    epilogue: Callable[..., Any] | None = None,
    inputs: Sequence[torch.Tensor] = (),
    out: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiplies each group of rows of a by its own matrix, like in a mixture of experts.

        out[m] = scale_a[m] * scale_b[g] * (a[m] @ b[g])  for offs[g - 1] <= m < offs[g]

    With block scales this is summed over the blocks of 128 of k, each with its own scales, in full float32.

    The arguments mean the same as in torch._grouped_mm and torch._scaled_grouped_mm for a 2-D and a 3-D tensor;
    torch has no block scales on Hopper. The kernel reads the offsets on the device: the call does not synchronize,
    and one CUDA graph serves any offsets. Groups may be empty, and may begin and end at any row. Sliced views are
    used without a copy.

    Differentiable in bf16, to any order; the gradient of rows from offs[-1] on is zero.

    Args:
      a: [m, k] float8_e4m3fn or bfloat16, row-major, with the groups one after another; a row and
        a.stride(0) are multiples of 16 bytes.
      b: [groups, k, n] of the same dtype, each group column-major (row-major weights [groups, n, k]
        as weights.mT); n elements and the strides are multiples of 16 bytes.
      offs: [groups] int32, the row after each group's last; never decreasing, at most m. On a
        GPU this is not checked, which would synchronize; values beyond m are clipped.
      scale_a: for fp8 float32, [m] or, of block scales, [m, k / 128] with any strides; k is then a multiple of
        128. Otherwise None.
      scale_b: for fp8 float32, [groups, n] or, of block scales, [groups, k / 128, n / 128], rounded up, with
        any strides (row-major scales [groups, n / 128, k / 128] as scales.mT). Otherwise None.
      out_dtype: torch.bfloat16 or, for fp8, torch.float16; None for torch.bfloat16.
      epilogue: epilogue(acc, *inputs), a function on torch tensors that computes the result from the float32 sums,
        inside the kernel; docs/epilogues.md. None returns the sums, rounded.
      inputs: the tensors that it gets.
      out: [m, n] of the out dtype, row-major, out.stride(0) a multiple of 8; None allocates it. It
        must not share memory with an input; that is not checked, and the result would be undefined.
      backend: run this backend only: "sm90", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows.

    Returns:
      out, or what the epilogue returns. Rows from offs[-1] on are undefined, like in torch: "sm90" and
      "reference" do not write them, "vendor" may.

    Raises:
      TypeError: an argument is not a tensor, or has the wrong dtype.
      ValueError: a shape, stride, pointer or device breaks a rule.
      ForwardOnlyError: the call would need a gradient in fp8, a gradient together with out, or a tangent.
      BackwardNotBuiltError: the call would need a gradient that this installation was built without.
      UnsupportedError: no backend, or not the requested one, can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    if epilogue is not None or inputs != ():
        from stoneware.ops import fused

        result: torch.Tensor = fused.call(
            _PLANS, epilogue, inputs, a, b, offs, scale_a, scale_b, out, out_dtype, backend, config
        )
        return result
    if _is_compiling():
        return _traced(a, b, offs, scale_a, scale_b, out, out_dtype, backend, config)
    return _PLANS.call(a, b, offs, scale_a, scale_b, out, out_dtype, backend, config)


class _Plans(OpPlans):
    operation = OPERATION
    checks = checks
    has_gradients = True


_PLANS = _Plans()
_traced = _Plans.operator
