"""Backend of the vendor library: torch.mm and torch.bmm, with a bias torch.addmm and torch.baddbmm; cuBLAS on
a GPU."""

from __future__ import annotations

import torch

from stoneware.ops.backend import Plan, TorchBackend
from stoneware.ops.cuda_context import THREAD, make_current
from stoneware.ops.matmul import operand_views
from stoneware.specs.matmul import VENDOR
from stoneware.specs.matmul_problem import Problem


def _plan(problem: Problem) -> Plan:
    views = operand_views.make(problem)
    is_batch = problem.batch > 1
    multiply, multiply_add = (torch.bmm, torch.baddbmm) if is_batch else (torch.mm, torch.addmm)
    is_wide = problem.out_dtype != problem.a_dtype

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        if not THREAD.has_context:
            make_current()
        if is_batch or not a.ndim == b.ndim == out.ndim == 2:  # otherwise nothing was folded
            a, b, out = views(a, b, out)
        if is_wide:
            # torch adds a float32 bias to 16-bit operands only at some sizes. A separate sum in float32 is as
            # accurate.
            multiply(a, b, out_dtype=torch.float32, out=out)
            if bias is not None:
                out += bias
        elif bias is None:
            multiply(a, b, out=out)
        else:
            multiply_add(bias, a, b, out=out)

    return run


class _Vendor(TorchBackend):
    def may_have_our_bits(self, problem: Problem) -> bool:
        return True


BACKEND = _Vendor(VENDOR, _plan)
