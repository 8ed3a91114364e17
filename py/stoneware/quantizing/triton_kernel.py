"""Quantizes a matrix to fp8, in one or both orientations: x[m, k] ~ x8[m, k] * scale.

    scale = amax / MAX of a unit of x, and x8 = fp8(x * (1 / scale)), rounded to nearest even

x is row-major with leading dimension ldx, in 16 bits; nothing is summed. x8 is
dense row-major, xt8 the dense row-major transpose [k, m]. A unit is a row, a column (a row of the
transpose), the whole matrix, 1 x 128 elements along a row, 128 x 1 along a column, or 128 x 128.

    quantize_rows    grid: a row of x a program; the row is read once into registers
    silu_mul_rows    the same of silu(gate) * up, from rows of gate and up side by side
    silu_mul_runs    the same with a scale for each 1 x 128 elements; grid: (tiles of 128 columns, tiles of rows)
    rms_norm_rows    the same of a row that is divided by its root mean square; writes the row, too
    reduce_amax      grid: blocks of rows times blocks of columns; the largest |x| of each block, or of each
                     column of it, as a partial result
    quantize_rows_columns
                     grid: blocks of rows; the rows of a block, and the largest |x| of each of their columns
    column_scales    grid: blocks of columns; the scales of columns from partial results
    quantize_matrix  grid: tiles of rows times tiles of 128 columns; a tile is read once and written in both
                     orientations, with the scale of the matrix from partial results
    quantize_columns grid: the same; the transpose of a tile, with the scales of its columns
    quantize_blocks  the same for units of 1 x 128, 128 x 1 and 128 x 128, which a tile of 128 rows has whole; it is
                     read in parts, again from the caches for the other orientation
    quantize_short_columns
                     grid: tiles of 32 columns, and rows; both orientations of a matrix with few rows, without
                     partial results

Those of a gated feed-forward h = silu(gate) * up that trains, in tiles of rows and of columns:

    silu_mul_tiles   h in 16 bits
    silu_mul_grad    the gradients of gate and up in 16 bits
    swiglu_amax      grid: (tiles of 128 columns, blocks of rows); the largest magnitudes of these gradients and of h,
                     as partial results for their rows and columns
    swiglu_grad      the gradients in fp8 in both orientations, and h transposed, computed again from gate and up

And of operands that are in fp8 already:

    transpose_tiles  grid: tiles of rows times tiles of columns; the transpose, as columns of a wider matrix

A launch of quantize_rows, of the kernels from reduce_amax to quantize_short_columns, and of transpose_tiles does the
work of up to three matrices: its parameters come in threes, one after the other, and `blocks` is how many programs each
matrix has.

Each is bound by memory; what makes them fast is that x is read once where its units allow it, and that a loop
loads what comes next while it works.

The largest |x| is found among bit patterns: for floats without their sign these order as the numbers
do, with infinity and then NaN above them, so that NaN is not lost. A unit with an infinity or a NaN gets
the scale NaN and values NaN; one of zeros gets the scale 1.
"""

import triton
import triton.language as tl


@triton.jit
def _bits(x):
    """|x| as an ordered integer."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _quotient(x, inverse, divisor):
    """x / divisor, rounded to nearest if it is normal, from the divisor's rounded inverse (Markstein, Computation of
    elementary functions on the IBM RISC System/6000 processor, 1990). It has no branch, unlike a rounded division."""
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _inverse(scale):
    """1 / scale, rounded to nearest, of the scales that `_scale` returns: an approximation and two Newton steps."""
    inverse = 1.0 / scale
    inverse = tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)
    return tl.fma(tl.fma(-scale, inverse, 1.0), inverse, inverse)


@triton.jit
def _scale(bits, MAX: tl.constexpr, power_of_two):
    """The scale of a unit from the bits of its largest |x|, and its inverse."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = _quotient(amax, 1.0 / MAX, MAX)
    scale = tl.maximum(scale, 1.1754943508222875e-38)  # the least normal: its inverse is finite
    rounded_up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    scale = tl.where(power_of_two != 0, rounded_up.to(tl.float32, bitcast=True), scale)
    scale = tl.where(bits == 0, 1.0, scale)
    scale = tl.where(bits >= 0x7F800000, float("nan"), scale)
    return scale, _inverse(scale)


