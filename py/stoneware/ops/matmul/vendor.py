"""Backend of the vendor library: torch.mm and torch.bmm, with a bias or added to out torch.addmm and torch.baddbmm;
cuBLAS on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.ops.backend import TorchBackend, TorchPlan, torch_plan
from stoneware.ops.cuda_context import THREAD, make_current
from stoneware.ops.matmul import operand_views
from stoneware.ops.native_call import Direct
from stoneware.specs.matmul import SPEC, VENDOR
from stoneware.specs.matmul_problem import Problem


def _plan(problem: Problem) -> TorchPlan:
    views = operand_views.make(problem)
    is_batch = problem.batch > 1
    multiply, multiply_add = (torch.bmm, torch.baddbmm) if is_batch else (torch.mm, torch.addmm)
    is_wide = problem.out_dtype != problem.a_dtype
    wide: dict[str, Any] = {"out_dtype": torch.float32} if is_wide else {}

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        if not THREAD.has_context:
            make_current()
        if is_batch or not a.ndim == b.ndim == out.ndim == 2:  # otherwise nothing was folded
            a, b, out = views(a, b, out)
        if problem.accumulate:
            multiply_add(out, a, b, out=out, **wide)
        elif is_wide:
            # torch adds a float32 bias to 16-bit operands only at some sizes. A separate sum in float32 is as
            # accurate.
            multiply(a, b, out=out, **wide)
            if bias is not None:
                out += bias
        elif bias is None:
            multiply(a, b, out=out)
        else:
            multiply_add(bias, a, b, out=out)

    return torch_plan(run)


def direct(problem: Problem, a: torch.Tensor, b: torch.Tensor) -> Direct | None:
    """`TorchPlan.direct` for the operands of a call that are not copied, or None."""
    if problem.out_dtype != problem.a_dtype:
        if problem.has_bias or not a.ndim == b.ndim == 2:
            return None
        return Direct(torch.mm, _OPERANDS, (torch.float32,))
    if a.ndim == b.ndim == 2:
        return Direct(torch.addmm, _OPERANDS_WITH_BIAS) if problem.has_bias else Direct(torch.mm, _OPERANDS)
    if a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] > 1:
        return Direct(torch.baddbmm, _OPERANDS_WITH_BIAS) if problem.has_bias else Direct(torch.bmm, _OPERANDS)
    # torch.matmul makes one matmul of all rows, as the problem is.
    is_folded = b.ndim == 2 and a.ndim > 2 and a.is_contiguous() and not problem.has_bias
    return Direct(torch.matmul, _OPERANDS) if is_folded else None


_OPERANDS = tuple(map(SPEC.plan_order.index, ("a", "b")))
_OPERANDS_WITH_BIAS = tuple(map(SPEC.plan_order.index, ("bias", "a", "b")))
"""Positions among the tensors of a plan."""


class _Vendor(TorchBackend):
    def may_have_our_bits(self, problem: Problem) -> bool:
        return not problem.accumulate


BACKEND = _Vendor(VENDOR, _plan)
