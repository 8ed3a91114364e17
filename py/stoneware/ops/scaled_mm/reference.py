"""Backend in plain torch, on any device: right rather than fast.

    d = (float32(a) @ float32(b)) * scale_a * scale_b + bias, rounded once to the out dtype

and with block scales the sum of that over the blocks of k, each with its scales.
"""

from __future__ import annotations

import torch

from stoneware.ops.backend import reference
from stoneware.ops.scaled_mm.problem import BLOCK


def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    # An e4m3 has 4 significant bits and an e5m2 has 3, so that a product is exact even if torch
    # multiplies float32 in TF32; the scales are applied to the float32 sum.
    d = a.float() @ b.float()
    d *= scale_a
    d *= scale_b
    if bias is not None:
        d += bias
    out.copy_(d)


def _run_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    n = b.shape[1]
    d = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for block in range(a.shape[1] // BLOCK):
        elements = slice(block * BLOCK, (block + 1) * BLOCK)
        product = a[:, elements].float() @ b[elements].float()
        product *= scale_a[:, block, None]
        columns = scale_b[block]
        product *= columns if len(columns) == n else columns.repeat_interleave(BLOCK)[:n]
        d += product
    if bias is not None:
        d += bias
    out.copy_(d)


BACKEND = reference(lambda problem: _run_blocks if problem.has_block_scales else _run)
