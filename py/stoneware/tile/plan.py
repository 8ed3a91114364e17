"""Which instruction computes a matmul of tiles, and how warps divide its sums.

    forward   c[m, n] += a[m, k] b[k, n]
    dA        da[m, k] += dc[m, n] b^T
    dB        db[k, n] += a^T dc[m, n]

wgmma (sm_90a) reads both operands from shared memory; mma.sync serves every other GPU, and on Hopper the
matmuls that wgmma cannot compute. Both sum 32 bytes of an operand at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoneware.runtime.fast_dataclass import dataclass

FORWARD, D_A, D_B = "forward", "dA", "dB"
DIRECTIONS = (FORWARD, D_A, D_B)

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}

STEP_BYTES = 32
"""What one instruction sums, of each operand (PTX ISA, "wgmma" and "mma", the shapes)."""

_MOST_SUMS = 192
"""Sums of one thread, of the 255 registers that it may have."""

_BLOCK_REGISTERS = 65536
"""Registers of an SM (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"); a block may
keep three quarters of them as sums."""

_WIDEST_WGMMA = 256
"""Columns of one instruction (PTX ISA, "wgmma", the shapes)."""


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """A tile in shared memory.

    Attributes:
      rows, columns: of the matrix.
      is_row_major: whether rows are contiguous, otherwise columns.
      element_bytes: of an element.
    """

    rows: int
    columns: int
    is_row_major: bool
    element_bytes: int

    @property
    def line_bytes(self) -> int:
        """Bytes of a contiguous row or column."""
        return (self.columns if self.is_row_major else self.rows) * self.element_bytes

    @property
    def piece_bytes(self) -> int:
        """The width of the swizzle: `Tile::kPieceBytes` of cc/tile/tile.cuh."""
        return next(width for width in (128, 64, 32) if self.line_bytes % width == 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory, with the padding to a multiple of 1024."""
        return -(-self.rows * self.columns * self.element_bytes // 1024) * 1024


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tile as an operand.

    Attributes:
      tile: its name in the header, such as "TileA".
      shape: of the tile.
      outer_is_rows: whether the axis that is not summed is the tile's rows.
    """

    tile: str
    shape: TileShape
    outer_is_rows: bool

    @property
    def is_k_major(self) -> bool:
        """Whether the summed axis is contiguous."""
        return self.outer_is_rows == self.shape.is_row_major


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one matmul is computed.

    Attributes:
      direction: one of DIRECTIONS.
      instruction: "wgmma" or "mma".
      left, right: the operands.
      rows, columns, summed: the matmul's extents.
      group_warps: warps that compute one part of the sums together.
      group_rows, group_columns: into how many parts groups divide the rows and the columns.
      instruction_columns: columns of one instruction.
    """

    direction: str
    instruction: str
    left: Operand
    right: Operand
    rows: int
    columns: int
    summed: int
    group_warps: int
    group_rows: int
    group_columns: int
    instruction_columns: int

    @property
    def num_instructions(self) -> int:
        """Instructions of one warp, or of one group of four warps with wgmma."""
        block_rows = 16 * self.group_warps
        blocks = self.rows // (block_rows * self.group_rows)
        columns = self.columns // (self.group_columns * self.instruction_columns)
        return blocks * columns * (self.summed * self.left.shape.element_bytes // STEP_BYTES)


def plan(direction: str, left: Operand, right: Operand, *, threads: int, arch: str) -> Plan | str:
    """The plan of a matmul, or the reason why no instruction computes it.

    Args:
      direction: one of DIRECTIONS.
      left, right: the operands.
      threads: of the block.
      arch: such as "sm_90a".
    """
    rows, summed = _extents(left)
    columns, _ = _extents(right)
    element_bytes = left.shape.element_bytes
    if element_bytes == 1 and direction != FORWARD:
        return (
            f"{direction} must have operands of 16 or 32 bits, and they are fp8, which tensor cores "
            "read only along the summed axis; describe a second matmul with the gradient's operands and layouts"
        )
    if element_bytes == 1 and not (left.is_k_major and right.is_k_major):
        return (
            'layouts must be ("row", "col") for fp8, which tensor cores read only along the summed axis; transpose the '
            "operand that is not"
        )
    most_sums = min(_MOST_SUMS, _BLOCK_REGISTERS * 3 // 4 // threads)
    if rows * columns > most_sums * threads:
        return (
            f"{direction} has {rows * columns // threads} sums of {rows}x{columns} in each of {threads} threads, which "
            f"must be at most {most_sums}; use a smaller tile, or up to 256 threads"
        )
    for instruction, choices in (
        ("wgmma", _wgmma(left, right, threads=threads, arch=arch)),
        ("mma", _mma(rows, columns, threads=threads)),
    ):
        for group_rows, group_columns, instruction_columns in choices:
            return Plan(
                direction=direction,
                instruction=instruction,
                left=left,
                right=right,
                rows=rows,
                columns=columns,
                summed=summed,
                group_warps=4 if instruction == "wgmma" else 1,
                group_rows=group_rows,
                group_columns=group_columns,
                instruction_columns=instruction_columns,
            )
    return (
        f"{direction} has {rows}x{columns} sums, which {threads // 32} warps cannot share equally in blocks of 16x8; "
        "use fewer threads or a larger tile"
    )


def _extents(operand: Operand) -> tuple[int, int]:
    """The outer and the summed extent."""
    shape = operand.shape
    return (shape.rows, shape.columns) if operand.outer_is_rows else (shape.columns, shape.rows)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _wgmma(left: Operand, right: Operand, *, threads: int, arch: str) -> Iterator[tuple[int, int, int]]:
    """(group rows, group columns, columns of an instruction), most rows first: these share the right operand."""
    rows, _ = _extents(left)
    columns, _ = _extents(right)
    if arch != "sm_90a" or threads % 128:
        return
    if left.shape.element_bytes != 2 and not (left.is_k_major and right.is_k_major):
        return
    for group_rows in reversed(_divisors(threads // 128)):
        group_columns = threads // 128 // group_rows
        if rows % (64 * group_rows) or columns % (8 * group_columns):
            continue
        part = columns // group_columns
        for width in reversed(_divisors(part)):
            if width % 8 or width > _WIDEST_WGMMA:
                continue
            # A descriptor begins at a piece of the swizzle.
            if right.is_k_major or width * right.shape.element_bytes % right.shape.piece_bytes == 0:
                yield group_rows, group_columns, width


def _mma(rows: int, columns: int, *, threads: int) -> list[tuple[int, int, int]]:
    """The same, the least reading of operands first: each warp reads the rows and columns of its part."""
    warps = threads // 32
    choices = [
        (group_rows, warps // group_rows)
        for group_rows in _divisors(warps)
        if rows % (16 * group_rows) == 0 and columns % (8 * (warps // group_rows)) == 0
    ]
    choices.sort(key=lambda groups: (rows // groups[0] + columns // groups[1], -groups[0]))
    return [(*groups, 8) for groups in choices]
