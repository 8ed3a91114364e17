"""Weights in the layout of MXFP8 checkpoints."""

from __future__ import annotations

import torch


def spread(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Scales [..., n / i, k / j] at each element of [..., n, k]."""
    rows, columns = (size // number for size, number in zip(shape[-2:], scale.shape[-2:]))
    return scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def mxfp8(dense: torch.Tensor, rows: int = 1, columns: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the float32 scales: powers of two with which the largest value of each block fits."""
    largest = dense.abs().unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns)).amax((-3, -1))
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (dense / spread(scale, dense.shape)).to(torch.float8_e4m3fn), scale
