"""A kernel of somebody else's package: out[i] = x[i] * factor + shift, for i < count."""

import triton
import triton.language as tl

import stoneware as sw


@sw.autotune(
    configs=[
        triton.Config({"TILE": tile}, num_warps=num_warps)
        for tile in (256, 512, 1024, 2048, 4096)
        for num_warps in (4, 8)
    ],
    key=["count"],
)
@triton.jit
def axpb(x, out, factor, shift, count, TILE: tl.constexpr):
    idx = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + idx, mask=idx < count)
    tl.store(out + idx, value * factor + shift, mask=idx < count)
