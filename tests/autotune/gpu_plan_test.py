"""scaled_mm on a machine that has an H200 as far as it can tell: the native module is a stand-in
that computes from the raw pointers and numbers it is given, in memory of the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import types

import pytest
import small_package as small
import torch

import stoneware as sw
from stoneware.errors import TableError, UnsupportedError
from stoneware.kernels import sm90_kernels
from stoneware.ops import tensor_checks
from stoneware.ops.scaled_mm import api, sm90
from stoneware.runtime.device import Device
from stoneware.specs.scaled_mm_problem import Problem

H200 = Device(ordinal=0, fingerprint=small.H200)
H200_DESCRIBED = Device(fingerprint=small.H200)
STREAM = 4242
TRITON = api.OPERATION.backends["triton_aot"]


def memory(pointer: int, dtype: torch.dtype, shape: tuple, strides: tuple) -> torch.Tensor:
    """A tensor over memory that is known by its address only."""
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    buffer = (ctypes.c_char * (num_elements * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


class Plan:
    """The contract of `_sm90.Plan`."""

    made: list[Plan] = []

    def __init__(
        self,
        kernel,
        *,
        tensors,
        m,
        n,
        k,
        lda,
        ldb,
        ldd,
        scale_a,
        scale_b,
        device,
        num_sms,
        max_swizzle=1,
        raster="heuristic",
        splits=1,
        scale_a_stride_m=1,
        ld_scale_a=0,
        scale_b_stride_n=1,
        ld_scale_b=0,
    ):
        assert tensors == ("a", "b", "out", "scale_a", "scale_b", "bias")
        self.kernel, self.sizes, self.strides = kernel, (m, n, k), (lda, ldb, ldd)
        self.is_block = (scale_a, scale_b) == ("block_1x128", "block_128x128")
        self.scale_a_strides = scale_a_stride_m, ld_scale_a
        self.scale_b_strides = ld_scale_b, scale_b_stride_n
        self.is_vector = scale_a == "row", scale_b == "row"
        self.device, self.num_sms = device, num_sms
        self.knobs = max_swizzle, raster, splits
        self.num_launches = 0
        Plan.made.append(self)

    workspace_bytes = 0

    def native_launch(self):
        return None  # by __call__

    def __call__(self, stream, addresses):
        assert stream == STREAM
        a, b, d, scale_a, scale_b, bias = addresses
        self.num_launches += 1
        (m, n, k), (lda, ldb, ldd) = self.sizes, self.strides
        out_dtype = torch.bfloat16 if "_bf16_" in self.kernel else torch.float16
        e4m3, fp32 = torch.float8_e4m3fn, torch.float32
        x, y = memory(a, e4m3, (m, k), (lda, 1)).float(), memory(b, e4m3, (k, n), (1, ldb)).float()
        if self.is_block:
            blocks, columns = k // 128, -(-n // 128)
            x_scales = memory(scale_a, fp32, (m, blocks), self.scale_a_strides)
            y_scales = memory(scale_b, fp32, (blocks, columns), self.scale_b_strides)
            x *= x_scales.repeat_interleave(128, 1)
            y *= y_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        result = x @ y
        if not self.is_block:
            result *= memory(scale_a, fp32, (m if self.is_vector[0] else 1, 1), (1, 1))
            result *= memory(scale_b, fp32, (1, n if self.is_vector[1] else 1), (1, 1))
        if bias:
            result += memory(bias, out_dtype, (n,), (1,))
        memory(d, out_dtype, (m, n), (ldd, 1)).copy_(result)


@pytest.fixture
def gpu(package, monkeypatch):
    """Makes CPU tensors count as tensors of the GPU 0, an H200; returns the plans made."""
    module = types.ModuleType("stoneware.ops._sm90")
    module.Plan = Plan
    module.image = str.encode  # small_package has the digests of the kernels' names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tensor_checks, "CPU", H200)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    monkeypatch.setattr(Plan, "made", [])
    small.forget()
    return Plan.made


def operands(m, n, k, scale_a="row", scale_b="row", bias_dtype=None):
    return (
        torch.randn(m, k).to(torch.float8_e4m3fn),
        torch.randn(n, k).to(torch.float8_e4m3fn).t(),
        torch.rand((m, 1) if scale_a == "row" else (1,)) + 0.5,
        torch.rand((1, n) if scale_b == "row" else (1, 1)) + 0.5,
        None if bias_dtype is None else torch.randn(n).to(bias_dtype),
    )


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_a", ["row", "tensor"])
@pytest.mark.parametrize("scale_b", ["row", "tensor"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_kernel_gets_what_the_result_needs(gpu, m, out_dtype, scale_a, scale_b, has_bias):
    x = operands(m, 64, 128, scale_a, scale_b, out_dtype if has_bias else None)
    out = torch.full((m, 64), float("nan"), dtype=out_dtype)
    sw.scaled_mm(*x, out_dtype, out=out, backend="sm90")
    assert torch.equal(out, sw.scaled_mm(*x, out_dtype, backend="reference"))
    (plan,) = gpu
    assert (plan.device, plan.num_sms, plan.num_launches) == (0, 132, 1)


def block_scales(m: int, n: int, k: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales 1x128 and 128x128 of powers of two, with which every product is exact; "torch": as
    torch lays them out; "dense": row-major; "sliced": views with NaN between the elements."""
    blocks, columns = k // 128, -(-n // 128)
    rows = -(-blocks // 4) * 4
    scale_a, scale_b = 2.0 ** torch.randint(-2, 3, (m, blocks)), 2.0 ** torch.randint(-2, 3, (blocks, columns))
    if layout == "torch":
        padded = torch.full((columns, rows), float("nan")).t()
        padded[:blocks] = scale_b
        return scale_a.t().contiguous().t(), padded
    if layout == "dense":
        return scale_a, scale_b
    wide_a = torch.full((2 * m, 3 * blocks), float("nan"))
    wide_b = torch.full((2 * blocks, 3 * columns), float("nan"))
    wide_a[::2, ::3], wide_b[::2, ::3] = scale_a, scale_b
    return wide_a[::2, ::3], wide_b[::2, ::3]


@pytest.mark.parametrize("layout", ["torch", "dense", "sliced"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 256), (17, 144, 384), (5, 272, 128)])
def test_kernel_gets_the_strides_of_block_scales(gpu, m, n, k, layout):
    a, b, *_ = operands(m, n, k)
    scales = block_scales(m, n, k, layout)
    result = sw.scaled_mm(a, b, *scales, backend="sm90")
    expected = sw.scaled_mm(a, b, *scales, backend="reference")
    assert torch.allclose(result.float(), expected.float(), rtol=2.0**-7, atol=1e-3)
    (plan,) = gpu
    assert plan.is_block and "_block_" in plan.kernel


