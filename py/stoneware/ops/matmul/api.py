"""matmul: the call, its backends, and its plan cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import quoted
from stoneware.kernels.config import Config
from stoneware.ops.dispatch import Operation
from stoneware.ops.matmul import checks, reference, sm90, vendor
from stoneware.ops.plan_cache import OpPlans
from stoneware.ops.triton_aot import TritonAot
from stoneware.specs.matmul import SPEC
from stoneware.specs.matmul_problem import Problem

__all__ = ["OPERATION", "Problem", "matmul"]

OPERATION = Operation(SPEC, sm90.BACKEND, TritonAot(SPEC), vendor.BACKEND, reference.BACKEND)

_is_compiling = torch.compiler.is_dynamo_compiling


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: Callable[..., Any] | None = None,
    inputs: Sequence[torch.Tensor] = (),
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiplies bf16 or fp16 matrices: a @ b + bias, summed in float32.

    Shapes follow torch.matmul: leading dimensions are a batch and broadcast; a 1-D a is a row and a
    1-D b a column, and the result drops that dimension. Row-major and column-major operands, their
    sliced views and operands shared by a batch are used without a copy. If b has no batch, the
    leading dimensions of a become rows of one matmul. An operand is copied first if its matrices
    are neither row-major nor column-major, or if its leading dimensions have no single stride.

    Differentiable, to any order: its gradients are matmuls of views, with the same backend. They are
    rounded to the operands' dtype. The gradient of a float32 result is rounded to it first.
    Forward-mode derivatives are not supported.

    Args:
      a: [..., m, k] or [k], bfloat16 or float16.
      b: [..., k, n] or [k], of the same dtype.
      bias: [n] of the result's dtype, or None; must be None if b is a vector.
      epilogue: epilogue(acc, *inputs), a function on torch tensors that computes the result from the float32 sums,
        inside the kernel; docs/epilogues.md. None returns the sums, rounded.
      inputs: the tensors that it gets.
      out: [..., m, n] without the dimension of a vector, with contiguous rows; None allocates it.
        It must not share memory with an input; that is not checked, and the result would be
        undefined.
      out_dtype: the result's dtype: the operands' or torch.float32; None takes out's, or the
        operands' without out.
      accumulate: out += a @ b instead of out = a @ b. Needs out, and no bias. The sum is rounded once, to
        out's dtype.
      backend: run this backend only: "sm90", "triton_aot", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows, or with accumulate the first of its
        candidates that can add to out. Not for gradients.

    Returns:
      out, or what the epilogue returns.

    Raises:
      TypeError: an argument is not a tensor, or has the wrong dtype; accumulate is not a bool.
      ValueError: a shape, stride or device breaks a rule; accumulate is True without out, or with a bias.
      ForwardOnlyError: the call would need a gradient together with out, or a tangent.
      BackwardNotBuiltError: the call would need a gradient that this installation was built without.
      UnsupportedError: no backend, or not the requested one, can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # Not among the checks: a plan that was made for True would be found for 1, which equals it.
    if accumulate is not True and accumulate is not False:
        raise TypeError(f"accumulate={quoted(accumulate)} must be a bool; pass True or False")
    if epilogue is not None or inputs != ():
        from stoneware.ops import fused

        result: torch.Tensor = fused.call(
            _PLANS, epilogue, inputs, a, b, bias, out, out_dtype, accumulate, backend, config
        )
        return result
    if _is_compiling():
        return _traced(a, b, bias, out, out_dtype, accumulate, backend, config)
    return _PLANS.call(a, b, bias, out, out_dtype, accumulate, backend, config)


class _Plans(OpPlans):
    operation = OPERATION
    checks = checks
    has_gradients = True


_PLANS = _Plans()
_traced = _Plans.operator
