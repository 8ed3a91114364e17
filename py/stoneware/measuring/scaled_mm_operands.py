"""Operands of scaled_mm for measuring, and its float64 reference."""

from __future__ import annotations

import torch

from stoneware.measuring import operands
from stoneware.measuring.operands import Device, Operands
from stoneware.specs.scaled_mm_problem import BLOCK, Problem, num_blocks, padded_num_blocks


def make(problem: Problem, device: Device, period: int | None = None) -> Operands:
    """See `measuring.operands.make`, and `product` there for `period`."""
    if problem.has_block_scales:
        scale_a, scale_b = _block_scales(problem, device)
    else:
        scale_a = operands.scale(problem.m if problem.scale_a == "row" else 1, 1, device)
        scale_b = operands.scale(1, problem.n if problem.scale_b == "row" else 1, device)
    return operands.product(problem, device, period=period, scale_a=scale_a, scale_b=scale_b)


def reference(tensors: Operands) -> torch.Tensor:
    """See `measuring.operands.reference`."""
    result = torch.empty(tensors.out.shape, dtype=torch.float32, device=tensors.a.device)
    scale_b = tensors.scale_b
    if tensors.problem.has_block_scales:
        scale_b = scale_b[: num_blocks(tensors.problem.k)]  # without torch's padding
    operands.multiply(result, tensors.a, tensors.b, tensors.scale_a, scale_b, tensors.bias, block=BLOCK)
    return result


def _block_scales(problem: Problem, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """scale_a [m, k / 128] and scale_b [k / 128, n or ceil(n / 128)], or with as many rows as torch wants;
    with the problem's strides, in memory that ends with the last element. What they skip is NaN."""
    blocks, columns = num_blocks(problem.k), problem.n if problem.scales == "block_1d" else num_blocks(problem.n)
    rows = padded_num_blocks(problem.k) if problem.is_scale_b_padded else blocks
    strides_a = problem.scale_a_stride_m, problem.ld_scale_a
    strides_b = problem.ld_scale_b, problem.scale_b_stride_n
    _, scale_a = operands.poisoned((problem.m, blocks), strides_a, torch.float32, device)
    _, scale_b = operands.poisoned((rows, columns), strides_b, torch.float32, device)
    scale_a.copy_(operands.scale(problem.m, blocks, device))
    scale_b[:blocks].copy_(operands.scale(blocks, columns, device))
    return scale_a, scale_b
