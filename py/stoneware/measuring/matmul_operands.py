"""Operands of matmul for measuring, and its float64 reference."""

from __future__ import annotations

import torch

from stoneware.measuring import operands
from stoneware.measuring.operands import Device, Operands
from stoneware.specs.matmul_problem import Problem


def make(problem: Problem, device: Device, period: int | None = None) -> Operands:
    """See `measuring.operands.make`; of a batch the tensors are [batch, m, k] and so on. For `period`
    see `product` there."""
    strides = {"a": problem.batch_stride_a, "b": problem.batch_stride_b, "out": problem.batch_stride_d}
    batch = {name: (problem.batch, stride) for name, stride in strides.items()}
    return operands.product(problem, device, batch if problem.batch > 1 else None, period=period)


def reference(tensors: Operands) -> torch.Tensor:
    """See `measuring.operands.reference`."""
    result = torch.empty(tensors.out.shape, dtype=torch.float32, device=tensors.a.device)
    products = (result, tensors.a, tensors.b)
    for d, a, b in zip(*products) if result.dim() == 3 else (products,):
        operands.multiply(d, a, b, bias=tensors.bias)
    return result
