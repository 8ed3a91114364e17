"""The Triton kernels that quantize, compiled during the build, and the plan that launches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoneware.kernels import aot_kernels, built_matmuls, manifest
from stoneware.quantizing.layout import BLOCK
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    import torch

OP = "quantize"
"""The op's name in the manifest."""

MULTIPLE = 16
"""Of k and ldx, and of m where the transpose is written: the kernels move 16 bytes at a time."""

ROW_BLOCKS = (4096, 16384)
"""Elements of a row that a program of quantize_rows keeps in registers; a longer row is read twice."""

PARTIALS = {"matrix": 1024, "column": 32}
"""The most partial results of reduce_amax: of the matrix, which each program of quantize_tiles reads, or of
a column, which column_scales reads."""

_MATRIX_BLOCKS = 512
"""Programs of reduce_amax for the matrix where its columns allow it: enough to fill a GPU, and fewer to read."""

_ROWS_COLUMNS = {4096: (4, 256), 16384: (1, 128)}
"""Elements of a row that a program of quantize_rows_columns keeps in registers -> the rows that it takes at a time,
as in BUILD.bazel, and the most programs, each with a partial result of every column."""

_COLUMN_SCALES = (64, 32)
"""(partial results, columns) that a program of column_scales reads at a time; as in BUILD.bazel."""

_TILE_ROWS = {"matrix": 64, "column": 64, "run": BLOCK, "tile": BLOCK}
"""Rows of a tile of quantize_tiles, by its unit; as in BUILD.bazel."""

_AMAX_TILE = (8, 512)
"""(rows, columns) that a program of reduce_amax reads at a time; as in BUILD.bazel."""

_UNITS = {"tensor": "matrix", "row": "column", "block": "run", "block_2d": "tile"}
"""scales -> the unit that shares a scale, in the kernels' names; a row of the transpose is a column of x."""


def why_not(x: torch.Tensor, scales: str, dtype: str, transposes: bool, device: Device) -> str | None:
    """Why no kernel quantizes x [m, k] here, or None."""
    if device.kind != "cuda":
        return f"the kernels run on NVIDIA GPUs, and the device is {device}"
    m, k = x.shape
    for name, value in (("k", k), ("ldx", _ldx(x)), *((("m", m),) if transposes else ())):
        if value % MULTIPLE:
            return f"{name}={value} must be a multiple of {MULTIPLE} for the kernels"
    if x.data_ptr() % MULTIPLE:
        return f"x.data_ptr()={x.data_ptr():#x} must be a multiple of {MULTIPLE} for the kernels"
    if m > aot_kernels.INT32_MAX - BLOCK or k > PARTIALS["matrix"] * _AMAX_TILE[1]:
        return f"m={m} and k={k} must be below 2**31 and at most 2**19 for the kernels"
    arch, built = aot_kernels.built_for(OP, device.compute_capability), manifest.packaged()
    variant = "rows_loop" if scales == "row" else f"tiles_{_UNITS[scales]}"
    id = "" if arch is None else _id(arch, variant, _name(x), dtype)
    # `plan` raises an error for a kernel that was removed.
    if id not in built.kernels and id not in built.removed:
        return (
            f"the wheel has no kernel {_name(x)} -> {dtype} with scales={scales!r} for compute capability "
            f"{device.compute_capability}"
        )
    return None


def is_built(device: Device) -> bool:
    """Whether this wheel has kernels that quantize for the device."""
    return device.kind == "cuda" and aot_kernels.built_for(OP, device.compute_capability) is not None


