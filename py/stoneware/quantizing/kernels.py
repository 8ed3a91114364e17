"""The Triton kernels that quantize, compiled during the build, and the plan that launches them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from stoneware.kernels import aot_kernels, built_products, manifest
from stoneware.quantizing.layout import BLOCK
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    import torch

OP = "quantize"
"""Of the kernels in the manifest."""

MULTIPLE = 16
"""Of k and ldx, and of m where the transpose is written: the kernels move 16 bytes at a time."""

ROW_BLOCKS = (4096, 16384)
"""Elements of a row that a program of quantize_rows keeps in registers; a longer row is read twice."""

PARTIALS = {"matrix": 1024, "column": 32}
"""The most partial results of reduce_amax: of the matrix, which each program of quantize_tiles reads, or of
a column, which column_scales reads."""

_COLUMNS = 64
"""Of a program of column_scales; as in BUILD.bazel."""

_AMAX_TILE = (8, 512)
"""(rows, columns) that a program of reduce_amax reads at a time; as in BUILD.bazel."""

_UNITS = {"tensor": "matrix", "row": "column", "block": "run", "block_2d": "tile"}
"""What shares a scale, as the kernels' names have it; a row of x is a column of what is transposed."""


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
    # `plan` refuses one that was removed.
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
    has_amax: bool = False,
) -> Any:
    """The plan for calls like this one; takes x, the outputs of `sw.quantize`, and partial results, if there are
    any, which another plan with the same x and scales has written already if `has_amax`.

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: a kernel is for gradients, and this installation was built without them.
    """
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    m, k = x.shape
    ldx = _ldx(x)
    in_dtype, pow2 = _name(x), int(power_of_two)
    tiles = (-(-m // BLOCK), -(-k // BLOCK), 1)
    plain, transposed = transpose is not True, transpose is not False
    # Tensor 0 is x; then the outputs; a partial result is the last.
    outputs = [("address", position) for position in range(1, 6)]
    source, nothing = ("address", 0), ("address", 1)
    x8, scale = outputs[:2] if plain else (nothing, nothing)
    xt8, scale_t = (outputs[2:4] if plain else outputs[:2]) if transposed else (nothing, nothing)
    num_outputs = 2 * (plain + transposed)
    partial = outputs[num_outputs]
    steps = []

    def kernel(variant: str, num_arguments: int, out: str = dtype) -> Any:
        id = _id(arch, variant, in_dtype, out)
        built_products.check_kernel(id, f"quantize to {dtype} with transpose={transpose!r}")
        return aot_kernels.load(id, num_arguments)

    if scales == "row" and plain:
        block = next((block for block in ROW_BLOCKS if k <= block), None)
        variant = "rows_loop" if block is None else f"rows_{block}"
        steps.append((kernel(variant, 8), (m, 1, 1), [source, nothing, x8, scale, m, k, ldx, pow2]))
    unit = _UNITS[scales]
    num_partials = 0
    if unit in PARTIALS and (transposed or unit == "matrix"):
        blocks, rows_per_block = amax_blocks(m, k, unit)
        num_partials = blocks[0] * (blocks[1] if unit == "matrix" else 1)
        if not has_amax:
            arguments = [source, partial, m, k, ldx, rows_per_block]
            steps.append((kernel(f"amax_{unit}", len(arguments), "e4m3"), (*blocks, 1), arguments))
    if unit == "column" and transposed:
        grid = (-(-k // _COLUMNS), 1, 1)
        steps.append((kernel("column_scales", 5), grid, [partial, scale_t, k, num_partials, pow2]))
    if transposed or scales != "row":
        arguments = [
            source, partial if num_partials else nothing, x8, scale, xt8, scale_t,
            m, k, ldx, num_partials, pow2, int(plain),
        ]  # fmt: skip
        variant = f"tiles_{unit}_t" if transposed else f"tiles_{unit}"
        steps.append((kernel(variant, len(arguments)), tiles, arguments))
    return aot_kernels.plan(device, 1 + num_outputs + bool(num_partials), steps)


def scaled_rows_plan(x: torch.Tensor, power_of_two: bool, device: Device) -> Any:
    """The plan for x [m, k], factors [k] float32 and the outputs x8 [m, k] and its scales [m, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: it is for gradients, and this installation was built without them.
    """
    m, k = x.shape
    block = next((block for block in ROW_BLOCKS if k <= block), "loop")
    addresses = [("address", position) for position in range(4)]
    return _rows_plan(f"scaled_rows_{block}", x, [*addresses, m, k, _ldx(x), int(power_of_two)], device)


def transpose_plan(x8: torch.Tensor, device: Device) -> Any:
    """The plan for x8 [m, k], dense fp8, and the outputs x8.t(), dense, and ones [k, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
      BackwardNotBuiltError: it is for gradients, and this installation was built without them.
    """
    m, k = x8.shape
    addresses = [("address", position) for position in range(3)]
    kernel = _kernel("transpose", "e4m3", [*addresses, m, k], device)
    return aot_kernels.plan(device, 3, [(kernel, (-(-m // BLOCK), -(-k // BLOCK), 1), [*addresses, m, k])])


def silu_mul_plan(z: torch.Tensor, power_of_two: bool, device: Device) -> Any:
    """The plan for z [m, 2 k] and the outputs y8 [m, k] and its scales [m, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
    """
    m, k = z.shape[0], z.shape[1] // 2
    block = next((block for block in ROW_BLOCKS if k <= block), "loop")
    addresses = [("address", position) for position in range(3)]
    return _rows_plan(f"silu_mul_{block}", z, [*addresses, m, k, _ldx(z), int(power_of_two)], device)


def rms_norm_plan(x: torch.Tensor, epsilon: float, power_of_two: bool, device: Device) -> Any:
    """The plan for x [m, k], weight [k] and the outputs y, y8 [m, k] and its scales [m, 1].

    Raises:
      UnsupportedError, TableError: a kernel cannot be loaded.
    """
    m, k = x.shape
    block = next(block for block in ROW_BLOCKS if k <= block)
    addresses = [("address", position) for position in range(5)]
    (epsilon_bits,) = struct.unpack("i", struct.pack("f", epsilon))
    return _rows_plan(
        f"rms_norm_{block}", x, [*addresses, m, k, _ldx(x), epsilon_bits, int(power_of_two)], device
    )  # fmt: skip


def _rows_plan(variant: str, x: torch.Tensor, arguments: list[Any], device: Device) -> Any:
    """Of a kernel with a program a row, whose tensors come in the order of its arguments."""
    kernel = _kernel(variant, _name(x), arguments, device)
    num_tensors = sum(isinstance(argument, tuple) for argument in arguments)
    return aot_kernels.plan(device, num_tensors, [(kernel, (x.shape[0], 1, 1), arguments)])


def _kernel(variant: str, in_dtype: str, arguments: list[Any], device: Device) -> Any:
    arch = aot_kernels.built_for(OP, device.compute_capability)
    assert arch is not None  # `why_not` asked
    id = _id(arch, variant, in_dtype, "e4m3")
    built_products.check_kernel(id, f"the gradient of a product with a frozen weight ({variant})")
    return aot_kernels.load(id, len(arguments))


def _ldx(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def amax_blocks(m: int, k: int, unit: str) -> tuple[tuple[int, int], int]:
    """The grid of reduce_amax (blocks of rows, of columns), and the rows of a block."""
    rows, columns = _AMAX_TILE
    num_columns = -(-k // columns)
    most = PARTIALS["matrix"] // num_columns if unit == "matrix" else PARTIALS["column"]
    rows_per_block = -(-m // (most * rows)) * rows
    return (-(-m // rows_per_block), num_columns), rows_per_block


def partial_shape(m: int, k: int, scales: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the partial results of a call that has some."""
    unit = "matrix" if scales == "tensor" else "column"
    blocks, _ = amax_blocks(m, k, unit)
    size = blocks[0] * (blocks[1] if unit == "matrix" else k)
    return (size,), (1,)


def _id(arch: tuple[int, int], variant: str, in_dtype: str, out_dtype: str) -> str:
    return f"quantize_{variant}_triton_sm{arch[0]}{arch[1]}_{in_dtype}_{out_dtype}"


def _name(x: torch.Tensor) -> str:
    return DTYPE_NAMES[x.dtype]
