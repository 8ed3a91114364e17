"""Backend in plain torch, on any device: right rather than fast. It reads the offsets, and so waits
for the device.

    d = (float32(a) @ float32(b[g])) * scale_a * scale_b[g], rounded once to the out dtype
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.kernels.config import Config
from stoneware.ops.grouped_mm.problem import Problem
from stoneware.runtime.device import Device

NAME = "reference"
CONFIG = Config(backend=NAME, kernel="torch.matmul_float32")


def supports(problem: Problem, device: Device) -> str | None:
    """Always None: it runs every problem anywhere."""
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    return [CONFIG]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    return _run


def _run(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
) -> None:
    ends = offs.tolist()
    begins = [0, *ends[:-1]]
    for group, (begin, end) in enumerate(zip(begins, ends)):
        if not begin <= end <= a.shape[0]:
            raise ValueError(
                f"offs[{group}]={end} must be at least the offset before it, {begin}, and at most "
                f"a's rows, {a.shape[0]}; pass the end row of each group"
            )
        if begin == end:
            continue
        rows = slice(begin, end)
        d = a[rows].float() @ b[group].float()
        if scale_a is not None and scale_b is not None:
            d *= scale_a[rows, None]
            d *= scale_b[group]
        out[rows] = d.to(out.dtype)
