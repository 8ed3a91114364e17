"""The kernels that quantize give the reference's bits, in Triton's interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
import pathlib

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from stoneware.kernels import aot_kernels
from stoneware.quantizing import fused, kernels, layout, reference
from stoneware.runtime import device

_PATH = pathlib.Path("py/stoneware/quantizing/triton_kernel.py")

_PART = 64
"""Of quantize_blocks; as in BUILD.bazel."""


@pytest.fixture(scope="module")
def functions():
    spec = importlib.util.spec_from_file_location("quantize_triton_kernel", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _conversions_of_torch(monkeypatch):
    """The interpreter of Triton 3.6 drops the subnormal numbers of fp8 and makes numbers of NaN."""
    dtypes = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
    }

    def convert(values, source, target, rounding):
        found = torch.frombuffer(bytearray(values.tobytes()), dtype=dtypes[source.name]).to(dtypes[target.name])
        unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[found.element_size()]
        return found.view(unsigned).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)

    def fma(self, x, y, z):
        """The interpreter also rounds the product. In float64 it is exact, and the sum is nearly."""
        found = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(found.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


def as_bytes(argument):
    """An argument of quantize_matrix, whose results are bytes."""
    is_fp8 = isinstance(argument, torch.Tensor) and argument.dtype in layout.MAX
    return argument.view(torch.int8) if is_fp8 else argument


def launch(functions, kernel_id, grid, arguments):
    """One launch with the parameters of its kernel's BUILD file, in the interpreter."""
    variant = kernel_id.removeprefix("quantize_").split("_triton_")[0]
    largest = {"MAX": layout.MAX[torch.float8_e4m3fn]}
    kind, _, which = variant.partition("_")
    if variant.startswith("rows_columns"):
        block = int(which.removeprefix("columns_"))
        rows, _ = kernels._ROWS_COLUMNS[block]
        functions.quantize_rows_columns[grid](*arguments, **largest, ROWS=rows, BLOCK=block, STAGES=1)
    elif "swiglu" in variant:
        name = variant.removeprefix("scaled_")
        rows, is_scaled = kernels._SWIGLU_ROWS[name], int(kind == "scaled")
        getattr(functions, name)[grid](*arguments, SCALED=is_scaled, ROWS=rows, TILE=128)
    elif kind in ("rows", "scaled"):
        size = which.removeprefix("rows_")
        block = 64 if size == "loop" else int(size)
        functions.quantize_rows[grid](
            *arguments, **largest, BLOCK=block, ONE=int(size != "loop"), SCALED=int(kind == "scaled")
        )
    elif kind == "transpose":
        functions.transpose_tiles[grid](*arguments, TILE=128)
    elif kind == "amax":
        rows, columns = kernels._AMAX_TILE
        functions.reduce_amax[grid](*arguments, PER_COLUMN=int(which == "column"), ROWS=rows, BLOCK=columns)
    elif kind == "column":
        partials, columns = kernels._COLUMN_SCALES
        functions.column_scales[grid](*arguments, **largest, PARTIALS=partials, BLOCK=columns)
    elif variant in ("silu_mul_tiles", "silu_mul_grad"):
        rows, columns = kernels._ACTIVATION_TILE
        getattr(functions, variant)[grid](*arguments, ROWS=rows, TILE=columns)
    elif variant == "silu_mul_runs":
        functions.silu_mul_runs[grid](*arguments, **largest, ROWS=kernels._RUN_ROWS, TILE=layout.BLOCK)
    elif kind == "silu":
        size = which.removeprefix("mul_")
        block = 64 if size == "loop" else int(size)
        functions.silu_mul_rows[grid](*arguments, **largest, BLOCK=block, ONE=int(size != "loop"))
    elif kind == "rms":
        functions.rms_norm_rows[grid](*arguments, **largest, BLOCK=int(which.removeprefix("norm_")))
    elif kind in ("blocks", "runs"):
        options = {"SQUARES": int(kind == "blocks"), "TRANSPOSES": int(which == "t")}
        functions.quantize_blocks[grid](*arguments, **largest, **options, TILE=layout.BLOCK, PART=_PART)
    elif kind == "short":
        rows, columns, block = kernels._SHORT_COLUMNS
        functions.quantize_short_columns[grid](*arguments, **largest, ROWS=rows, TILE=columns, BLOCK=block)
    elif which == "column_t":
        functions.quantize_columns[grid](*arguments, ROWS=kernels._TILE_ROWS, TILE=128)
    else:
        options = {"TRANSPOSES": int(which.endswith("_t")), "ROWS": kernels._TILE_ROWS, "TILE": 128}
        functions.quantize_matrix[grid](*map(as_bytes, arguments), **options, PARTIALS=kernels.PARTIALS["matrix"])


