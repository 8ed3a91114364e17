"""Operands of toy_add, and its float64 reference."""

from __future__ import annotations

import torch

from stoneware.measuring import operands
from stoneware.measuring.operands import Operands


def make(problem, device):
    shape = problem.m, problem.n
    out_base, out = operands.poisoned(shape, (problem.ldd, 1), torch.float32, device)
    return Operands(
        problem=problem,
        out_base=out_base,
        tensors={"a": torch.randn(shape, device=device), "b": torch.randn(shape, device=device), "out": out},
    )


def reference(tensors):
    return (tensors.a.double() + 2 * tensors.b.double()).float()
