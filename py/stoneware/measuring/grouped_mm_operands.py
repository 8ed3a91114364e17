"""Operands of grouped_mm for measuring, and its float64 reference."""

from __future__ import annotations

import bisect
import itertools
import random

import torch

from stoneware.measuring import operands
from stoneware.measuring.operands import Device, Operands
from stoneware.specs.grouped_mm_problem import Problem
from stoneware.specs.scaled_mm_problem import BLOCK, num_blocks

_LEAST_SHARE, _LARGEST_SHARE = 0.7, 1.3
"""Rows of a group, in units of the mean, drawn like in DeepGEMM (tests/generators.py)."""


def ragged(num_rows: int, num_groups: int) -> list[int]:
    """How many rows each group has where they are to be as uneven as a router leaves them.

    Each group draws its share, uniformly from 0.7 to 1.3 of the mean; then each row draws its group
    by the shares. So small groups vary as counts of rare events do (some are empty at a mean of
    few rows), and large ones by the shares. The seed is fixed: equal arguments give equal sizes, in
    every process and on every machine.

    Returns:
      `num_groups` counts; their sum is `num_rows`.
    """
    # random() alone: Python promises its sequence to every version, and no other draw's.
    draw = random.Random(0).random
    spread = _LARGEST_SHARE - _LEAST_SHARE
    ends = list(itertools.accumulate(_LEAST_SHARE + spread * draw() for _ in range(num_groups)))
    counts = [0] * num_groups
    for _ in range(num_rows):
        counts[bisect.bisect(ends, draw() * ends[-1], hi=num_groups - 1)] += 1
    return counts


def make(problem: Problem, device: Device) -> Operands:
    """See `measuring.operands.make`; groups are as `ragged` deals them out."""
    m, num_groups = problem.m, problem.num_groups
    offs = torch.tensor(ragged(m, num_groups), device=device).cumsum(0).to(torch.int32)
    scale_a = scale_b = None
    if problem.scales == "row":
        scale_a, scale_b = operands.scale(1, m, device)[0], operands.scale(num_groups, problem.n, device)
    elif problem.scales == "block":
        scale_a, scale_b = _block_scales(problem, device)
    groups = {"b": (num_groups, problem.group_stride_b)}
    return operands.product(problem, device, groups, offs=offs, scale_a=scale_a, scale_b=scale_b)


def _block_scales(problem: Problem, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """scale_a [m, k / 128] and scale_b [groups, k / 128, ceil(n / 128)], with the problem's strides."""
    shape_a = problem.m, num_blocks(problem.k)
    shape_b = problem.num_groups, num_blocks(problem.k), num_blocks(problem.n)
    strides_a = problem.scale_a_stride_m, problem.ld_scale_a
    strides_b = problem.group_stride_scale_b, problem.ld_scale_b, problem.scale_b_stride_n
    _, scale_a = operands.poisoned(shape_a, strides_a, torch.float32, device)
    _, scale_b = operands.poisoned(shape_b, strides_b, torch.float32, device)
    scale_a.copy_(operands.scale(*shape_a, device))
    scale_b.copy_(operands.scale(shape_b[0] * shape_b[1], shape_b[2], device).view(shape_b))
    return scale_a, scale_b


def reference(tensors: Operands) -> torch.Tensor:
    """See `measuring.operands.reference`."""
    result = torch.empty(tensors.out.shape, dtype=torch.float32, device=tensors.a.device)
    ends = tensors.offs.tolist()
    for group, (begin, end) in enumerate(zip([0, *ends], ends)):
        rows = slice(begin, end)
        scales: tuple[torch.Tensor, ...] = ()
        block = 1
        if tensors.problem.has_block_scales:
            scales, block = (tensors.scale_a[rows], tensors.scale_b[group]), BLOCK
        elif tensors.scales:
            scales = tensors.scale_a[rows, None], tensors.scale_b[group, None]
        operands.multiply(result[rows], tensors.a[rows], tensors.b[group], *scales, block=block)
    return result
