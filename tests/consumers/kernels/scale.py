"""out[i] = x[i] * factor, for i < count."""

import triton
import triton.language as tl


@triton.jit
def scale(x, out, factor, count, TILE: tl.constexpr):
    idx = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + idx, tl.load(x + idx, mask=idx < count) * factor, mask=idx < count)