def test_kernel_gets_the_strides_of_sliced_views(gpu):
    a, b, scale_a, scale_b, bias = operands(80, 96, 128, bias_dtype=torch.bfloat16)
    base = torch.full((37, 64), float("nan"), dtype=torch.bfloat16)
    view = a[3:40, 32:112], b[32:112, 16:64], scale_a[3:40], scale_b[:, 16:64], bias[16:64]
    sw.scaled_mm(*view, out=base[:, :48], backend="sm90")
    assert gpu[0].strides == (128, 128, 64)
    assert torch.equal(base[:, :48], sw.scaled_mm(*view, backend="reference"))
    assert base[:, 48:].isnan().all()


def test_kernel_gets_dense_copies_of_strided_scales_and_bias(gpu):
    a, b, *_ = operands(40, 64, 128)
    bias = torch.randn(128).bfloat16()
    strided = torch.rand(40, 3)[:, 1:2], torch.rand(1, 128)[:, ::2], bias[::2]
    for _ in range(2):
        assert torch.equal(
            sw.scaled_mm(a, b, *strided, backend="sm90"), sw.scaled_mm(a, b, *strided, backend="reference")
        )
    assert len(gpu) == 1


def test_strided_vector_after_a_dense_one_of_its_shape_is_copied_too(gpu):
    a, b, scale_a, scale_b, bias = operands(40, 64, 128, bias_dtype=torch.bfloat16)
    strided_a, strided_b = torch.rand(40, 3)[:, 1:2], torch.rand(1, 128)[:, ::2]
    strided_bias = torch.randn(128).bfloat16()[::2]
    for vectors in (
        (scale_a, scale_b, bias),
        (strided_a, scale_b, bias),
        (scale_a, strided_b, bias),
        (scale_a, scale_b, strided_bias),
    ):
        assert torch.equal(
            sw.scaled_mm(a, b, *vectors, backend="sm90"), sw.scaled_mm(a, b, *vectors, backend="reference")
        )


@pytest.mark.parametrize(("shape", "is_vector"), [((1, 1), True), ((1,), False), ((), False)])
def test_scale_of_one_row_counts_as_a_row_so_that_torch_takes_it(gpu, shape, is_vector):
    a, b, _, scale_b, _ = operands(1, 64, 128)
    sw.scaled_mm(a, b, torch.full(shape, 2.0), scale_b, backend="sm90")
    assert gpu[0].is_vector == (is_vector, True)