@pytest.fixture
def quantized(functions, monkeypatch):
    """The results of a plan, run in the interpreter on outputs that held something else."""
    monkeypatch.setattr(aot_kernels, "built_for", lambda op, capability: (9, 0))
    monkeypatch.setattr(aot_kernels, "load", lambda id, number: id)

    def plan(on, num_tensors, steps):
        def run(*tensors):
            assert len(tensors) == num_tensors
            for kernel_id, grid, arguments in steps:
                passed = [tensors[one[1]] if isinstance(one, tuple) else one for one in arguments]
                launch(functions, kernel_id, grid, passed)

        return run

    monkeypatch.setattr(aot_kernels, "plan", plan)

    def run(x, scales, transpose, dtype=torch.float8_e4m3fn, power_of_two=False):
        m, k = x.shape
        name = "e4m3" if dtype == torch.float8_e4m3fn else "e5m2"
        made = plan_of(([x], scales, transpose, name, power_of_two, False))
        outputs = []
        for rows, columns in [(m, k)] * (transpose is not True) + [(k, m)] * (transpose is not False):
            outputs.append(torch.full((rows, columns), 3.0).to(dtype))
            shape, strides = layout.dense_shape(scales, rows, columns)
            outputs.append(torch.empty_strided(shape, strides).fill_(-5))
        partial = []
        if scales == "tensor" or (scales == "row" and transpose is not False):
            partial = [torch.full(*kernels.partial_shape([m], k, scales)[:1], 2**30, dtype=torch.int32)]
        made(x, *outputs, *partial)
        return outputs

    return run


def plan_of(*tasks):
    """The plan of (parts, scales, transpose, dtype, power_of_two, shares) each, with its tensors in the order of the
    tasks: the parts, then the outputs."""
    made, num_tensors = [], 0
    for parts, scales, transpose, dtype, power_of_two, shares in tasks:
        count = len(parts) + 2 * (1 + (transpose == "both")) + (shares and scales == "row" and transpose is False)
        count += kernels.has_partial(scales, transpose, shares)
        positions = range(num_tensors, num_tensors + count)
        made.append(kernels.Task(parts, scales, transpose, dtype, power_of_two, shares, False, positions))
        num_tensors += count
    return kernels.plan(made, num_tensors, device.CPU)


def expected(x, scales, transpose, dtype=torch.float8_e4m3fn, power_of_two=False):
    found = []
    if transpose is not True:
        found += reference.quantize(x, scales, dtype, power_of_two)
    if transpose is not False:
        found += reference.quantize(x.t(), scales, dtype, power_of_two)
    return found


