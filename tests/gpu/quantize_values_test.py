"""The kernels that quantize give the bits of plain torch, at any shape, on views and in graphs."""

from __future__ import annotations

import copy
import sys

import fitting_kernels
import pytest
import torch

import stoneware as sw
from stoneware.kernels import aot_kernels
from stoneware.kernels.manifest import KernelRecord
from stoneware.nn import fused_blocks
from stoneware.nn.recipes import RECIPES
from stoneware.ops import native_call
from stoneware.quantizing import api as quantizing
from stoneware.quantizing import fused, kernels, layout, reference
from stoneware.runtime.dtypes import DTYPE_NAMES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

SHAPES = [(1, 16), (3, 4096), (16, 4112), (17, 16384), (5, 28672), (128, 128), (144, 272), (8192, 1024), (1000, 7168)]
SHAPES += [(512, 512), (513, 512), (528, 17008)]


def expected(x, scales, transpose, dtype=E4M3, power_of_two=False):
    sources = [x] * (transpose is not True) + [x.t()] * (transpose is not False)
    return [one for source in sources for one in reference.quantize(source, scales, dtype, power_of_two)]


def assert_same_bits(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        one, other = one.float(), other.float()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def poison(device):
    """Leaves memory that a call may get full of something else."""
    torch.full((2**24,), float("nan"), device=device)


@pytest.fixture
def on(device):
    if aot_kernels.built_for(kernels.OP, device.compute_capability) is None:
        pytest.skip(f"{device} runs no kernel that quantizes: they are built from compute capability 8.9 on")
    return torch.device("cuda", device.ordinal)


@pytest.mark.parametrize("transpose", [False, True, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_dtype", [torch.bfloat16, torch.float16])
def test_bits_are_those_of_the_reference(on, device, scales, transpose, shape, in_dtype):
    m = shape[0] if transpose is False else -(-shape[0] // 16) * 16
    x = (torch.randn(m, shape[1], device=on) * torch.rand(m, 1, device=on)).to(in_dtype)
    for dtype, power_of_two in ((E4M3, False), (E4M3, True), *([(E5M2, False)] if scales == "tensor" else [])):
        assert kernels.why_not(x, scales, DTYPE_NAMES[dtype], transpose is not False, device) is None
        poison(on)
        found = sw.quantize(x, scales, transpose=transpose, dtype=dtype, power_of_two=power_of_two)
        assert_same_bits(found, expected(x, scales, transpose, dtype, power_of_two))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("in_dtype", [torch.bfloat16, torch.float16])
def test_the_scale_and_the_values_of_each_magnitude_are_those_of_a_division(on, in_dtype, power_of_two):
    largest = torch.arange(-(2**15), 2**15, device=on).to(torch.int16).view(in_dtype)
    x = (largest.float().view(-1, 1) * torch.linspace(1, 0, layout.BLOCK, device=on)).to(in_dtype)
    # All at once, by the kernel for many runs, and in parts, by the one for both kinds of blocks.
    for part in (x, *x.split(kernels._FEW_RUNS // layout.BLOCK)):
        for scales in ("row", "block", "block_2d"):
            found = sw.quantize(part, scales, power_of_two=power_of_two)
            assert_same_bits(found, reference.quantize(part, scales, E4M3, power_of_two))
        # By the kernels that find the scales of columns first.
        found = sw.quantize(part.t().contiguous(), "row", transpose=True, power_of_two=power_of_two)
        assert_same_bits(found, reference.quantize(part, "row", E4M3, power_of_two))


_CALLS = {
    "amax_column": ((528, 512), "row", True),
    "amax_matrix": ((528, 512), "tensor", False),
    "blocks": ((144, 272), "block", False),
    "blocks_t": ((144, 272), "block_2d", "both"),
    "column_scales": ((528, 512), "row", True),
    "rows_16384": ((16, 4112), "row", False),
    "rows_4096": ((3, 4096), "row", False),
    "rows_columns_16384": ((528, 4112), "row", "both"),
    "rows_columns_4096": ((528, 512), "row", "both"),
    "rows_loop": ((5, 17008), "row", False),
    "runs": ((4112, 272), "block", False),
    "runs_t": ((4112, 272), "block", "both"),
    "short_columns_t": ((272, 400), "row", "both"),
    "tiles_column_t": ((528, 512), "row", True),
    "tiles_matrix": ((144, 272), "tensor", False),
    "tiles_matrix_t": ((144, 272), "tensor", "both"),
}
"""Kernel -> shape, scales and transpose of a call that launches it."""


def _variant(kernel: KernelRecord) -> str:
    return kernel.id.removeprefix("quantize_").partition("_triton_")[0]


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in fitting_kernels.of(kernels.OP) if _variant(kernel) in _CALLS],
    ids=fitting_kernels.kernel_id,
)
def test_kernel_gives_the_bits_of_the_reference(on, kernel, monkeypatch):
    (m, k), scales, transpose = _CALLS[_variant(kernel)]
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    x = (torch.randn(m, k, device=on) * torch.rand(m, 1, device=on)).to(dtypes[kernel.config["a"]])
    dtype, loaded, load = dtypes[kernel.config["out"]], [], aot_kernels.load
    monkeypatch.setattr(aot_kernels, "load", lambda id, count: loaded.append(id) or load(id, count))
    plan, outputs = quantizing.make_plan([x], [quantizing.Quantization(scales, transpose, dtype, False)])
    assert kernel.id in loaded
    poison(on)
    results, wanted = [native_call.empty(output, on) for output in outputs], expected(x, scales, transpose, dtype)
    plan(x, *results)
    assert_same_bits(results[: len(wanted)], wanted)


@pytest.mark.parametrize("transpose", [False, True, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
def test_zeros_infinities_nans_and_subnormal_numbers(on, scales, transpose):
    x = torch.randn(272, 400, device=on).bfloat16()
    x[3], x[:, 5] = 0, 0
    x[20, 7], x[130, 250], x[140, 100] = float("nan"), float("inf"), -float("inf")
    x[60] = 2.0**-133
    assert_same_bits(sw.quantize(x, scales, transpose=transpose), expected(x, scales, transpose))


@pytest.mark.parametrize("transpose", [False, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
def test_views_and_what_no_kernel_takes(on, scales, transpose):
    whole = torch.randn(96, 2048, device=on).bfloat16()
    for x in (whole[::2, 512:1024], whole[:, 3:300], whole[:48].t(), whole[:33, :50].float()):
        assert_same_bits(sw.quantize(x, scales, transpose=transpose), expected(x, scales, transpose))


@pytest.mark.parametrize("scales", layout.SCALES)
def test_a_graph_quantizes_what_its_input_holds(on, scales):
    x = torch.randn(256, 512, device=on).bfloat16()
    sw.quantize(x, scales, transpose="both")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sw.quantize(x, scales, transpose="both")
    x.copy_(torch.randn_like(x) * 7)
    graph.replay()
    assert_same_bits(results, expected(x, scales, "both"))


def test_streams_do_not_share_partial_results(on):
    xs = [torch.randn(2048, 4096, device=on).bfloat16() * 10**i for i in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for x, stream in zip(xs, streams):
            with torch.cuda.stream(stream):
                results.append((x, sw.quantize(x, "tensor")))
    torch.cuda.synchronize()
    for x, found in results:
        assert_same_bits(found, expected(x, "tensor", False))


@pytest.mark.parametrize("k", [16, 2048, 4112, 14336, 28672])
@pytest.mark.parametrize("m", [1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_times_up_is_quantized_as_float64_has_it(on, device, m, k, dtype):
    z = (torch.randn(m, 2 * k + 16, device=on) * 4).to(dtype)[:, : 2 * k]
    values, scale = torch.empty(m, k, device=on, dtype=E4M3), torch.empty(m, 1, device=on)
    poison(on)
    for power_of_two in (False, True):
        plan = fused.silu_mul_plan(z, power_of_two)
        assert hasattr(plan, "native_launch")  # a kernel's
        plan(z, values, scale)
        gate, up = z.double().chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
        wanted = exact.abs().amax(1, keepdim=True) / 448
        assert ((scale >= 0.99 * wanted) & (scale <= (2.02 if power_of_two else 1.01) * wanted)).all()
        # Half a unit in the last place of fp8 (2^-4 of a value, 2^-10 of a scale), and two of the 16-bit dtype.
        error = (values.double() * scale - exact).abs()
        assert (error <= (2**-4 + 2**-7) * exact.abs() + 2**-10 * 1.01 * scale).all()


@pytest.mark.parametrize("k", [16, 2048, 4112, 14336])
@pytest.mark.parametrize("m", [1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_times_up_is_quantized_by_blocks_as_float64_has_it(on, device, m, k, dtype):
    z = (torch.randn(m, 2 * k + 16, device=on) * 4).to(dtype)[:, : 2 * k]
    shape, strides = layout.dense_shape("block", m, k)
    values, scale = torch.empty(m, k, device=on, dtype=E4M3), torch.empty_strided(shape, strides, device=on)
    poison(on)
    for power_of_two in (False, True):
        plan = fused.silu_mul_plan(z, power_of_two, "block")
        assert hasattr(plan, "native_launch")  # a kernel's
        plan(z, values, scale)
        gate, up = z.double().chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
        padded = torch.nn.functional.pad(exact, (0, -k % layout.BLOCK))
        wanted = padded.unflatten(1, (-1, layout.BLOCK)).abs().amax(2) / 448
        assert ((scale >= 0.99 * wanted) & (scale <= (2.02 if power_of_two else 1.01) * wanted)).all()
        scales = scale.repeat_interleave(layout.BLOCK, 1)[:, :k]
        error = (values.double() * scales - exact).abs()
        assert (error <= (2**-4 + 2**-7) * exact.abs() + 2**-10 * 1.01 * scales).all()


@pytest.mark.parametrize("k", [16, 2048, 4112, 14336, 28672])
@pytest.mark.parametrize("m", [1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_times_factors_are_multiplied_in_32_bits(on, device, m, k, dtype):
    x, factors = torch.randn(m, k + 16, device=on).to(dtype)[:, :k], torch.rand(k, 1, device=on) * 1e6
    values, scale = torch.empty(m, k, device=on, dtype=E4M3), torch.empty(m, 1, device=on)
    poison(on)
    for power_of_two in (False, True):
        plan = fused.scaled_rows_plan(x, factors, power_of_two)
        assert hasattr(plan, "native_launch")  # a kernel's
        plan(x, factors, values, scale)
        assert_same_bits([values, scale], reference.quantize(x.float() * factors.t(), "row", E4M3, power_of_two))


@pytest.mark.parametrize("shape", [(16, 16), (48, 4112), (4096, 14336), (128, 28672)])
def test_a_transpose_has_ones_for_scales(on, device, shape):
    x = torch.randn(shape, device=on).to(E4M3)
    transposed, ones = torch.empty(x.t().shape, device=on, dtype=E4M3), torch.empty(shape[1], 1, device=on)
    poison(on)
    plan = fused.transpose_plan(x)
    assert hasattr(plan, "native_launch")  # a kernel's
    plan(x, transposed, ones)
    assert_same_bits([transposed, ones], [x.t(), torch.ones_like(ones)])


def test_the_transpose_of_several_matrices_is_that_of_their_rows(on, device):
    parts = [torch.randn(rows, 4112, device=on).to(E4M3) for rows in (4096, 16, 1040)]
    rows = torch.cat([part.view(torch.uint8) for part in parts]).view(E4M3)
    transposed, ones = torch.empty(rows.t().shape, device=on, dtype=E4M3), torch.empty(4112, 1, device=on)
    poison(on)
    plan = fused.transpose_plan(*parts)
    assert hasattr(plan, "native_launch")  # a kernel's
    plan(*parts, transposed, ones)
    assert_same_bits([transposed, ones], [rows.t(), torch.ones_like(ones)])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [16, 17, 2048])
def test_one_native_call_has_the_gradients_of_float64(on, recipe, m):
    torch.manual_seed(5)
    layer = sw.nn.Float8Linear(1024, 2816, recipe=recipe, device=on, dtype=torch.bfloat16)
    x = torch.randn(2, m, 1024, device=on).bfloat16().requires_grad_()
    dy = torch.randn(2, m, 2816, device=on).bfloat16()
    for _ in range(2):  # the first makes the plans
        poison(on)
        y = layer(x)
        found = [y, *torch.autograd.grad(y, [x, layer.weight], dy)]
    rows, rows_dy, weight = x.double().flatten(0, 1), dy.double().flatten(0, 1), layer.weight.double()
    wanted = [rows @ weight.t() + layer.bias.double(), rows_dy @ weight, rows_dy.t() @ rows]
    for one, other in zip(found, wanted, strict=True):
        error = (one.double().reshape(other.shape) - other).norm() / other.norm()
        assert error < 2**-4 * (2 if recipe == "tensorwise" else 1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_frozen_layer_passes_the_gradient_on(on, recipe):
    torch.manual_seed(6)
    linear = torch.nn.Linear(1024, 2816, device=on, dtype=torch.bfloat16)
    layer = sw.nn.Float8InferenceLinear.from_linear(linear, recipe)
    x = torch.randn(2, 40, 1024, device=on).bfloat16().requires_grad_()
    dy = torch.randn(2, 40, 2816, device=on).bfloat16()
    for _ in range(2):
        poison(on)
        (found,) = torch.autograd.grad(layer(x), x, dy)
    wanted = dy.double() @ linear.weight.double()
    assert (found.double() - wanted).norm() < 2**-4 * wanted.norm()


@pytest.mark.parametrize("k", [16, 2048, 4112, 14336])
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_writes_its_result_and_that_in_fp8(on, shape, k, dtype):
    weight = torch.empty(k, device=on, dtype=dtype).uniform_(0.5, 2)
    x = (torch.randn(*shape, k, device=on) * 3).to(dtype)
    poison(on)
    y, *y_fp8 = fused_blocks.rms_norm_fp8(1e-5)(x, weight)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()
    wanted = reference.quantize(y.flatten(0, -2), "row", E4M3, True)
    assert_same_bits([one.flatten(0, -2) for one in y_fp8], wanted)


def test_a_norm_and_a_feed_forward_in_a_graph(on):
    torch.manual_seed(3)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(1024, 1e-5)
            self.gate_proj, self.up_proj = (torch.nn.Linear(1024, 2816, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(2816, 1024, bias=False)
            self.mlp = FeedForward(self)

        def forward(self, x):
            return self.mlp(self.norm(x))

    class FeedForward(torch.nn.Module):
        def __init__(self, block) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down = block.gate_proj, block.up_proj, block.down

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    plain = Block().to(on, torch.bfloat16).eval()
    frozen = copy.deepcopy(plain)
    assert {*sw.nn.convert(frozen, frozen=True).blocks.values()} == {"RMSNorm", "SwiGLU"}
    assert frozen.norm._stoneware.handover is not None
    x = torch.randn(2, 8, 1024, device=on).bfloat16()
    with torch.no_grad():
        frozen(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = frozen(x)
        x.copy_(torch.randn_like(x) * 7)
        graph.replay()
        assert torch.equal(y, frozen(x))
        assert torch.equal(y, frozen.mlp(frozen.norm(x).clone()))  # quantized anew
        wanted = plain(x)
    # Each of five operands of two products is rounded by 0.026 in the mean.
    assert (y - wanted).float().norm() <= 0.08 * wanted.float().norm()


@pytest.mark.parametrize("k", [64, 4096, 14336])
def test_matrices_are_quantized_as_one(on, device, k):
    parts = [(torch.randn(m, k, device=on) * torch.rand(k, device=on)).bfloat16() for m in (1024, 16, 272)]
    assert kernels.why_not_joined(parts, device) is None
    for transpose in (False, True):
        task = quantizing.Quantization("row", transpose, E4M3, True, shares=True, num_parts=len(parts))
        plan, outputs = quantizing.make_plan(parts, [task])
        poison(on)
        found = [torch.empty_strided(*output[:2], dtype=output[2], device=on) for output in outputs]
        whole = torch.cat(parts)
        scale_t = reference.quantize(whole.t(), "row", E4M3, True)[1]
        if transpose:
            found[1].copy_(scale_t)
        plan(*parts, *found)
        wanted = expected(whole, "row", transpose, power_of_two=True)
        assert_same_bits(found[: len(wanted)], wanted)
        if not transpose:
            assert_same_bits(found[2:3], [scale_t])


def activation_gradients(z, dh):
    """Those of h = silu(gate) * up, and h, in float64."""
    gate, up = (half.double().requires_grad_() for half in z.chunk(2, 1))
    h = torch.nn.functional.silu(gate) * up
    return (*torch.autograd.grad(h, (gate, up), dh.double()), h.detach())


@pytest.mark.parametrize("m, n", [(1, 16), (33, 1040), (2048, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_activation_and_its_gradients_in_16_bits(on, m, n, dtype):
    z, dh = (torch.randn(m, 2 * n, device=on) * 3).to(dtype), torch.randn(m, n, device=on).to(dtype)
    gate, up = z.chunk(2, 1)
    poison(on)
    h, dgate, dup = (torch.empty_like(dh) for _ in range(3))
    fused.activation_plan(gate, up)(gate, up, h)
    fused.activation_grad_plan(gate, up, dh)(gate, up, dh, dgate, dup)
    # To the last bit, which torch's exponential function changes in a few places of 11 bits.
    torch.testing.assert_close(h, fused.silu_mul(z), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (h != fused.silu_mul(z)).float().mean() <= 0.01
    for found, wanted in zip((dgate, dup), activation_gradients(z, dh)):
        assert (found.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("m, n", [(16, 16), (48, 272), (1040, 4112), (8192, 1024)])
def test_the_gradients_of_a_feed_forward_in_fp8(on, m, n):
    z = (torch.randn(m, 2 * n, device=on) * torch.rand(m, 1, device=on) * 4).bfloat16()
    dh = (torch.randn(m, n, device=on) * torch.rand(n, device=on)).bfloat16()
    shapes = (m, 2 * n), (2 * n, m), (n, m)
    dgate, dup, h = activation_gradients(z, dh)
    dz = torch.cat((dgate, dup), 1)
    for factors in ((), (2.0 ** torch.randint(-6, 6, (2 * n, 1), device=on),)):
        poison(on)
        outputs = []
        for shape in shapes:
            outputs += [torch.empty(shape, device=on, dtype=E4M3), torch.empty(shape[0], 1, device=on)]
        partials = [torch.empty(shape, dtype=torch.int32, device=on) for shape in kernels.swiglu_partial_shapes(m, n)]
        plan = fused.swiglu_grad_plan(z, dh, True, *factors)
        assert hasattr(plan, "native_launch")  # a kernel's
        plan(z, dh, *factors, *outputs, *partials)
        plain = dz * factors[0].t() if factors else dz
        for wanted, values, scale in zip((plain, dz.t(), h.t()), outputs[::2], outputs[1::2]):
            # Half of the last of three bits, in 16 bits before, and half of the least number.
            assert ((values.double() * scale - wanted).abs() <= 0.07 * wanted.abs() + 2**-10 * scale).all()
            if m * n >= 10_000:  # of few, the largest may all be off by that much
                assert (values.double() * scale - wanted).norm() <= 0.04 * wanted.norm()
            # Scales are powers of two that just reach the largest value of a row, here to within its rounding.
            largest = wanted.abs().amax(1, keepdim=True) / 448
            assert ((scale >= 0.99 * largest) & (scale <= 2.02 * largest)).all()


def test_the_wheel_has_each_kernel(device, on):
    arch = aot_kernels.built_for(kernels.OP, device.compute_capability)
    # The activation and its gradients are written in 16 bits. Kernels of e4m3 write e5m2 as well.
    names = {DTYPE_NAMES[dtype] for dtype in (E4M3, torch.bfloat16, torch.float16)}
    assert names == {kernel.config["out"] for kernel in aot_kernels._by_arch(kernels.OP)[arch]}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