@triton.jit
def _matrix(blocks_0, blocks_1):
    """Which of three matrices this program works on, and its number among the programs of that matrix."""
    program = tl.program_id(0)
    which = (program >= blocks_0).to(tl.int32) + (program >= blocks_0 + blocks_1).to(tl.int32)
    return which, program - _of(which, 0, blocks_0, blocks_0 + blocks_1)


@triton.jit
def _of(which, first, second, third):
    return tl.where(which == 0, first, tl.where(which == 1, second, third))


@triton.jit
def _row(x, factors, at, mask, SCALED: tl.constexpr):
    values = tl.load(x + at, mask=mask, other=0.0)
    if SCALED:
        values = values.to(tl.float32) * tl.load(factors + at, mask=mask, other=0.0)
    return values


@triton.jit
def _store_row(values, x8, columns, k, power_of_two, MAX: tl.constexpr):
    """Writes a whole row in fp8, and returns its scale."""
    scale, inverse = _scale(tl.max(_bits(values), axis=0), MAX, power_of_two)
    tl.store(x8 + columns, (values.to(tl.float32) * inverse).to(x8.dtype.element_ty), mask=columns < k)
    return scale


@triton.jit
def quantize_rows(
    x_0, x_1, x_2, factors_0, factors_1, factors_2, x8_0, x8_1, x8_2, scales_0, scales_1, scales_2, k_0, k_1, k_2,
    ldx_0, ldx_1, ldx_2, blocks_0, blocks_1, blocks_2,
    power_of_two, MAX: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A row of x, or of x * factors [k] in float32 if SCALED. ONE: the row fits BLOCK; otherwise it is read twice,
    the second time from the L2."""
    which, program = _matrix(blocks_0, blocks_1)
    factors, scales = _of(which, factors_0, factors_1, factors_2), _of(which, scales_0, scales_1, scales_2)
    k = _of(which, k_0, k_1, k_2)
    row = program.to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = _of(which, x_0, x_1, x_2) + row * _of(which, ldx_0, ldx_1, ldx_2)
    x8 = _of(which, x8_0, x8_1, x8_2) + row * k
    if ONE:
        scale = _store_row(_row(x, factors, columns, columns < k, SCALED), x8, columns, k, power_of_two, MAX)
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, k, BLOCK):
            at = begin + columns
            largest = tl.maximum(largest, _bits(_row(x, factors, at, at < k, SCALED)))
        scale, inverse = _scale(tl.max(largest, axis=0), MAX, power_of_two)
        for begin in range(0, k, BLOCK):
            at = begin + columns
            values = _row(x, factors, at, at < k, SCALED)
            tl.store(x8 + at, (values.to(tl.float32) * inverse).to(x8.dtype.element_ty), mask=at < k)
    tl.store(scales + row, scale)


@triton.jit
def transpose_tiles(
    x8_0, x8_1, x8_2, m_0, m_1, m_2, first_0, first_1, first_2, blocks_0, blocks_1, blocks_2,
    xt8, ones, k, ldt, TILE: tl.constexpr,
):  # fmt: skip
    """Columns of xt8 [k, ldt], from `first` on, of x8 [m, k], and ones [k]: the scales of what has none left."""
    which, program = _matrix(blocks_0, blocks_1)
    x8 = _of(which, x8_0, x8_1, x8_2)
    m = _of(which, m_0, m_1, m_2)
    first = _of(which, first_0, first_1, first_2)
    row_tiles = tl.cdiv(m, TILE)
    rows = program % row_tiles * TILE + tl.arange(0, TILE)
    columns = program // row_tiles * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < k)[None, :]
    values = tl.load(x8 + rows.to(tl.int64)[:, None] * k + columns[None, :], mask=mask)
    at = xt8 + first + columns.to(tl.int64)[:, None] * ldt + rows[None, :]
    tl.store(at, tl.trans(values), mask=(columns < k)[:, None] & (rows < m)[None, :])
    if program % row_tiles == 0:
        tl.store(ones + columns, tl.full([TILE], 1.0, tl.float32), mask=columns < k)


@triton.jit
def _silu_mul(gate, up, mask):
    """silu(gate) * up as torch computes it in 16 bits: each of the two rounded."""
    gate_values = tl.load(gate, mask=mask, other=0.0)
    wide = gate_values.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate_values.dtype)
    product = silu.to(tl.float32) * tl.load(up, mask=mask, other=0.0).to(tl.float32)
    return product.to(gate_values.dtype)


@triton.jit
def silu_mul_rows(z, y8, scales, m, k, ldz, power_of_two, MAX: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """A row of silu(z[:, :k]) * z[:, k:]. ONE: the row fits BLOCK; otherwise it is computed twice."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    gate, up, y8 = z + row * ldz, z + row * ldz + k, y8 + row * k
    if ONE:
        scale = _store_row(_silu_mul(gate + columns, up + columns, columns < k), y8, columns, k, power_of_two, MAX)
    else:
        largest = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, k, BLOCK):
            at = begin + columns
            largest = tl.maximum(largest, _bits(_silu_mul(gate + at, up + at, at < k)))
        scale, inverse = _scale(tl.max(largest, axis=0), MAX, power_of_two)
        for begin in range(0, k, BLOCK):
            at = begin + columns
            values = _silu_mul(gate + at, up + at, at < k)
            tl.store(y8 + at, (values.to(tl.float32) * inverse).to(y8.dtype.element_ty), mask=at < k)
    tl.store(scales + row, scale)


