"""Checks the arguments of matmul, and makes the plan for those that pass.

Arguments of any rank become one Problem: a batch of matmuls whose matrices have one contiguous
dimension each and one stride from a matmul to the next. An operand without such strides is copied at
each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan, is_torch_plan
from stoneware.ops.matmul import vendor
from stoneware.ops.matmul.layouts import arrangement, result_shape
from stoneware.runtime.dtypes import DTYPE_NAMES
from stoneware.specs.matmul import SPEC
from stoneware.specs.matmul_problem import DTYPES, WIDE_DTYPE, Problem
from stoneware.specs.problem import UNIT_BYTES


def result(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate: bool,
) -> tuple[tuple[int, ...], torch.dtype]:
    """See `OpPlans.checks`."""
    if accumulate and (out is None or bias is not None):
        raise ValueError(
            "accumulate=True must have an out to add to, and no bias, but has "
            + ("no out" if out is None else "a bias")
            + "; pass out, and add the bias to it"
        )
    return _shape(a, b), out_dtype or a.dtype


def plan(
    make: Callable[[Problem], Plan],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate: bool,
) -> Plan:
    """See `OpPlans.checks`."""
    shape, _ = result(a, b, bias, out, out_dtype, accumulate)
    dtype = tensor_checks.check_dtype("a", a, DTYPES, "cast it with a.to(torch.bfloat16)")
    tensor_checks.check_dtype("b", b, (dtype,), f"cast it with b.to({a.dtype})")
    allowed = (dtype, WIDE_DTYPE)
    if out_dtype is None:
        out_dtype = out.dtype if out is not None and DTYPE_NAMES.get(out.dtype) in allowed else a.dtype
    remedy = f"omit it for {a.dtype}, the operands'"
    out_dtype = tensor_checks.check_out_dtype(out_dtype, allowed, remedy=remedy)
    if bias is not None:
        if b.ndim == 1:
            raise ValueError("bias must be None with a 1-D b: the result has no n dimension; add it to the result")
        tensor_checks.check_bias(bias, b.shape[-1], out_dtype)
    if out is not None:
        tensor_checks.check_out(out, shape, out_dtype, allowed)
    if 0 in (*shape, a.shape[-1]):
        return tensor_checks.run_nothing if accumulate else _run_without_matmuls
    pointers = [tensor.data_ptr() for tensor in (a, b, out) if tensor is not None]
    problem, is_transposed, copies = arrangement(
        a,
        b,
        out,
        shape,
        a_dtype=dtype,
        b_dtype=dtype,
        out_dtype=DTYPE_NAMES[out_dtype],
        has_bias=bias is not None,
        accumulate=accumulate,
        is_aligned=not any(pointer % UNIT_BYTES for pointer in pointers),
    )
    plan = make(problem)
    copies = {**copies, **tensor_checks.strided(bias=bias)}
    if is_transposed:
        plan = _with_swapped_operands(plan)
    elif is_torch_plan(plan) and not copies:
        plan.direct = vendor.direct(problem, a, b)
    return tensor_checks.with_copies(SPEC, plan, copies)


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim == 0:
            raise ValueError(f"{name}.shape=[] must have at least 1 dimension; multiply by a number with a * b")
    tensor_checks.check_k(SPEC.name, a, b)
    return result_shape(a.shape, b.shape)


def _with_swapped_operands(plan: Plan) -> Plan:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: None) -> None:
        plan(b, a, out, bias)

    return run


def _run_without_matmuls(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The plan for an empty sum: zeros, and the bias."""
    out.zero_()
    if bias is not None:
        out += bias
