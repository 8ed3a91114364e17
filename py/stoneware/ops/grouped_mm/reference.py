"""Backend in plain torch, on any device: accurate, but slow. It reads the offsets, which synchronizes.

d = (float32(a) @ float32(b[g])) * scale_a * scale_b[g], rounded once to the out dtype
"""

from __future__ import annotations

import torch

from stoneware.ops.backend import reference


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
        d = a[rows].float() @ b[group].float()
        if scale_a is not None and scale_b is not None:
            d *= scale_a[rows, None]
            d *= scale_b[group]
        out[rows] = d.to(out.dtype)


BACKEND = reference(lambda problem: _run)