def assert_same_bits(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        if one.dtype == torch.float32:
            assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
        else:
            one, other = one.float(), other.float()
            assert torch.equal(one.nan_to_num(999), other.nan_to_num(999))


transposes = pytest.mark.parametrize("transpose", [False, True, "both"])


@pytest.fixture
def by_partial_results(monkeypatch, request):
    """Quantizes short columns as long ones, with partial results, if the test's parameter says so."""
    if request.param:
        monkeypatch.setattr(kernels, "has_short_columns", lambda scales, rows, k: False)


of_short_and_long_columns = pytest.mark.parametrize("by_partial_results", [False, True], indirect=True)


@of_short_and_long_columns
@transposes
@pytest.mark.parametrize("scales", layout.SCALES)
@pytest.mark.parametrize("shape", [(16, 48), (144, 272)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_bits_are_those_of_the_reference(quantized, by_partial_results, scales, transpose, shape, power_of_two):
    x = (torch.randn(shape) * torch.rand(shape[0], 1) * 100).bfloat16()
    found = quantized(x, scales, transpose, power_of_two=power_of_two)
    assert_same_bits(found, expected(x, scales, transpose, power_of_two=power_of_two))


@transposes
@pytest.mark.parametrize("shape", [(16, 48), (144, 272)])
def test_many_runs_have_the_bits_of_the_reference(quantized, monkeypatch, transpose, shape):
    loaded = []
    monkeypatch.setattr(kernels, "_FEW_RUNS", 0)
    monkeypatch.setattr(aot_kernels, "load", lambda id, number: loaded.append(id) or id)
    x = (torch.randn(shape) * torch.rand(shape[0], 1) * 100).bfloat16()
    x[3, 5], x[7, 9] = float("inf"), float("nan")
    assert_same_bits(quantized(x, "block", transpose), expected(x, "block", transpose))
    assert all(id.startswith("quantize_runs") for id in loaded) and loaded


@of_short_and_long_columns
@transposes
@pytest.mark.parametrize("scales", layout.SCALES)
def test_zeros_infinities_and_nans(quantized, by_partial_results, scales, transpose):
    x = torch.randn(144, 272).bfloat16()
    x[3], x[:, 5] = 0, 0
    x[20, 7], x[130, 250], x[140, 100] = float("nan"), float("inf"), -float("inf")
    x[60] = 2.0**-133  # a subnormal number
    assert_same_bits(quantized(x, scales, transpose), expected(x, scales, transpose))


@of_short_and_long_columns
@transposes
def test_the_wide_dtype_and_views_of_rows(quantized, by_partial_results, transpose):
    x = torch.randn(48, 96).half()[:, 16:80]
    wide = torch.float8_e5m2
    assert_same_bits(quantized(x, "tensor", transpose, wide), expected(x, "tensor", transpose, wide))
    assert_same_bits(quantized(x, "row", transpose), expected(x, "row", transpose))


def test_long_rows(quantized, monkeypatch):
    x = torch.randn(3, 272).bfloat16()
    monkeypatch.setattr(kernels, "ROW_BLOCKS", (128,))
    assert_same_bits(quantized(x, "row", False), expected(x, "row", False))


@pytest.mark.parametrize("unit", ["matrix", "column"])
@pytest.mark.parametrize("m", [1, 7, 100, 1000, 8192, 100_000])
@pytest.mark.parametrize("k", [16, 4096, 28672, 2**19])
def test_partial_results_cover_the_matrix_and_fit_their_reader(unit, m, k):
    (row_blocks, column_blocks), rows_per_block = kernels.amax_blocks(m, k, unit)
    rows, columns = kernels._AMAX_TILE
    assert rows_per_block % rows == 0
    assert (row_blocks - 1) * rows_per_block < m <= row_blocks * rows_per_block
    assert column_blocks * columns >= k
    assert row_blocks * (column_blocks if unit == "matrix" else 1) <= kernels.PARTIALS[unit]


@pytest.mark.parametrize("loops", [False, True])
def test_silu_times_up_is_what_torch_quantizes(quantized, monkeypatch, loops):
    if loops:
        monkeypatch.setattr(kernels, "ROW_BLOCKS", ())
    z = (torch.randn(5, 2 * 272) * 4).bfloat16()
    values, scale = torch.full((5, 272), 3.0).to(torch.float8_e4m3fn), torch.full((5, 1), -5.0)
    kernels.rows_plan("silu_mul", z, 272, 3, [1], device.CPU)(z, values, scale)
    assert_same_bits([values, scale], reference.quantize(fused.silu_mul(z), "row", values.dtype, True))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("m, k", [(5, 272), (17, 384), (1, 128)])
def test_silu_times_up_is_what_torch_quantizes_by_blocks(quantized, power_of_two, m, k):
    z = (torch.randn(m, 2 * k + 16) * 4).bfloat16()[:, : 2 * k]
    z[0, 3] = float("inf")
    shape, strides = layout.dense_shape("block", m, k)
    values, scale = torch.full((m, k), 3.0).to(torch.float8_e4m3fn), torch.empty_strided(shape, strides).fill_(-5)
    kernels.silu_mul_runs_plan(z, power_of_two, device.CPU)(z, values, scale)
    assert_same_bits([values, scale], reference.quantize(fused.silu_mul(z), "block", values.dtype, power_of_two))


@pytest.mark.parametrize("loops", [False, True])
def test_rows_times_factors_are_multiplied_in_32_bits(quantized, monkeypatch, loops):
    if loops:
        monkeypatch.setattr(kernels, "ROW_BLOCKS", ())
    x, factors = torch.randn(5, 272).half(), torch.rand(272, 1) * 1e6
    values, scale = torch.full((5, 272), 3.0).to(torch.float8_e4m3fn), torch.full((5, 1), -5.0)
    kernels.scaled_rows_plan(x, False, device.CPU)(x, factors, values, scale)
    assert_same_bits([values, scale], reference.quantize(x.float() * factors.t(), "row", values.dtype, False))


def test_a_transpose_has_ones_for_scales(quantized):
    x = torch.randn(144, 272).to(torch.float8_e4m3fn)
    transposed, ones = torch.full((272, 144), 3.0).to(x.dtype), torch.full((272, 1), -5.0)
    kernels.transpose_plan([x], device.CPU)(*(one.view(torch.int8) for one in (x, transposed)), ones)
    assert_same_bits([transposed, ones], [x.t(), torch.ones(272, 1)])


def test_the_transpose_of_several_matrices_is_that_of_their_rows(quantized):
    parts = [torch.randn(rows, 272).to(torch.float8_e4m3fn) for rows in (144, 16, 48, 272)]
    transposed, ones = torch.full((272, 480), 3.0).to(torch.float8_e4m3fn), torch.full((272, 1), -5.0)
    plan = kernels.transpose_plan(parts, device.CPU)
    plan(*(one.view(torch.int8) for one in (*parts, transposed)), ones)
    assert_same_bits([transposed, ones], [torch.cat(parts).t(), torch.ones(272, 1)])


def test_partial_results_of_another_call_are_taken(quantized):
    x = torch.randn(144, 272).bfloat16()
    partial = torch.full(*kernels.partial_shape([144], 272, "tensor")[:1], 0, dtype=torch.int32)
    plain = [torch.empty(144, 272).to(torch.float8_e4m3fn), torch.empty(1)]
    plan_of(([x], "tensor", False, "e4m3", False, False))(x, *plain, partial)
    transposed = [torch.full((272, 144), 3.0).to(torch.float8_e4m3fn), torch.full((1,), -5.0)]
    plan_of(([x], "tensor", True, "e4m3", False, True))(x, *transposed, partial)
    assert_same_bits(transposed, expected(x, "tensor", True))


@of_short_and_long_columns
@pytest.mark.parametrize("shape", [(144, 272), (19, 272), (1040, 272)])
@pytest.mark.parametrize("is_long", [False, True])
def test_scales_of_columns_are_given_and_taken(quantized, by_partial_results, monkeypatch, shape, is_long):
    """Those of another call, which may have any number of rows; columns that fit a tile have theirs from this one."""
    if is_long:
        monkeypatch.setattr(kernels, "ROW_BLOCKS", ())
    (m, k), x = shape, torch.randn(shape).bfloat16() * torch.rand(shape[1])
    x = x.bfloat16()
    partial = torch.full(*kernels.partial_shape([m], k, "row")[:1], 2**30, dtype=torch.int32)
    given = [torch.full((m, k), 3.0).to(torch.float8_e4m3fn), torch.full((m, 1), -5.0), torch.full((k, 1), -5.0)]
    plan_of(([x], "row", False, "e4m3", True, True))(x, *given, partial)
    values, scale = reference.quantize(x.t(), "row", torch.float8_e4m3fn, True)
    is_given = not kernels.has_short_columns("row", [m], k)
    assert_same_bits(given, [*expected(x, "row", False, power_of_two=True), scale if is_given else given[2]])
    if m % kernels.MULTIPLE == 0:
        transposed = torch.full((k, m), 3.0).to(torch.float8_e4m3fn)
        plan_of(([x], "row", True, "e4m3", True, True))(x, transposed, given[2])
        assert_same_bits([transposed, given[2]], [values, scale])


@pytest.mark.parametrize("m", [1, 7, 100, 1000, 8192, 100_000])
@pytest.mark.parametrize("block", kernels.ROW_BLOCKS)
def test_blocks_of_rows_cover_the_matrix(m, block):
    num_blocks, rows_per_block = kernels._row_blocks(m, block)
    at_once, most = kernels._ROWS_COLUMNS[block]
    assert rows_per_block % at_once == 0
    assert (num_blocks - 1) * rows_per_block < m <= num_blocks * rows_per_block
    assert num_blocks <= most
    assert kernels.partial_shape([m], block, "row")[0][0] >= num_blocks * block


def test_a_norm_writes_its_result_and_that_in_fp8(quantized):
    x, weight = (torch.randn(5, 272) * 3).bfloat16(), torch.rand(272).bfloat16()
    y, values = torch.full_like(x, 3), torch.full((5, 272), 3.0).to(torch.float8_e4m3fn)
    scale = torch.full((5, 1), -5.0)
    kernels.rows_plan("rms_norm", x, 272, 5, [fused.bits(1e-5), 0], device.CPU)(x, weight, y, values, scale)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (272,), weight, 1e-5), rtol=2**-7, atol=0)
    assert_same_bits([values, scale], reference.quantize(y, "row", values.dtype, False))


def test_matrices_are_quantized_as_one(quantized):
    parts = [(torch.randn(m, 272) * torch.rand(272) * m).bfloat16() for m in (144, 16, 48)]
    whole = torch.cat(parts)
    (m, k), rows = whole.shape, [len(part) for part in parts]
    partial = torch.full(*kernels.partial_shape(rows, k, "row")[:1], 2**30, dtype=torch.int32)
    given = [torch.full((m, k), 3.0).to(torch.float8_e4m3fn), torch.full((m, 1), -5.0), torch.full((k, 1), -5.0)]
    plan_of((parts, "row", False, "e4m3", True, True))(*parts, *given, partial)
    values, scale = reference.quantize(whole.t(), "row", torch.float8_e4m3fn, True)
    assert_same_bits(given, [*expected(whole, "row", False, power_of_two=True), scale])
    transposed = torch.full((k, m), 3.0).to(torch.float8_e4m3fn)
    plan_of((parts, "row", True, "e4m3", True, True))(*parts, transposed, given[2])
    assert_same_bits([transposed], [values])


@of_short_and_long_columns
@pytest.mark.parametrize("scales", ["row", "tensor", "block"])
def test_matrices_of_several_sizes_are_quantized_in_the_same_launches(
    quantized, by_partial_results, monkeypatch, scales
):
    launched = []
    plan = aot_kernels.plan
    monkeypatch.setattr(aot_kernels, "plan", lambda on, num, steps: launched.append(len(steps)) or plan(on, num, steps))
    matrices = [torch.randn(m, k).bfloat16() for m, k in ((48, 272), (144, 16), (16, 528), (80, 64), (16, 160))]
    tasks, tensors, wanted, found = [], [], [], []
    for x, transpose in zip(matrices, ("both", False, "both", True, False)):
        if scales.startswith("block"):
            scales = "block_2d" if scales == "block" else "block"
        tasks.append(([x], scales, transpose, "e4m3", True, False))
        (m, k), outputs = x.shape, []
        for rows, columns in [(m, k)] * (transpose is not True) + [(k, m)] * (transpose is not False):
            shape, strides = layout.dense_shape(scales, rows, columns)
            outputs += [torch.full((rows, columns), 3.0).to(torch.float8_e4m3fn)]
            outputs += [torch.empty_strided(shape, strides).fill_(-5)]
        found += outputs
        if kernels.has_partial(scales, transpose, False):
            outputs = [*outputs, torch.full(*kernels.partial_shape([m], k, scales)[:1], 2**30, dtype=torch.int32)]
        tensors += [x, *outputs]
        wanted += expected(x, scales, transpose, power_of_two=True)
    plan_of(*tasks)(*tensors)
    assert_same_bits(found, wanted)
    # Rows: those of columns and of rows alone, two of column scales, and of tiles; or of short columns and of rows
    # alone. The matrix: five take two launches. Blocks, of either shape: those of the transpose and those without.
    is_short = kernels.has_short_columns(scales, [48], 272)
    assert launched == [{"row": 2 if is_short else 5, "tensor": 4}.get(scales, 2)]


def test_one_launch_writes_both_dtypes(quantized, monkeypatch):
    launched = []
    plan = aot_kernels.plan
    monkeypatch.setattr(aot_kernels, "plan", lambda on, num, steps: launched.append(len(steps)) or plan(on, num, steps))
    x, dy = torch.randn(48, 80).bfloat16(), torch.randn(48, 144).bfloat16()
    tasks, tensors, found, wanted = [], [], [], []
    for matrix, dtype in ((x, torch.float8_e4m3fn), (dy, torch.float8_e5m2)):
        m, k = matrix.shape
        tasks.append(([matrix], "tensor", "both", "e4m3" if matrix is x else "e5m2", False, False))
        outputs = [torch.full((m, k), 3.0).to(dtype), torch.full((1,), -5.0)]
        outputs += [torch.full((k, m), 3.0).to(dtype), torch.full((1,), -5.0)]
        partial = torch.full(*kernels.partial_shape([m], k, "tensor")[:1], 2**30, dtype=torch.int32)
        tensors += [matrix, *outputs, partial]
        found += outputs
        wanted += expected(matrix, "tensor", "both", dtype)
    plan_of(*tasks)(*tensors)
    assert_same_bits(found, wanted)
    assert launched == [2], "the largest magnitudes, and the values"


def gradients(z, dh):
    """Those of silu(gate) * up in float64."""
    gate, up = (half.double().requires_grad_() for half in z.chunk(2, 1))
    h = torch.nn.functional.silu(gate) * up
    return (*torch.autograd.grad(h, (gate, up), dh.double()), h.detach())


@pytest.mark.parametrize("m, n", [(5, 272), (33, 1040)])
def test_the_activation_and_its_gradients_in_16_bits(quantized, m, n):
    z, dh = (torch.randn(m, 2 * n) * 4).bfloat16(), torch.randn(m, n).bfloat16()
    gate, up = z.chunk(2, 1)
    h, dgate, dup = (torch.full((m, n), 3.0).bfloat16() for _ in range(3))
    kernels.silu_mul_plan(gate, device.CPU)(gate, up, h)
    kernels.silu_mul_grad_plan(gate, device.CPU)(gate, up, dh, dgate, dup)
    assert torch.equal(h, fused.silu_mul(z))
    for found, wanted in zip((dgate, dup), gradients(z, dh)):
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("m, is_taken", [(65535 * 8, True), (65535 * 8 + 1, False)])
def test_kernels_of_the_activation_take_no_more_rows_than_a_grid_has(quantized, monkeypatch, m, is_taken):
    grids = []
    monkeypatch.setattr(fused, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(aot_kernels, "plan", lambda on, number, steps: grids.extend(grid for _, grid, _ in steps))
    z, dh = torch.empty(m, 32).bfloat16(), torch.empty(m, 16).bfloat16()
    gate, up = z.chunk(2, 1)
    fused.silu_mul_plan(z, False, "block")
    fused.activation_plan(gate, up)
    fused.activation_grad_plan(gate, up, dh)
    assert grids == [(1, 65535, 1)] * 3 * is_taken


@pytest.mark.parametrize("m, n", [(16, 48), (112, 272)])
def test_the_gradients_of_a_feed_forward_in_fp8(quantized, monkeypatch, m, n):
    monkeypatch.setattr(kernels, "_SWIGLU_PROGRAMS", 6)
    z = (torch.randn(m, 2 * n) * torch.rand(m, 1) * 4).bfloat16()
    dh = (torch.randn(m, n) * torch.rand(n)).bfloat16()
    outputs = []
    for shape in ((m, 2 * n), (2 * n, m), (n, m)):
        outputs += [torch.full(shape, 3.0).to(torch.float8_e4m3fn), torch.full((shape[0], 1), -5.0)]
    partials = [torch.full(shape, 2**30, dtype=torch.int32) for shape in kernels.swiglu_partial_shapes(m, n)]
    kernels.swiglu_grad_plan(z, True, device.CPU)(z, dh, *outputs, *partials)
    dgate, dup, h = gradients(z, dh)
    dz = torch.cat((dgate, dup), 1)
    for wanted, values, scale in zip((dz, dz.t(), h.t()), outputs[::2], outputs[1::2]):
        assert (values.double() * scale - wanted).norm() < 0.04 * wanted.norm()
        # Scales are powers of two that just reach the largest value of a row, here to within its rounding.
        largest = wanted.abs().amax(1, keepdim=True) / 448
        assert ((scale >= 0.99 * largest) & (scale <= 2.02 * largest)).all()
    factors = 2.0 ** torch.randint(-6, 6, (2 * n, 1))
    scaled = [torch.full_like(output, 3.0) for output in outputs]
    kernels.swiglu_grad_plan(z, True, device.CPU, is_scaled=True)(z, dh, factors, *scaled, *partials)
    assert_same_bits(scaled[2:], outputs[2:])
    wanted = dz * factors.t()
    largest = wanted.abs().amax(1, keepdim=True) / 448
    assert (scaled[0].double() * scaled[1] - wanted).norm() < 0.04 * wanted.norm()
    assert ((scaled[1] >= 0.99 * largest) & (scaled[1] <= 2.02 * largest)).all()


@pytest.mark.parametrize("m", [16, 4096, 100_000])
@pytest.mark.parametrize("tiles", [1, 112, 5000])
def test_blocks_of_a_feed_forward_cover_its_rows(m, tiles):
    num_blocks, rows_per_block = kernels._swiglu_blocks(m, tiles)
    assert rows_per_block % kernels._SWIGLU_ROWS["swiglu_amax"] == 0
    assert (num_blocks - 1) * rows_per_block < m <= num_blocks * rows_per_block