def test_second_call_of_a_kind_makes_no_plan_and_asks_no_backend(gpu, monkeypatch):
    x = operands(16, 4096, 4096)
    first = sw.scaled_mm(*x)
    assert gpu[0].kernel == small.sm90(small.TINY).kernel, "the table's choice at this shape"
    y = operands(16, 4096, 4096)
    sw.scaled_mm(*y)
    assert torch.equal(sw.scaled_mm(*x), first)
    assert [plan.num_launches for plan in gpu] == [3]
    sw.scaled_mm(*x, config=small.sm90(small.BIG, max_swizzle=4))
    assert [plan.num_launches for plan in gpu] == [3, 1]
    assert gpu[1].knobs == (4, "heuristic", 1)


def test_plan_cache_is_bounded(gpu, monkeypatch):
    from stoneware.ops import native_call

    monkeypatch.setattr(native_call, "MAX_PLANS", 8)
    monkeypatch.setattr(api, "_PLANS", type(api._PLANS)())
    for m in range(1, 21):
        sw.scaled_mm(*operands(m, 16, 16), backend="sm90")
    assert len(api._PLANS.fast) == 4  # it was emptied when the 9th and the 17th came
    sw.scaled_mm(*operands(20, 16, 16), backend="sm90")
    assert len(gpu) == 20


def test_driver_of_an_older_major_version_is_a_reason(gpu):
    older = dataclasses.replace(H200, driver_version=(12, 8))
    problem = Problem.dense(m=16, n=256, k=256)
    assert sm90.BACKEND.supports(problem, older) == (
        "its cubins are of CUDA 13.0 and the driver serves CUDA 12.8; update the driver"
    )


def test_missing_native_module_is_a_reason_and_the_next_backend_runs(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "stoneware.ops._sm90", None)
    small.forget()
    x = operands(16, 4096, 4096)
    with pytest.raises(UnsupportedError) as caught:
        sw.scaled_mm(*x, backend="sm90")
    assert "module stoneware.ops._sm90 is not usable" in str(caught.value)
    assert "install the stoneware wheel that is built for this Python" in str(caught.value)
    problem = api.Problem.dense(m=16, n=4096, k=4096)
    decision = api.OPERATION.decide(problem, H200)
    assert decision.config.backend == "vendor"
    assert any("not usable" in item.reason for item in decision.refusals)


@pytest.mark.parametrize("is_known", [True, False])
def test_module_of_another_build_than_the_manifest_is_refused(gpu, monkeypatch, is_known):
    def image(kernel):
        if not is_known:
            raise ValueError(f"kernel={kernel!r} is not in this module")
        return b"another build"

    monkeypatch.setattr(sys.modules[sm90_kernels.MODULE], "image", image)
    for _ in range(2):
        with pytest.raises(TableError) as caught:
            sw.scaled_mm(*operands(16, 64, 128), backend="sm90")
        for part in (sm90_kernels.MODULE, "expected", "found", "different builds", "reinstall"):
            assert part in str(caught.value)
    assert gpu == []


def test_image_is_read_once_per_kernel(gpu, monkeypatch):
    read = []
    module = sys.modules[sm90_kernels.MODULE]
    monkeypatch.setattr(module, "image", lambda kernel: read.append(kernel) or kernel.encode())
    for m in (16, 15, 14):
        sw.scaled_mm(*operands(m, 64, 128), config=small.sm90(small.TINY))
    assert len(gpu) == 3
    assert read == [small.sm90(small.TINY).kernel]


@pytest.mark.parametrize("size", ["m", "n"])
def test_size_past_32_bits_of_tiles_is_refused_before_the_launch(gpu, size):
    sizes = {"m": 16, "n": 16, "k": 16}
    for backend in (sm90.BACKEND, TRITON):
        fits = api.Problem.dense(**{**sizes, size: 2**31 - 128})
        assert backend.supports(fits, H200_DESCRIBED) is None
        past = api.Problem.dense(**{**sizes, size: 2**31 - 16})
        reason = backend.supports(past, H200_DESCRIBED)
        assert f"{size}={2**31 - 16}" in reason
        assert "32" in reason


def test_triton_grid_past_32_bits_is_refused_before_the_launch(gpu):
    problem = api.Problem.dense(m=2**30, n=2**30, k=16)
    assert "32" in TRITON.supports(problem, H200_DESCRIBED)
    assert TRITON.supports(api.Problem.dense(m=2**20, n=2**20, k=16), H200_DESCRIBED) is None


def test_damaged_table_stops_the_call_with_its_name(gpu, package):
    path = package / "tables" / "scaled_mm.table"
    path.write_bytes(path.read_bytes()[:100])
    small.forget()
    with pytest.raises(TableError, match="scaled_mm.table: expected"):
        sw.scaled_mm(*operands(16, 64, 128))
