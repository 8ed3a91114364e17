"""Backend in plain torch, on any device: a float32 matmul, rounded once at the end."""

from __future__ import annotations

import torch

from stoneware.ops.backend import Plan, reference
from stoneware.ops.matmul import operand_views
from stoneware.specs.matmul_problem import Problem


def _plan(problem: Problem) -> Plan:
    views = operand_views.make(problem)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        a, b, out = views(a, b, out)
        d = a.float() @ b.float()
        if bias is not None:
            d += bias
        if problem.accumulate:
            d += out
        out.copy_(d)

    return run


BACKEND = reference(_plan)