def plan(
    x: torch.Tensor,
    scales: str,
    transpose: bool | str,
    dtype: str,
    power_of_two: bool,
    device: Device,
    *,
    shares: bool = False,
    is_amax_given: bool = False,
) -> Any:
    """The plan for calls like this one; takes x, the outputs of `sw.quantize`, and partial results if
    `has_partial`.

    Args:
      x, scales, transpose, dtype, power_of_two, device: of the call.
      shares: whether two calls share a reduction of the same x: the partial results of the matrix, or the scales
        of columns. The first, without the transpose, writes them; scales of columns are its third output. The
        second, with the transpose, reads them.
      is_amax_given: whether the bits of the matrix's largest |x| are the only partial result, and are read.

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: a kernel is for gradients, and this installation excludes these kernels.
    """
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    m, k = x.shape
    ldx = _ldx(x)
    in_dtype, pow2 = _name(x), int(power_of_two)
    plain, transposed = transpose is not True, transpose is not False
    writes, reads = shares and not transposed, shares and not plain
    # Tensor 0 is x; then the outputs; partial results are the last.
    addresses = iter([("address", position) for position in range(6)])
    source, absent = next(addresses), ("address", 1)
    x8, scale = (next(addresses), next(addresses)) if plain else (absent, absent)
    xt8 = next(addresses) if transposed else absent
    unit = _UNITS[scales]
    scale_t = next(addresses) if transposed or (writes and unit == "column") else absent
    partial = next(addresses)
    num_tensors = partial[1]
    finds_columns = unit == "column" and has_partial(scales, transpose, shares)
    num_partials = int(is_amax_given)
    steps: list[Any] = []

    def add(variant: str, grid: tuple[int, int, int], arguments: list[Any], out: str = dtype) -> None:
        id = _id(arch, variant, in_dtype, out)
        built_matmuls.check_kernel(id, f"quantize to {dtype} with transpose={transpose!r}")
        steps.append((aot_kernels.load(id, len(arguments)), grid, arguments))

    block = next((block for block in ROW_BLOCKS if k <= block), None)
    if unit == "column" and plain and finds_columns and block is not None:
        num_partials, rows_per_block = _row_blocks(m, block)
        arguments = [source, partial, x8, scale, m, k, ldx, rows_per_block, pow2]
        add(f"rows_columns_{block}", (num_partials, 1, 1), arguments)
    elif unit == "column" and plain:
        add(f"rows_{block or 'loop'}", (m, 1, 1), [source, absent, x8, scale, m, k, ldx, pow2])
    if (finds_columns or unit == "matrix") and not num_partials:
        blocks, rows_per_block = amax_blocks(m, k, unit)
        num_partials = blocks[0] * (blocks[1] if unit == "matrix" else 1)
        if not reads:
            add(f"amax_{unit}", (blocks[0], blocks[1], 1), [source, partial, m, k, ldx, rows_per_block], "e4m3")
    if finds_columns:
        grid = (-(-k // _COLUMN_SCALES[1]), 1, 1)
        add("column_scales", grid, [partial, scale_t, k, num_partials, pow2])
    if transposed or unit != "column":
        arguments = [
            source, partial if num_partials else absent, x8, scale, xt8, scale_t,
            m, k, ldx, num_partials, pow2, int(plain),
        ]  # fmt: skip
        grid = (-(-m // _TILE_ROWS[unit]), -(-k // BLOCK), 1)
        add(f"tiles_{unit}_t" if transposed else f"tiles_{unit}", grid, arguments)
    return aot_kernels.plan(device, num_tensors + bool(num_partials), steps)


def has_partial(scales: str, transpose: bool | str, shares: bool) -> bool:
    """Whether a plan takes memory for partial results, the last of its tensors; arguments as for `plan`."""
    return scales == "tensor" or (scales == "row" and (transpose is not False) != shares)


def rows_plan(name: str, x: torch.Tensor, k: int, num_tensors: int, options: Sequence[int], device: Device) -> Any:
    """The plan of a kernel with a program for each row of k elements; it takes x and then the kernel's other tensors.

    Args:
      name: of the kernel, without the elements of a row that a program keeps.
      x: [m, k], or [m, 2 k] for "silu_mul".
      num_tensors: how many the kernel takes.
      options: its last arguments, behind m, k and ldx.

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: it is for gradients, and this installation excludes these kernels.
    """
    block = next((block for block in ROW_BLOCKS if k <= block), "loop")
    addresses = [("address", position) for position in range(num_tensors)]
    arguments = [*addresses, x.shape[0], k, _ldx(x), *options]
    kernel = _kernel(f"{name}_{block}", _name(x), arguments, device)
    return aot_kernels.plan(device, num_tensors, [(kernel, (x.shape[0], 1, 1), arguments)])


def transpose_plan(x8: torch.Tensor, device: Device) -> Any:
    """The plan for x8 [m, k], dense fp8, and the outputs x8.t(), dense, and ones [k, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: it is for gradients, and this installation excludes these kernels.
    """
    m, k = x8.shape
    arguments = [*[("address", position) for position in range(3)], m, k]
    kernel = _kernel("transpose", "e4m3", arguments, device)
    return aot_kernels.plan(device, 3, [(kernel, (-(-m // BLOCK), -(-k // BLOCK), 1), arguments)])


def _kernel(variant: str, in_dtype: str, arguments: list[Any], device: Device) -> Any:
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    id = _id(arch, variant, in_dtype, "e4m3")
    built_matmuls.check_kernel(id, f"the gradient of a matmul with a frozen weight ({variant})")
    return aot_kernels.load(id, len(arguments))


def _ldx(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def amax_blocks(m: int, k: int, unit: str) -> tuple[tuple[int, int], int]:
    """The grid of reduce_amax (blocks of rows, of columns), and the rows of a block."""
    rows, columns = _AMAX_TILE
    num_columns = -(-k // columns)
    most = max(1, _MATRIX_BLOCKS // num_columns) if unit == "matrix" else PARTIALS["column"]
    rows_per_block = -(-m // (most * rows)) * rows
    return (-(-m // rows_per_block), num_columns), rows_per_block


def partial_shape(m: int, k: int, scales: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the partial results of a call that has some."""
    if scales == "tensor":
        (rows, columns), _ = amax_blocks(m, k, "matrix")
        return (rows * columns,), (1,)
    num_partials = [amax_blocks(m, k, "column")[0][0]]
    num_partials += [_row_blocks(m, block)[0] for block in ROW_BLOCKS if k <= block]
    return (max(num_partials) * k,), (1,)


def _row_blocks(m: int, block: int) -> tuple[int, int]:
    """The grid of quantize_rows_columns, and the rows of a program."""
    at_once, most = _ROWS_COLUMNS[block]
    rows_per_block = -(-m // (most * at_once)) * at_once
    return -(-m // rows_per_block), rows_per_block


def _id(arch: tuple[int, int], variant: str, in_dtype: str, out_dtype: str) -> str:
    return f"quantize_{variant}_triton_sm{arch[0]}{arch[1]}_{in_dtype}_{out_dtype}"


def _name(x: torch.Tensor) -> str:
    return DTYPE_NAMES[x.dtype]
