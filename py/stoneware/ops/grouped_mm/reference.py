"""Backend in plain torch, on any device: accurate, but slow. It reads the offsets, which synchronizes.

    d = (float32(a) @ float32(b[g])) * scale_a * scale_b[g], rounded once to the out dtype

With block scales this is summed over the blocks of k, each with its own scales.
"""

from __future__ import annotations

import torch

from stoneware.ops.backend import reference
from stoneware.specs.scaled_mm_problem import BLOCK


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
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
        if scale_a is None or scale_b is None:
            d = a[rows].float() @ b[group].float()
        elif scale_a.ndim == 1:
            d = a[rows].float() @ b[group].float()
            d *= scale_a[rows, None]
            d *= scale_b[group]
        else:
            d = _with_block_scales(a[rows], b[group], scale_a[rows], scale_b[group])
        out[rows] = d.to(out.dtype)


def _with_block_scales(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    d = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for block, begin in enumerate(range(0, a.shape[1], BLOCK)):
        partial = a[:, begin : begin + BLOCK].float() @ b[begin : begin + BLOCK].float()
        partial *= scale_a[:, block, None]
        partial *= scale_b[block].repeat_interleave(BLOCK)[: b.shape[1]]
        d += partial
    return d


BACKEND = reference(lambda problem: _run)
