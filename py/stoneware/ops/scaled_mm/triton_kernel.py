"""fp8 scaled matmul in Triton: out = scale_a * scale_b * (a . b^T) + bias.

    a        [m, k]  e4m3, row stride lda, contiguous along k
    b        [n, k]  e4m3, row stride ldb, contiguous along k (torch's column-major [k, n] operand)
    out      [m, n]  bf16 or fp16, row stride ldd, contiguous along n
    scale_a  [m] or [1]  fp32, element i at scale_a + i * scale_a_stride (stride 1 or 0)
    scale_b  [n] or [1]  fp32, element j at scale_b + j * scale_b_stride (stride 1 or 0)
    bias     [n]  of out's type; read only if has_bias != 0, so that the pointer may be null
    accumulator: fp32

The grid is one-dimensional: one program per output tile, ceil(m / TILE_M) * ceil(n / TILE_N) of
them, ordered in groups of GROUP_M tile rows so that programs that run together share their operands
in L2.

What makes it fast where m is small: with SWAP the tile of the tensor core is that of out^T = b .
a^T, so its long side (64 rows of wgmma and tcgen05) runs along n and the short side along m; 16
rows of a cost 16, not 64.

e4m3 on GPUs without it: Triton has no e4m3 below sm_89, so there the operands come in as uint8 (the
signature says which) and are widened to fp16 by moving bits: sign to bit 15, exponent and mantissa
to bits 13..7. That is exact, zeros and subnormals included, and scales each operand by 2^-8 (the
exponent biases are 7 and 15), so the accumulator is multiplied by 2^16 at the end. The two NaN
codes 0x7f and 0xff would read as 1.875; they are replaced by fp16's NaN.

The file imports triton alone and is compiled during the build, never by a user; n, k, lda, ldb and
ldd are compiled as multiples of 16, m is not.
"""

import triton
import triton.language as tl


@triton.jit
def _e4m3_codes_to_fp16(codes):
    """uint8 codes of e4m3 -> fp16 values times 2^-8, NaN kept."""
    bits = codes.to(tl.uint16)
    magnitude = bits & 0x7F
    widened = ((bits & 0x80) << 8) | (magnitude << 7)
    widened = tl.where(magnitude == 0x7F, 0x7E00, widened)
    return widened.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def scaled_mm(
    a,
    b,
    out,
    scale_a,
    scale_b,
    bias,
    m,
    n,
    k,
    lda,
    ldb,
    ldd,
    scale_a_stride,
    scale_b_stride,
    has_bias,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
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
    # Rows past the edge read the last row again: always in bounds, and the loop needs only the
    # mask of k. 64-bit, since m * lda may exceed 2^31.
    a_rows = a + tl.minimum(m_idx, m - 1).to(tl.int64) * lda
    b_rows = b + tl.minimum(n_idx, n - 1).to(tl.int64) * ldb

    is_codes: tl.constexpr = a.dtype.element_ty == tl.uint8
    if SWAP:
        a_tile_ptrs = a_rows[None, :] + k_idx[:, None]
        b_tile_ptrs = b_rows[:, None] + k_idx[None, :]
        accumulator = tl.zeros((TILE_N, TILE_M), dtype=tl.float32)
    else:
        a_tile_ptrs = a_rows[:, None] + k_idx[None, :]
        b_tile_ptrs = b_rows[None, :] + k_idx[:, None]
        accumulator = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)

    for k_start in range(0, k, TILE_K):
        k_left = k - k_start
        if SWAP:
            a_mask = k_idx[:, None] < k_left
            b_mask = k_idx[None, :] < k_left
        else:
            a_mask = k_idx[None, :] < k_left
            b_mask = k_idx[:, None] < k_left
        a_tile = tl.load(a_tile_ptrs, mask=a_mask, other=0.0)
        b_tile = tl.load(b_tile_ptrs, mask=b_mask, other=0.0)
        if is_codes:
            a_tile = _e4m3_codes_to_fp16(a_tile)
            b_tile = _e4m3_codes_to_fp16(b_tile)
        if SWAP:
            accumulator = tl.dot(b_tile, a_tile, accumulator)
        else:
            accumulator = tl.dot(a_tile, b_tile, accumulator)
        a_tile_ptrs += TILE_K
        b_tile_ptrs += TILE_K

    if SWAP:
        accumulator = tl.trans(accumulator)
    if is_codes:
        accumulator *= 65536.0  # 2^16: both operands came in scaled by 2^-8
    in_m = m_idx < m
    in_n = n_idx < n
    row_scale = tl.load(scale_a + m_idx * scale_a_stride, mask=in_m, other=0.0)
    column_scale = tl.load(scale_b + n_idx * scale_b_stride, mask=in_n, other=0.0)
    column_bias = tl.load(bias + n_idx, mask=in_n & (has_bias != 0), other=0.0).to(tl.float32)
    result = accumulator * row_scale[:, None] * column_scale[None, :] + column_bias[None, :]
    out_ptrs = out + m_idx.to(tl.int64)[:, None] * ldd + n_idx[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
