"""bf16 or fp16 matmul in Triton: out = a . b + bias.

    a     [m, k]  row stride lda, contiguous along k
    b     [k, n]  layout nt (B_K_MAJOR): column stride ldb, contiguous along k, as weight.t() is;
                  layout nn: row stride ldb, contiguous along n
    out   [m, n]  row stride ldd, contiguous along n
    bias  [n]     read only if has_bias != 0, so that the pointer may be null
    all of one type, bf16 or fp16; accumulator: fp32

The grid is one-dimensional: one program per output tile, ceil(m / TILE_M) * ceil(n / TILE_N) of
them, ordered in groups of GROUP_M tile rows so that programs that run together share their operands
in L2. What makes it fast is that both operands stream through shared memory by 16-byte asynchronous
copies, which is why n, k, lda, ldb and ldd are compiled as multiples of 16; m is not.

The file imports triton alone and is compiled during the build, never by a user.
"""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a,
    b,
    out,
    bias,
    m,
    n,
    k,
    lda,
    ldb,
    ldd,
    has_bias,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
):
    program = tl.program_id(0)
    num_tiles_m = tl.cdiv(m, TILE_M)
    num_tiles_n = tl.cdiv(n, TILE_N)
    tiles_per_group = GROUP_M * num_tiles_n
    first_tile_m = program // tiles_per_group * GROUP_M
    group_rows = min(num_tiles_m - first_tile_m, GROUP_M)
    tile_m = first_tile_m + program % tiles_per_group % group_rows
    tile_n = program % tiles_per_group // group_rows

    m_idx = tile_m * TILE_M + tl.arange(0, TILE_M)
    n_idx = tile_n * TILE_N + tl.arange(0, TILE_N)
    k_idx = tl.arange(0, TILE_K)
    in_n = n_idx < n
    # Rows past the edge read the last row again: always in bounds, and the loop needs no mask of m.
    # 64-bit, since m * lda, n * ldb and k * ldb may exceed 2^31.
    a_tile_ptrs = a + tl.minimum(m_idx, m - 1).to(tl.int64)[:, None] * lda + k_idx[None, :]
    if B_K_MAJOR:
        b_tile_ptrs = b + tl.minimum(n_idx, n - 1).to(tl.int64)[None, :] * ldb + k_idx[:, None]
    else:
        b_tile_ptrs = b + k_idx.to(tl.int64)[:, None] * ldb + n_idx[None, :]

    accumulator = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k_start in range(0, k, TILE_K):
        k_left = k - k_start
        a_tile = tl.load(a_tile_ptrs, mask=k_idx[None, :] < k_left, other=0.0)
        if B_K_MAJOR:
            b_tile = tl.load(b_tile_ptrs, mask=k_idx[:, None] < k_left, other=0.0)
            b_tile_ptrs += TILE_K
        else:
            b_tile = tl.load(b_tile_ptrs, mask=(k_idx[:, None] < k_left) & in_n[None, :], other=0.0)
            b_tile_ptrs += tl.cast(ldb, tl.int64) * TILE_K
        accumulator = tl.dot(a_tile, b_tile, accumulator)
        a_tile_ptrs += TILE_K

    column_bias = tl.load(bias + n_idx, mask=in_n & (has_bias != 0), other=0.0).to(tl.float32)
    result = accumulator + column_bias[None, :]
    out_ptrs = out + m_idx.to(tl.int64)[:, None] * ldd + n_idx[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=(m_idx < m)[:, None] & in_n[None, :])
