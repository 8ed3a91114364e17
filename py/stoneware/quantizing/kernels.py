"""The Triton kernels that quantize, compiled during the build, and the plan that launches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.kernels import aot_kernels, built_matmuls, manifest
from stoneware.kernels.launch_description import MAX_GRID_YZ
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
"""The most partial results of reduce_amax: of the matrix, which each program of quantize_matrix reads, or of
a column, which column_scales reads."""

_MATRIX_BLOCKS = 512
"""Programs of reduce_amax for the matrix where its columns allow it: enough to fill a GPU, and fewer to read."""

_ROWS_COLUMNS = {4096: (4, 256), 16384: (1, 128)}
"""Elements of a row that a program of quantize_rows_columns keeps in registers -> the rows that it takes at a time,
as in BUILD.bazel, and the most programs, each with a partial result of every column."""

_COLUMN_SCALES = (64, 32)
"""(partial results, columns) that a program of column_scales reads at a time; as in BUILD.bazel."""

_TILE_ROWS = 64
"""Rows of a tile of quantize_matrix and quantize_columns; as in BUILD.bazel."""

_FEW_RUNS = 2**20
"""Elements up to which a matrix with a scale for each run has the kernel that also takes tiles that share one, so that
both kinds have one launch. It needs more registers; up to this size a launch costs more."""

_SHORT_COLUMNS = (512, 32, 4096)
"""(rows, columns) of a tile of quantize_short_columns, and elements of a row; as in BUILD.bazel."""

_AMAX_TILE = (8, 512)
"""(rows, columns) that a program of reduce_amax reads at a time; as in BUILD.bazel."""

_ACTIVATION_TILE = (8, 256)
"""(rows, columns) of a tile of silu_mul_tiles and silu_mul_grad; as in BUILD.bazel."""

_RUN_ROWS = 8
"""Rows of a tile of silu_mul_runs; as in BUILD.bazel."""

MOST_TILE_ROWS = MAX_GRID_YZ * min(_RUN_ROWS, _ACTIVATION_TILE[0])
"""The most rows for silu_mul_runs, silu_mul_tiles and silu_mul_grad, whose tiles of rows are along y of the grid."""

_SWIGLU_ROWS = {"swiglu_amax": 16, "swiglu_grad": 32}
"""Rows of a tile, by kernel; as in BUILD.bazel."""

_SWIGLU_PROGRAMS = 1024
"""The most programs of swiglu_amax: enough to fill a GPU, and few partial results of columns."""

_MATRICES = 3
"""Matrices that a launch takes; as in BUILD.bazel."""

_UNITS = {"tensor": "matrix", "row": "column", "block": "block", "block_2d": "block"}
"""scales -> the unit that shares a scale, in the names of the kernels amax and tiles; a row of the transpose is a
column of x."""


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
    variant = {"row": "rows_loop", "tensor": "tiles_matrix"}.get(scales, "blocks")
    # tiles_matrix writes e5m2 as well.
    id = "" if arch is None else _id(arch, variant, _name(x), "e4m3" if scales == "tensor" else dtype)
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


class Task(NamedTuple):
    """A matrix x to quantize by kernels.

    Attributes:
      parts: x, or the matrices whose rows it has, one after the other (`why_not_joined`).
      scales, transpose, dtype, power_of_two: see `sw.quantize`.
      shares: whether two tasks share a reduction of the same x: the partial results of the matrix, or the scales
        of columns. The first, without the transpose, writes them; scales of columns are its third output. The
        second, with the transpose, reads them. If it `has_short_columns`, the second finds and writes the scales.
      is_amax_given: whether the bits of the matrix's largest |x| are the only partial result, and are read.
      tensors: positions among the plan's tensors: of the parts, the outputs of `sw.quantize`, and the partial results
        if `has_partial` or `is_amax_given`.
    """

    parts: Sequence[torch.Tensor]
    scales: str
    transpose: bool | str
    dtype: str
    power_of_two: bool
    shares: bool
    is_amax_given: bool
    tensors: Sequence[int]


class _Launch(NamedTuple):
    """A kernel's work on a matrix.

    Attributes:
      stage: 0 finds magnitudes, 1 turns those of columns into scales, 2 writes what needs these.
      variant, in_dtype, out_dtype: of the kernel.
      options: the arguments that the matrices of a launch share.
      arguments: those of the matrix; the last is the number of programs.
    """

    stage: int
    variant: str
    in_dtype: str
    out_dtype: str
    options: tuple[Any, ...]
    arguments: Sequence[Any]

    @property
    def kernel(self) -> tuple[Any, ...]:
        return self.variant, self.in_dtype, self.out_dtype, self.options


def plan(tasks: Sequence[Task], num_tensors: int, device: Device) -> Any:
    """The plan that quantizes matrices; kernels that work on several do so in one launch.

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: a kernel is for gradients, and this installation excludes these kernels.
    """
    queues, steps = [_launches(task) for task in tasks], []
    while queues := [queue for queue in queues if queue]:
        first = min((queue[0] for queue in queues), key=lambda launch: launch.stage)
        together: list[_Launch] = []
        for queue in queues:
            while queue and queue[0].kernel == first.kernel and len(together) < _MATRICES:
                if sum(launch.arguments[-1] for launch in (*together, queue[0])) > aot_kernels.INT32_MAX:
                    break
                together.append(queue.pop(0))
        steps.append(_step(together, device))
    return aot_kernels.plan(device, num_tensors, steps)


def _step(launches: list[_Launch], device: Device) -> Any:
    first = launches[0]
    grid = (sum(launch.arguments[-1] for launch in launches), 1, 1)
    # An absent matrix has no programs.
    matrices = [launch.arguments for launch in launches] + [first.arguments] * (_MATRICES - len(launches))
    arguments = [argument for of_matrices in zip(*matrices) for argument in of_matrices]
    arguments += first.options
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    id = _id(arch, first.variant, first.in_dtype, first.out_dtype)
    built_matmuls.check_kernel(id, f"quantize ({first.variant})")
    return aot_kernels.load(id, len(arguments)), grid, arguments


def _launches(task: Task) -> list[_Launch]:
    parts, scales, transpose, dtype, power_of_two, shares, is_amax_given, positions = task
    m, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    plain, transposed = transpose is not True, transpose is not False
    writes, reads = shares and not transposed, shares and not plain
    addresses = iter([("address", position) for position in positions])
    sources = [next(addresses) for _ in parts]
    x8, scale = (next(addresses), next(addresses)) if plain else (None, None)
    xt8 = next(addresses) if transposed else None
    is_short = has_short_columns(scales, [len(part) for part in parts], k)
    unit = _UNITS[scales]
    finds_columns = unit == "column" and has_partial(scales, transpose, shares) and not is_short
    scale_t = next(addresses) if transposed or (writes and unit == "column") else None
    num_partials = int(is_amax_given)
    partial = next(addresses, None)
    launches: list[_Launch] = []

    def add(stage: int, variant: str, arguments: list[Any], out: str = dtype, *, is_scaled: bool = True) -> None:
        options = (int(power_of_two),) if is_scaled else ()
        launches.append(_Launch(stage, variant, _name(parts[0]), out, options, arguments))

    if is_short and transposed:
        num_tiles, num_rows = -(-k // _SHORT_COLUMNS[1]), m if plain else 0
        # For what is not written, another of its type.
        outputs = [x8 or xt8, scale or scale_t, xt8, scale_t]
        add(0, "short_columns_t", [sources[0], *outputs, m, k, _ldx(parts[0]), num_tiles + num_rows])
        return launches
    if unit == "block":
        outputs = [x8 or xt8, scale or scale_t, xt8 or x8, scale_t or scale]
        num_tiles, shares_tile = -(-m // BLOCK) * -(-k // BLOCK), int(scales == "block_2d")
        variant = "runs" if scales == "block" and m * k > _FEW_RUNS else "blocks"
        add(
            2,
            f"{variant}_t" if transposed else variant,
            [sources[0], *outputs, m, k, _ldx(parts[0]), shares_tile, int(plain), num_tiles],
        )
        return launches
    block = next((block for block in ROW_BLOCKS if k <= block), None)
    first = 0
    for source, part in zip(sources, parts):
        rows, ldx = part.shape[0], _ldx(part)
        if unit == "column" and plain and finds_columns and block is not None:
            num_blocks, rows_per_block = _row_blocks(rows, block)
            arguments = [source, partial, x8, scale, rows, k, ldx, rows_per_block, first, num_partials, num_blocks]
            add(0, f"rows_columns_{block}", arguments)
            num_partials += num_blocks
        elif unit == "column" and plain:
            add(0, f"rows_{block or 'loop'}", [source, scale, x8, scale, k, ldx, rows])
        first += rows
    if (finds_columns or unit == "matrix") and not num_partials:
        (row_blocks, column_blocks), rows_per_block = amax_blocks(m, k, unit)
        num_partials = row_blocks * (column_blocks if unit == "matrix" else 1)
        if not reads:
            arguments = [sources[0], partial, m, k, _ldx(parts[0]), rows_per_block, column_blocks]
            add(0, f"amax_{unit}", [*arguments, row_blocks * column_blocks], "e4m3", is_scaled=False)
    if finds_columns:
        add(1, "column_scales", _of_column_scales(partial, scale_t, k, num_partials))
    if unit == "matrix":
        num_tiles = -(-m // _TILE_ROWS) * -(-k // BLOCK)
        # Unused outputs are filled with another of the same type.
        outputs = [x8 or xt8, scale or scale_t, xt8 or x8, scale_t or scale]
        arguments = [sources[0], partial, *outputs, m, k, _ldx(parts[0]), num_partials, int(dtype == "e5m2")]
        add(2, "tiles_matrix_t" if transposed else "tiles_matrix", [*arguments, int(plain), num_tiles], "e4m3")
    elif transposed:
        first = 0
        for source, part in zip(sources, parts):
            rows = part.shape[0]
            num_tiles = -(-rows // _TILE_ROWS) * -(-k // BLOCK)
            arguments = [source, xt8, scale_t, rows, k, _ldx(part), m, first, num_tiles]
            add(2, "tiles_column_t", arguments, is_scaled=False)
            first += rows
    return launches


def _of_column_scales(partial: Any, scales: Any, k: int, num_partials: int) -> list[Any]:
    return [partial, scales, k, num_partials, -(-k // _COLUMN_SCALES[1])]


def why_not_joined(parts: Sequence[torch.Tensor], device: Device) -> str | None:
    """Why no kernels quantize these matrices [m, k] as one, with a scale for each row, or None.

    The call without the transpose and the one with it share the scales of columns.
    """
    for part in parts:
        if part.stride(1) != 1 or not part.numel():
            return "each matrix must have elements and contiguous rows"
        reason = why_not(part, "row", "e4m3", True, device)
        if reason is not None:
            return reason
    k = parts[0].shape[1]
    return None if k <= ROW_BLOCKS[-1] else f"k={k} must be at most {ROW_BLOCKS[-1]} for the kernels"


def has_partial(scales: str, transpose: bool | str, shares: bool) -> bool:
    """Whether a plan takes memory for partial results, the last of its tensors; arguments as for `plan`."""
    return scales == "tensor" or (scales == "row" and (transpose is not False) != shares)


def has_short_columns(scales: str, rows: Sequence[int], k: int) -> bool:
    """Whether the kernel that writes the transpose of x [m, k] finds the scales of its columns itself.

    Args:
      rows: of each part of x.
    """
    if scales != "row" or len(rows) != 1 or rows[0] % MULTIPLE:  # without a kernel the scales would be missing
        return False
    return rows[0] <= _SHORT_COLUMNS[0] and k <= _SHORT_COLUMNS[2]


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


def scaled_rows_plan(x: torch.Tensor, power_of_two: bool, device: Device) -> Any:
    """The kernel's plan for `fused.scaled_rows_plan`; x is its input.

    Raises:
      UnsupportedError, TableError: the kernel cannot be loaded.
      BackwardNotBuiltError: this installation excludes this kernel.
    """
    m, k = x.shape
    block = next((block for block in ROW_BLOCKS if k <= block), "loop")
    arguments = [*[("address", position) for position in range(4)], k, _ldx(x), m]
    launch = _Launch(0, f"scaled_rows_{block}", _name(x), "e4m3", (int(power_of_two),), arguments)
    return aot_kernels.plan(device, 4, [_step([launch], device)])


def silu_mul_runs_plan(z: torch.Tensor, power_of_two: bool, device: Device) -> Any:
    """The plan for z [m, 2 k], and silu(z[:, :k]) * z[:, k:] in fp8 with a scale for each 1 x 128 elements.

    Raises:
      UnsupportedError, TableError: the kernel cannot be loaded.
    """
    m, k = z.shape[0], z.shape[1] // 2
    arguments = [*[("address", position) for position in range(3)], m, k, _ldx(z), int(power_of_two)]
    kernel = _kernel("silu_mul_runs", _name(z), arguments, device)
    return aot_kernels.plan(device, 3, [(kernel, (-(-k // BLOCK), -(-m // _RUN_ROWS), 1), arguments)])


def silu_mul_plan(gate: torch.Tensor, device: Device) -> Any:
    """The plan for gate, up and h = silu(gate) * up, [m, n] in 16 bits; h is dense.

    Args:
      gate: like that of the calls; up has its strides.

    Raises:
      UnsupportedError, TableError: the kernel cannot be loaded.
    """
    m, n = gate.shape
    arguments = [*[("address", position) for position in range(3)], m, n, _ldx(gate)]
    return _tiles_plan("silu_mul_tiles", gate, 3, arguments, device)


def silu_mul_grad_plan(gate: torch.Tensor, device: Device) -> Any:
    """The plan for gate, up, dh and the gradients of gate and up, [m, n] in 16 bits; all but gate and up are dense.

    Args:
      gate: like that of the calls; up has its strides.

    Raises:
      UnsupportedError, TableError: the kernel cannot be loaded.
      BackwardNotBuiltError: this installation excludes these kernels.
    """
    m, n = gate.shape
    arguments = [*[("address", position) for position in range(5)], m, n, _ldx(gate)]
    return _tiles_plan("silu_mul_grad", gate, 5, arguments, device)


def _tiles_plan(variant: str, x: torch.Tensor, num_tensors: int, arguments: list[Any], device: Device) -> Any:
    m, n = x.shape
    rows, columns = _ACTIVATION_TILE
    kernel = _kernel(variant, _name(x), arguments, device, _name(x))
    return aot_kernels.plan(device, num_tensors, [(kernel, (-(-n // columns), -(-m // rows), 1), arguments)])


def swiglu_grad_plan(z: torch.Tensor, power_of_two: bool, device: Device, *, is_scaled: bool = False) -> Any:
    """The plan of `fused.swiglu_grad_plan`, of which z is; `is_scaled`: with factors.

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: this installation excludes these kernels.
    """
    m, n = z.shape[0], z.shape[1] // 2
    num_tensors = 11 + is_scaled
    addresses = [("address", position) for position in range(num_tensors)]
    z_at, dh, *given = addresses[: 2 + is_scaled]
    dz8, scale, dzt8, scale_t, ht8, scale_h, of_rows, of_columns, of_h = addresses[2 + is_scaled :]
    factors = given[0] if is_scaled else scale  # another of its type, which is not read
    prefix = "scaled_" if is_scaled else ""
    steps: list[Any] = []

    def add(variant: str, grid: tuple[int, int, int], arguments: list[Any]) -> None:
        steps.append((_kernel(prefix + variant, _name(z), arguments, device), grid, arguments))

    tiles = -(-n // BLOCK)
    num_blocks, rows_per_block = _swiglu_blocks(m, tiles)
    add("swiglu_amax", (tiles, num_blocks, 1), [z_at, dh, factors, of_rows, of_columns, of_h, m, n, rows_per_block])
    found = (
        _of_column_scales(of_rows, scale, m, tiles),
        _of_column_scales(of_columns, scale_t, 2 * n, num_blocks),
        _of_column_scales(of_h, scale_h, n, num_blocks),
    )
    options = (int(power_of_two),)
    steps.append(_step([_Launch(1, "column_scales", _name(z), "e4m3", options, one) for one in found], device))
    grid = (-(-m // _SWIGLU_ROWS["swiglu_grad"]), tiles, 1)
    add("swiglu_grad", grid, [z_at, dh, factors, scale, scale_t, scale_h, dz8, dzt8, ht8, m, n])
    return aot_kernels.plan(device, num_tensors, steps)


def swiglu_partial_shapes(m: int, n: int) -> tuple[tuple[int, int], ...]:
    """Shapes of the partial results of `swiglu_grad_plan`: of the rows of dz, and of the columns of dz and h."""
    tiles = -(-n // BLOCK)
    num_blocks, _ = _swiglu_blocks(m, tiles)
    return (tiles, m), (num_blocks, 2 * n), (num_blocks, n)


def _swiglu_blocks(m: int, tiles: int) -> tuple[int, int]:
    """The blocks of rows of swiglu_amax, and the rows of a block."""
    most, at_once = max(1, _SWIGLU_PROGRAMS // tiles), _SWIGLU_ROWS["swiglu_amax"]
    rows_per_block = -(-m // (most * at_once)) * at_once
    return -(-m // rows_per_block), rows_per_block


def transpose_plan(parts: Sequence[torch.Tensor], device: Device) -> Any:
    """The plan for parts [m, k], dense fp8, and the outputs: the transpose of their rows, dense, and ones [k, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: it is for gradients, and this installation excludes these kernels.
    """
    k, ldt = parts[0].shape[1], sum(part.shape[0] for part in parts)
    *sources, xt8, ones = [("address", position) for position in range(len(parts) + 2)]
    launches: list[_Launch] = []
    first = 0
    for source, part in zip(sources, parts):
        m = part.shape[0]
        arguments = [source, m, first, -(-m // BLOCK) * -(-k // BLOCK)]
        launches.append(_Launch(2, "transpose", "e4m3", "e4m3", (xt8, ones, k, ldt), arguments))
        first += m
    steps = [_step(launches[at : at + _MATRICES], device) for at in range(0, len(launches), _MATRICES)]
    return aot_kernels.plan(device, len(parts) + 2, steps)


def _kernel(variant: str, in_dtype: str, arguments: list[Any], device: Device, out_dtype: str = "e4m3") -> Any:
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    id = _id(arch, variant, in_dtype, out_dtype)
    built_matmuls.check_kernel(id, f"a gradient ({variant})")
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


def partial_shape(rows: Sequence[int], k: int, scales: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the partial results of a call that has some.

    Args:
      rows: of each part.
    """
    m = sum(rows)
    if scales == "tensor":
        (num_blocks, num_columns), _ = amax_blocks(m, k, "matrix")
        return (num_blocks * num_columns,), (1,)
    num_partials = [amax_blocks(m, k, "column")[0][0]]
    num_partials += [sum(_row_blocks(part, block)[0] for part in rows) for block in ROW_BLOCKS if k <= block]
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
