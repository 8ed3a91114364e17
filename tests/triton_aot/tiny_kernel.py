"""A kernel of the tests' own: out[i] = x[i] * factor + shift, for i < count."""

import triton
import triton.language as tl


@triton.jit
def _scaled(value, factor):
    return value * factor


@triton.jit
def axpb(x, out, factor, shift, count, TILE: tl.constexpr):
    idx = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + idx, mask=idx < count)
    tl.store(out + idx, _scaled(value, factor) + shift, mask=idx < count)


@triton.jit
def gemm(a, b, out, k, TILE: tl.constexpr, TILE_K: tl.constexpr):
    """One tile of a . b, dense; large TILE_K with many stages asks for much shared memory."""
    idx = tl.arange(0, TILE)
    k_idx = tl.arange(0, TILE_K)
    accumulator = tl.zeros((TILE, TILE), dtype=tl.float32)
    for k_start in range(0, k, TILE_K):
        a_tile = tl.load(a + idx[:, None] * k + k_start + k_idx[None, :])
        b_tile = tl.load(b + (k_start + k_idx[:, None]) * TILE + idx[None, :])
        accumulator = tl.dot(a_tile, b_tile, accumulator)
    tl.store(out + idx[:, None] * TILE + idx[None, :], accumulator)


def not_a_kernel():
    """Plain Python, for the test of a wrong --function."""
