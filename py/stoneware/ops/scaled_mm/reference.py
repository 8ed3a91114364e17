"""Backend in plain torch, on any device: accurate, but slow.

    d = (float32(a) @ float32(b)) * scale_a * scale_b + bias, rounded once to the out dtype

With block scales this is summed over the blocks of k, each with its own scales.
"""

from __future__ import annotations

import torch

from stoneware.ops.backend import Plan, reference
from stoneware.specs.scaled_mm_problem import BLOCK, Problem


def _plan(problem: Problem) -> Plan:
    n, step = problem.n, BLOCK if problem.has_block_scales else problem.k

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        d = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for block, begin in enumerate(range(0, problem.k, step)):
            # An e4m3 has 4 significant bits and an e5m2 has 3, so each product is exact even if torch
            # multiplies float32 in TF32; the scales are applied to the float32 sum.
            partial = a[:, begin : begin + step].float() @ b[begin : begin + step].float()
            if problem.has_block_scales:
                partial *= scale_a[:, block, None]
                partial *= scale_b[block] if scale_b.shape[1] == n else scale_b[block].repeat_interleave(BLOCK)[:n]
            else:
                partial *= scale_a
                partial *= scale_b
            d += partial
        if bias is not None:
            d += bias
        out.copy_(d)

    return run


BACKEND = reference(_plan)