@triton.jit
def rms_norm_rows(
    x, weight, y, y8, scales, m, k, ldx, epsilon_bits, power_of_two, MAX: tl.constexpr, BLOCK: tl.constexpr
):
    """y = x / sqrt(mean(x^2) + epsilon) * weight of a row that fits BLOCK, rounded once, and y in fp8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < k
    values = tl.load(x + row * ldx + columns, mask=mask, other=0.0).to(tl.float32)
    epsilon = epsilon_bits.to(tl.float32, bitcast=True)
    inverse_root = tl.rsqrt(tl.sum(values * values, axis=0) / k + epsilon)
    values = values * inverse_root * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = values.to(y.dtype.element_ty)
    tl.store(y + row * k + columns, rounded, mask=mask)
    scale, inverse = _scale(tl.max(_bits(rounded), axis=0), MAX, power_of_two)
    tl.store(y8 + row * k + columns, (rounded.to(tl.float32) * inverse).to(y8.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)


@triton.jit
def reduce_amax(
    x_0, x_1, x_2, partial_0, partial_1, partial_2, m_0, m_1, m_2, k_0, k_1, k_2, ldx_0, ldx_1, ldx_2,
    rows_per_block_0, rows_per_block_1, rows_per_block_2, num_blocks_0, num_blocks_1, num_blocks_2,
    blocks_0, blocks_1, blocks_2,
    PER_COLUMN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[block of rows, block of columns], or [block of rows, k] PER_COLUMN, as bits.

    num_blocks: of columns.
    """
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    partial = _of(which, partial_0, partial_1, partial_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    rows_per_block = _of(which, rows_per_block_0, rows_per_block_1, rows_per_block_2)
    num_blocks = _of(which, num_blocks_0, num_blocks_1, num_blocks_2)
    row_block, column_block = program // num_blocks, program % num_blocks
    columns = column_block * BLOCK + tl.arange(0, BLOCK)
    rows = row_block * rows_per_block + tl.arange(0, ROWS)
    end = tl.minimum(m, (row_block + 1) * rows_per_block)
    largest = tl.zeros([ROWS, BLOCK], tl.int32)
    for step in tl.range(0, rows_per_block, ROWS, num_stages=3):
        mask = (rows + step < end)[:, None] & (columns < k)[None, :]
        values = tl.load(x + (rows + step).to(tl.int64)[:, None] * ldx + columns[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, _bits(values))
    of_columns = tl.max(largest, axis=0)
    if PER_COLUMN:
        tl.store(partial + row_block * k + columns, of_columns, mask=columns < k)
    else:
        tl.store(partial + program, tl.max(of_columns, axis=0))


@triton.jit
def quantize_rows_columns(
    x_0, x_1, x_2, partial_0, partial_1, partial_2, x8_0, x8_1, x8_2, scales_0, scales_1, scales_2, m_0, m_1, m_2,
    k_0, k_1, k_2, ldx_0, ldx_1, ldx_2, rows_per_block_0, rows_per_block_1, rows_per_block_2,
    first_0, first_1, first_2, first_partial_0, first_partial_1, first_partial_2, blocks_0, blocks_1, blocks_2,
    power_of_two,
    MAX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """quantize_rows for ROWS rows at a time, each of which fits BLOCK, and partial[block of rows, k] of their
    columns, as bits. x may be part of a larger matrix: its results begin at row `first`, and at `first_partial`."""
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    partial = _of(which, partial_0, partial_1, partial_2)
    x8 = _of(which, x8_0, x8_1, x8_2)
    scales = _of(which, scales_0, scales_1, scales_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    rows_per_block = _of(which, rows_per_block_0, rows_per_block_1, rows_per_block_2)
    first = _of(which, first_0, first_1, first_2)
    first_partial = _of(which, first_partial_0, first_partial_1, first_partial_2)
    x8 += first.to(tl.int64) * k
    scales += first
    partial += (first_partial + program) * k
    columns = tl.arange(0, BLOCK)
    rows = program * rows_per_block + tl.arange(0, ROWS)
    end = tl.minimum(m, (program + 1) * rows_per_block)
    largest = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(0, rows_per_block, ROWS, num_stages=STAGES):
        at = (rows + step).to(tl.int64)
        mask = (at < end)[:, None] & (columns < k)[None, :]
        values = tl.load(x + at[:, None] * ldx + columns[None, :], mask=mask, other=0.0)
        bits = _bits(values)
        largest = tl.maximum(largest, tl.max(bits, axis=0))
        scale, inverse = _scale(tl.max(bits, axis=1), MAX, power_of_two)
        values8 = (values.to(tl.float32) * inverse[:, None]).to(x8.dtype.element_ty)
        tl.store(x8 + at[:, None] * k + columns[None, :], values8, mask=mask)
        tl.store(scales + at, scale, mask=at < end)
    tl.store(partial + columns, largest, mask=columns < k)


@triton.jit
def column_scales(
    partial_0, partial_1, partial_2, scales_0, scales_1, scales_2, k_0, k_1, k_2,
    num_partials_0, num_partials_1, num_partials_2, blocks_0, blocks_1, blocks_2,
    power_of_two, MAX: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scale of each of k columns from partial results, PARTIALS of which are read at a time."""
    which, program = _matrix(blocks_0, blocks_1)
    partial = _of(which, partial_0, partial_1, partial_2)
    scales = _of(which, scales_0, scales_1, scales_2)
    k = _of(which, k_0, k_1, k_2)
    num_partials = _of(which, num_partials_0, num_partials_1, num_partials_2)
    columns, others = program * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTIALS)
    largest = tl.zeros([PARTIALS, BLOCK], tl.int32)
    for begin in range(0, num_partials, PARTIALS):
        at = begin + others
        mask = (at < num_partials)[:, None] & (columns < k)[None, :]
        largest = tl.maximum(largest, tl.load(partial + at[:, None] * k + columns[None, :], mask=mask, other=0))
    scale, _ = _scale(tl.max(largest, axis=0), MAX, power_of_two)
    tl.store(scales + columns, scale, mask=columns < k)


@triton.jit
def quantize_matrix(
    x_0, x_1, x_2, partial_0, partial_1, partial_2, x8_0, x8_1, x8_2, scales_0, scales_1, scales_2,
    xt8_0, xt8_1, xt8_2, scales_t_0, scales_t_1, scales_t_2, m_0, m_1, m_2, k_0, k_1, k_2, ldx_0, ldx_1, ldx_2,
    num_partials_0, num_partials_1, num_partials_2, is_wide_0, is_wide_1, is_wide_2, writes_0, writes_1, writes_2,
    blocks_0, blocks_1, blocks_2,
    power_of_two, TRANSPOSES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x TILE, whose scale is that of the matrix. x8 and xt8 are bytes: of e5m2 if `is_wide`, else of
    e4m3, so that a launch takes both. scales and scales_t: [1]."""
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    partial = _of(which, partial_0, partial_1, partial_2)
    x8 = _of(which, x8_0, x8_1, x8_2)
    scales = _of(which, scales_0, scales_1, scales_2)
    xt8 = _of(which, xt8_0, xt8_1, xt8_2)
    scales_t = _of(which, scales_t_0, scales_t_1, scales_t_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    num_partials = _of(which, num_partials_0, num_partials_1, num_partials_2)
    writes = _of(which, writes_0, writes_1, writes_2)
    row_tiles = tl.cdiv(m, ROWS)
    rows = program % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = program // row_tiles * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < k)[None, :]
    values = _load_tile(x, rows, columns, ldx, mask).to(tl.float32)
    others = tl.arange(0, PARTIALS)
    bits = tl.max(tl.load(partial + others, mask=others < num_partials, other=0), axis=0)
    if _of(which, is_wide_0, is_wide_1, is_wide_2) != 0:
        _store_matrix(
            values, bits, x8, scales, xt8, scales_t, rows, columns, m, k, mask, program, writes, power_of_two,
            tl.float8e5, 57344.0, TRANSPOSES,
        )  # fmt: skip
    else:
        _store_matrix(
            values, bits, x8, scales, xt8, scales_t, rows, columns, m, k, mask, program, writes, power_of_two,
            tl.float8e4nv, 448.0, TRANSPOSES,
        )  # fmt: skip


@triton.jit
def _store_matrix(
    values, bits, x8, scales, xt8, scales_t, rows, columns, m, k, mask, program, writes, power_of_two,
    OUT: tl.constexpr, MAX: tl.constexpr, TRANSPOSES: tl.constexpr,
):  # fmt: skip
    scale, inverse = _scale(bits, MAX, power_of_two)
    if program == 0:
        if writes != 0:
            tl.store(scales, scale)
        if TRANSPOSES:
            tl.store(scales_t, scale)
    values8 = (values * inverse).to(OUT).to(tl.int8, bitcast=True)
    if writes != 0:
        _store_tile(x8, rows, columns, k, values8, mask)
    if TRANSPOSES:
        _store_transposed(values8, xt8, m, rows, columns, mask)


@triton.jit
def quantize_columns(
    x_0, x_1, x_2, xt8_0, xt8_1, xt8_2, scales_t_0, scales_t_1, scales_t_2, m_0, m_1, m_2, k_0, k_1, k_2,
    ldx_0, ldx_1, ldx_2, ldt_0, ldt_1, ldt_2, first_0, first_1, first_2, blocks_0, blocks_1, blocks_2,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x TILE of the transpose, whose scales [k] column_scales wrote. xt8 has the leading dimension ldt,
    and x is its part from column `first` on."""
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    xt8 = _of(which, xt8_0, xt8_1, xt8_2) + _of(which, first_0, first_1, first_2)
    scales_t = _of(which, scales_t_0, scales_t_1, scales_t_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    ldt = _of(which, ldt_0, ldt_1, ldt_2)
    row_tiles = tl.cdiv(m, ROWS)
    rows = program % row_tiles * ROWS + tl.arange(0, ROWS)
    columns = program // row_tiles * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < k)[None, :]
    values = _load_tile(x, rows, columns, ldx, mask).to(tl.float32)
    inverse = _inverse(tl.load(scales_t + columns, mask=columns < k, other=1.0))
    _store_transposed(values * inverse[None, :], xt8, ldt, rows, columns, mask)


@triton.jit
def quantize_blocks(
    x_0, x_1, x_2, x8_0, x8_1, x8_2, scales_0, scales_1, scales_2, xt8_0, xt8_1, xt8_2,
    scales_t_0, scales_t_1, scales_t_2, m_0, m_1, m_2, k_0, k_1, k_2, ldx_0, ldx_1, ldx_2,
    shares_0, shares_1, shares_2, writes_0, writes_1, writes_2, blocks_0, blocks_1, blocks_2,
    power_of_two,
    MAX: tl.constexpr, SQUARES: tl.constexpr, TRANSPOSES: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A tile of TILE x TILE, whose runs of TILE elements have a scale each or, with SQUARES, may share one. It is read
    in parts of PART rows or columns, more than once: a whole one would take the registers of two programs.

    scales: [m, ceil(k / TILE)] column-major, or [ceil(m / TILE), ceil(k / TILE)] if the runs share one; scales_t, those
    of the transpose: [k, ceil(m / TILE)] column-major, or the transpose of scales.
    """
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    x8 = _of(which, x8_0, x8_1, x8_2)
    scales = _of(which, scales_0, scales_1, scales_2)
    xt8 = _of(which, xt8_0, xt8_1, xt8_2)
    scales_t = _of(which, scales_t_0, scales_t_1, scales_t_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    writes = _of(which, writes_0, writes_1, writes_2)
    row_tiles = tl.cdiv(m, TILE)
    row_tile, column_tile = program % row_tiles, program // row_tiles
    if SQUARES and _of(which, shares_0, shares_1, shares_2) != 0:
        _quantize_square(
            x, x8, scales, xt8, scales_t, row_tile, column_tile, m, k, ldx, writes, power_of_two,
            MAX, TRANSPOSES, TILE, PART,
        )  # fmt: skip
    else:
        _quantize_runs(
            x, x8, scales, xt8, scales_t, row_tile, column_tile, m, k, ldx, writes, power_of_two,
            MAX, TRANSPOSES, TILE, PART,
        )  # fmt: skip


@triton.jit
def _quantize_runs(
    x, x8, scales, xt8, scales_t, row_tile, column_tile, m, k, ldx, writes, power_of_two,
    MAX: tl.constexpr, TRANSPOSES: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    rows, columns = row_tile * TILE + tl.arange(0, TILE), column_tile * TILE + tl.arange(0, TILE)
    part = tl.arange(0, PART)
    if writes != 0:
        for begin in range(0, TILE, PART):
            at = row_tile * TILE + begin + part
            mask = (at < m)[:, None] & (columns < k)[None, :]
            values = _load_tile(x, at, columns, ldx, mask)
            scale, inverse = _scale(tl.max(_bits(values), axis=1), MAX, power_of_two)
            tl.store(scales + column_tile.to(tl.int64) * m + at, scale, mask=at < m)
            _store_tile(x8, at, columns, k, values.to(tl.float32) * inverse[:, None], mask)
    if TRANSPOSES:
        for begin in range(0, TILE, PART):
            at = column_tile * TILE + begin + part
            mask = (rows < m)[:, None] & (at < k)[None, :]
            values = _load_tile(x, rows, at, ldx, mask)
            scale, inverse = _scale(tl.max(_bits(values), axis=0), MAX, power_of_two)
            tl.store(scales_t + row_tile.to(tl.int64) * k + at, scale, mask=at < k)
            _store_transposed(values.to(tl.float32) * inverse[None, :], xt8, m, rows, at, mask)


@triton.jit
def _quantize_square(
    x, x8, scales, xt8, scales_t, row_tile, column_tile, m, k, ldx, writes, power_of_two,
    MAX: tl.constexpr, TRANSPOSES: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    rows, part = row_tile * TILE + tl.arange(0, TILE), tl.arange(0, PART)
    largest = tl.zeros([TILE], tl.int32)
    for begin in range(0, TILE, PART):
        at = column_tile * TILE + begin + part
        values = _load_tile(x, rows, at, ldx, (rows < m)[:, None] & (at < k)[None, :])
        largest = tl.maximum(largest, tl.max(_bits(values), axis=1))
    scale, inverse = _scale(tl.max(largest, axis=0), MAX, power_of_two)
    if writes != 0:
        tl.store(scales + row_tile * tl.cdiv(k, TILE) + column_tile, scale)
    if TRANSPOSES:
        tl.store(scales_t + column_tile * tl.cdiv(m, TILE) + row_tile, scale)
    for begin in range(0, TILE, PART):
        at = column_tile * TILE + begin + part
        mask = (rows < m)[:, None] & (at < k)[None, :]
        values = _load_tile(x, rows, at, ldx, mask).to(tl.float32) * inverse
        if writes != 0:
            _store_tile(x8, rows, at, k, values, mask)
        if TRANSPOSES:
            _store_transposed(values, xt8, m, rows, at, mask)


@triton.jit
def _quantize_row(x, x8, scale_of_row, k, power_of_two, MAX: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + columns, mask=columns < k, other=0.0)
    tl.store(scale_of_row, _store_row(values, x8, columns, k, power_of_two, MAX))


@triton.jit
def _quantize_whole_columns(
    x, xt8, scales_t, tile, m, k, ldx, power_of_two, MAX: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    rows, columns = tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < k)[None, :]
    values = _load_tile(x, rows, columns, ldx, mask)
    scale, inverse = _scale(tl.max(_bits(values), axis=0), MAX, power_of_two)
    tl.store(scales_t + columns, scale, mask=columns < k)
    _store_transposed(values.to(tl.float32) * inverse[None, :], xt8, m, rows, columns, mask)


@triton.jit
def quantize_short_columns(
    x_0, x_1, x_2, x8_0, x8_1, x8_2, scales_0, scales_1, scales_2, xt8_0, xt8_1, xt8_2,
    scales_t_0, scales_t_1, scales_t_2, m_0, m_1, m_2, k_0, k_1, k_2, ldx_0, ldx_1, ldx_2, blocks_0, blocks_1, blocks_2,
    power_of_two,
    MAX: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TILE columns of at most ROWS elements, as rows of the transpose; or, if there are programs for it, a row of x,
    which fits BLOCK."""
    which, program = _matrix(blocks_0, blocks_1)
    x = _of(which, x_0, x_1, x_2)
    m = _of(which, m_0, m_1, m_2)
    k = _of(which, k_0, k_1, k_2)
    ldx = _of(which, ldx_0, ldx_1, ldx_2)
    row = program - tl.cdiv(k, TILE)
    if row < 0:
        xt8, scales_t = _of(which, xt8_0, xt8_1, xt8_2), _of(which, scales_t_0, scales_t_1, scales_t_2)
        _quantize_whole_columns(x, xt8, scales_t, program, m, k, ldx, power_of_two, MAX, ROWS, TILE)
    else:
        _quantize_row(
            x + row.to(tl.int64) * ldx, _of(which, x8_0, x8_1, x8_2) + row.to(tl.int64) * k,
            _of(which, scales_0, scales_1, scales_2) + row, k, power_of_two, MAX, BLOCK,
        )  # fmt: skip


@triton.jit
def _load_tile(x, rows, columns, ldx, mask):
    return tl.load(x + rows.to(tl.int64)[:, None] * ldx + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_tile(y, rows, columns, ldy, values, mask):
    tl.store(y + rows.to(tl.int64)[:, None] * ldy + columns[None, :], values.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _store_transposed(values, xt8, ldt, rows, columns, mask):
    at = xt8 + columns.to(tl.int64)[:, None] * ldt + rows[None, :]
    tl.store(at, tl.trans(values.to(xt8.dtype.element_ty)), mask=tl.trans(mask))


@triton.jit
def silu_mul_tiles(gate, up, h, m, n, ldz, ROWS: tl.constexpr, TILE: tl.constexpr):
    """h [m, n], dense, of gate and up [m, n] with the leading dimension ldz. grid: (tiles of n, tiles of m)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)[:, None] * ldz + columns[None, :]
    _store_tile(h, rows, columns, n, _silu_mul(gate + at, up + at, mask), mask)


@triton.jit
def silu_mul_runs(z, y8, scales, m, k, ldz, power_of_two, MAX: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """silu(z[:, :k]) * z[:, k:] with a scale for each run of TILE elements. grid: (tiles of k, tiles of m).

    scales: [m, ceil(k / TILE)] column-major.
    """
    tile = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tile * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < k)[None, :]
    at = rows.to(tl.int64)[:, None] * ldz + columns[None, :]
    values = _silu_mul(z + at, z + k + at, mask)
    scale, inverse = _scale(tl.max(_bits(values), axis=1), MAX, power_of_two)
    tl.store(scales + tile.to(tl.int64) * m + rows, scale, mask=rows < m)
    _store_tile(y8, rows, columns, k, values.to(tl.float32) * inverse[:, None], mask)


@triton.jit
def _silu_mul_grad(gate, up, dh):
    """The gradients of gate and up, and h, rounded where torch rounds in 16 bits."""
    dtype = gate.dtype
    wide, up_wide, dh_wide = gate.to(tl.float32), up.to(tl.float32), dh.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-wide))
    silu = (wide * sigmoid).to(dtype).to(tl.float32)
    dsilu = (dh_wide * up_wide).to(dtype).to(tl.float32)
    dgate = dsilu * sigmoid * (1.0 + wide * (1.0 - sigmoid))
    return dgate.to(dtype), (dh_wide * silu).to(dtype), (silu * up_wide).to(dtype)


@triton.jit
def silu_mul_grad(gate, up, dh, dgate, dup, m, n, ldz, ROWS: tl.constexpr, TILE: tl.constexpr):
    """dgate and dup [m, n], dense like dh; gate and up have the leading dimension ldz. The grid is that of
    silu_mul_tiles."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    of_gate, of_up, _ = _silu_mul_grad(
        _load_tile(gate, rows, columns, ldz, mask),
        _load_tile(up, rows, columns, ldz, mask),
        _load_tile(dh, rows, columns, n, mask),
    )
    _store_tile(dgate, rows, columns, n, of_gate, mask)
    _store_tile(dup, rows, columns, n, of_up, mask)


@triton.jit
def _scaled(values, factors, columns, n, SCALED: tl.constexpr):
    """values, or values * factors [n] in float32 if SCALED."""
    if SCALED:
        values = values.to(tl.float32) * tl.load(factors + columns, mask=columns < n, other=0.0)[None, :]
    return values


@triton.jit
def swiglu_amax(
    z, dh, factors, of_rows, of_columns, of_h, m, n, rows_per_block,
    SCALED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """of_rows [tiles of n, m] and of_columns [blocks of rows, 2 n] of dz, and of_h [blocks of rows, n], as bits.

    z and dz are [m, 2 n]: gate, then up. SCALED: of_rows is that of dz * factors [2 n] in float32.
    """
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1) * rows_per_block + tl.arange(0, ROWS)
    end = tl.minimum(m, (tl.program_id(1) + 1) * rows_per_block)
    of_rows += tl.program_id(0) * m
    largest_gate = tl.zeros([ROWS, TILE], tl.int32)
    largest_up = tl.zeros([ROWS, TILE], tl.int32)
    largest_h = tl.zeros([ROWS, TILE], tl.int32)
    for step in range(0, rows_per_block, ROWS):
        rows = first + step
        mask = (rows < end)[:, None] & (columns < n)[None, :]
        gate = _load_tile(z, rows, columns, 2 * n, mask)
        dgate, dup, h = _silu_mul_grad(
            gate, _load_tile(z + n, rows, columns, 2 * n, mask), _load_tile(dh, rows, columns, n, mask)
        )
        dgate_bits, dup_bits = _bits(dgate), _bits(dup)
        largest_gate = tl.maximum(largest_gate, dgate_bits)
        largest_up = tl.maximum(largest_up, dup_bits)
        largest_h = tl.maximum(largest_h, _bits(h))
        if SCALED:
            dgate_bits = _bits(_scaled(dgate, factors, columns, n, SCALED))
            dup_bits = _bits(_scaled(dup, factors + n, columns, n, SCALED))
        tl.store(of_rows + rows, tl.max(tl.maximum(dgate_bits, dup_bits), axis=1), mask=rows < end)
    of_columns += tl.program_id(1) * 2 * n
    tl.store(of_columns + columns, tl.max(largest_gate, axis=0), mask=columns < n)
    tl.store(of_columns + n + columns, tl.max(largest_up, axis=0), mask=columns < n)
    tl.store(of_h + tl.program_id(1) * n + columns, tl.max(largest_h, axis=0), mask=columns < n)


@triton.jit
def _store_both(plain, inverse_rows, x8, ldx, values, inverse_columns, xt8, ldt, rows, columns, mask):
    """x8 of `plain` [rows, columns], and xt8 of the transpose of `values`."""
    _store_tile(x8, rows, columns, ldx, plain.to(tl.float32) * inverse_rows[:, None], mask)
    _store_transposed(values.to(tl.float32) * inverse_columns[None, :], xt8, ldt, rows, columns, mask)


@triton.jit
def swiglu_grad(
    z, dh, factors, scales, scales_t, scales_h, dz8, dzt8, ht8, m, n,
    SCALED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dz8 [m, 2 n], its transpose dzt8, and ht8 [n, m], with scales of their rows. grid: (tiles of m, tiles of n).

    SCALED: dz8 is that of dz * factors [2 n] in float32, and dzt8 is not.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    gate = _load_tile(z, rows, columns, 2 * n, mask)
    dgate, dup, h = _silu_mul_grad(
        gate, _load_tile(z + n, rows, columns, 2 * n, mask), _load_tile(dh, rows, columns, n, mask)
    )
    of_rows = _inverse(tl.load(scales + rows, mask=rows < m, other=1.0))
    of_gate = _inverse(tl.load(scales_t + columns, mask=columns < n, other=1.0))
    of_up = _inverse(tl.load(scales_t + n + columns, mask=columns < n, other=1.0))
    of_h = _inverse(tl.load(scales_h + columns, mask=columns < n, other=1.0))
    plain_gate = _scaled(dgate, factors, columns, n, SCALED)
    plain_up = _scaled(dup, factors + n, columns, n, SCALED)
    _store_both(plain_gate, of_rows, dz8, 2 * n, dgate, of_gate, dzt8, m, rows, columns, mask)
    at_up = dzt8 + n.to(tl.int64) * m
    _store_both(plain_up, of_rows, dz8 + n, 2 * n, dup, of_up, at_up, m, rows, columns, mask)
    _store_transposed(h.to(tl.float32) * of_h[None, :], ht8, m, rows, columns, mask)
