"""sw.quantize: its values against float64, the products they go into, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoneware as sw
from stoneware.errors import ForwardOnlyError
from stoneware.quantizing.api import Quantization, make_plan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

LARGEST = {E4M3: 448, E5M2: 57344}
"""OCP 8-bit Floating Point Specification, table 1."""

HALF_A_STEP = {E4M3: 2**-4, E5M2: 2**-3}
"""Rounding of a normal number, relative to it."""

UNITS = {"tensor": (None, None), "row": (1, None), "block": (1, 128), "block_2d": (128, 128)}
"""Rows and columns that share a scale; None: all."""


def spread(scale: torch.Tensor, scales: str, shape: torch.Size) -> torch.Tensor:
    """A scale for each element, in float64."""
    for dim, unit in enumerate(UNITS[scales]):
        if scales != "tensor" and unit is not None:
            scale = scale.repeat_interleave(unit, dim).narrow(dim, 0, shape[dim])
    return scale.double().expand(shape)


def unit_maxima(x: torch.Tensor, scales: str) -> torch.Tensor:
    m, k = x.shape
    rows, columns = UNITS[scales]
    rows, columns = rows or m, columns or k
    return torch.tensor(
        [[x[i : i + rows, j : j + columns].abs().max() for j in range(0, k, columns)] for i in range(0, m, rows)],
        dtype=torch.float64,
    )


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 300),
    k=st.integers(1, 300),
    scales=st.sampled_from(list(UNITS)),
    dtype=st.sampled_from([E4M3, E5M2]),
    in_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_values_and_scales_against_float64(m, k, scales, dtype, in_dtype, power_of_two, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator)).to(in_dtype)
    x8, scale, xt8, scale_t = sw.quantize(x, scales, transpose="both", dtype=dtype, power_of_two=power_of_two)
    assert x8.is_contiguous() and xt8.is_contiguous()
    for values, given_scale, source in ((x8, scale, x.double()), (xt8, scale_t, x.double().t())):
        maxima = unit_maxima(source, scales)
        ideal = torch.where(maxima == 0, 1, maxima / LARGEST[dtype])
        given_scale = given_scale.reshape(maxima.shape)
        if power_of_two:
            assert torch.equal(given_scale, torch.exp2(given_scale.log2().round()))
            assert ((ideal * (1 - 1e-6) <= given_scale) & (given_scale < 2 * ideal * (1 + 1e-6)) | (maxima == 0)).all()
        else:
            torch.testing.assert_close(given_scale.double(), ideal, rtol=1e-6, atol=0)
        each = spread(given_scale if scales != "tensor" else given_scale.reshape(1), scales, source.shape)
        least = torch.finfo(dtype).smallest_normal
        error = (values.double() * each - source).abs()
        assert (error <= 1.001 * HALF_A_STEP[dtype] * source.abs().clamp_min(least * each)).all()


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_results_are_operands_of_scaled_mm(scales):
    x, w = torch.randn(48, 256).bfloat16(), torch.randn(384, 256).bfloat16()
    x8, scale_x = sw.quantize(x, scales)
    w8, scale_w = sw.quantize(w, "block_2d" if scales == "block" else scales)
    y = sw.scaled_mm(x8, w8.t(), scale_x, scale_w.t() if scale_w.ndim == 2 else scale_w)
    expected = x.double() @ w.double().t()
    assert (y - expected).norm() < 2**-4 * expected.norm()


@pytest.mark.parametrize("scales", list(UNITS))
def test_a_unit_with_a_nan_or_an_infinity_is_nan_and_one_of_zeros_has_scale_one(scales):
    x = torch.zeros(256, 256)
    x8, scale = sw.quantize(x, scales)
    assert (scale == 1).all() and (x8.float() == 0).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[200, 3] = bad
        x8, scale = sw.quantize(x, scales)
        of_unit = spread(scale, scales, x.shape).isnan()
        assert of_unit[200, 3]
        assert torch.equal(x8.float().isnan(), of_unit)
        assert of_unit.all() == (scales == "tensor")


def test_leading_dimensions_stay():
    x = torch.randn(2, 3, 64).bfloat16()
    x8, scale = sw.quantize(x)
    assert x8.shape == x.shape and scale.shape == (2, 3, 1)
    flat8, flat_scale = sw.quantize(x.flatten(0, -2))
    assert torch.equal(x8.view(6, 64).float(), flat8.float()) and torch.equal(scale.view(6, 1), flat_scale)
    assert sw.quantize(x, "tensor")[1].shape == (1,)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("scales", list(UNITS))
def test_nothing_quantizes_to_nothing(shape, scales):
    x8, scale, xt8, _ = sw.quantize(torch.zeros(shape), scales, transpose="both")
    assert x8.shape == shape and xt8.shape == shape[::-1]
    assert (scale == 1).all()


def test_views_are_read_as_what_they_mean():
    x = torch.randn(96, 160)[::2, 16:144]
    for one in (x, x.t(), torch.randn(48, 64, dtype=torch.complex64).conj().imag):
        for found, expected in zip(sw.quantize(one), sw.quantize(one.clone().contiguous())):
            assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("transpose", [False, True, "both"])
@pytest.mark.parametrize("scales", list(UNITS))
def test_compiled_it_is_one_graph_with_the_same_results(scales, transpose):
    torch._dynamo.reset()

    def block(x):
        return [one.float() * 2 for one in sw.quantize(x.relu(), scales, transpose=transpose)]

    x = torch.randn(128, 256).bfloat16()
    for found, expected in zip(torch.compile(block, backend="aot_eager", fullgraph=True)(x), block(x), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"x": [1.0]}, TypeError, "x of quantize must be a torch.Tensor, not list"),
        ({"x": torch.zeros(2, 2, dtype=torch.float64)}, TypeError, "x.dtype=torch.float64 must be"),
        ({"scales": "rows"}, ValueError, "scales='rows' must be one of 'tensor', 'row', 'block', 'block_2d'"),
        ({"dtype": []}, ValueError, r"dtype=\[\] must be one of torch.float8_e4m3fn"),
        ({"dtype": torch.float16}, ValueError, "dtype=torch.float16 must be one of torch.float8_e4m3fn"),
        ({"transpose": 1}, ValueError, "transpose=1 must be one of False, True, 'both'"),
        ({"power_of_two": "no"}, ValueError, "power_of_two='no' must be one of False, True"),
        ({"x": torch.zeros(2, 2, 2), "scales": "block"}, ValueError, r"x.shape=\[2, 2, 2\] must have 2 dimensions"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "x.layout=torch.sparse_coo must be torch.strided; copy it"),
        ({"x": torch.zeros(2, 2, requires_grad=True)}, ForwardOnlyError, "quantize has no backward.*Float8Linear"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, error, said):
    arguments = {"x": torch.zeros(2, 2), **arguments}
    with pytest.raises(error, match=said):
        sw.quantize(arguments.pop("x"), **arguments)


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("name", ["transpose", "power_of_two"])
@pytest.mark.parametrize("value", [0, 1])
def test_an_int_is_refused_whatever_was_called_before_and_in_a_trace(name, value, scales):
    x = torch.randn(48, 32).bfloat16()
    for call in (sw.quantize, torch.compile(sw.quantize, backend="eager")):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}={value} must be one of False, True"):
                call(x, scales, **{name: value})
            call(x, scales, **{name: bool(value)})


def test_a_tangent_is_refused():
    x = torch.randn(4, 16)
    with pytest.raises(ForwardOnlyError, match="quantize has no forward-mode derivative, and x has a tangent"):
        torch.func.jvp(lambda x: sw.quantize(x)[1], (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ForwardOnlyError, match="x has a tangent"):
        sw.quantize(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    ("shape", "arguments", "said"),
    [
        ((2, 16, 32), {"transpose": True}, "must have 2 dimensions"),
        ((2, 16, 32), {"scales": "block"}, "must have 2 dimensions"),
        ((2, 16, 32), {"transpose": "both"}, "must have 2 dimensions"),
        ((32,), {}, "must have 2 dimensions"),
        ((16, 32), {"x_requires_grad": True}, "quantize has no backward"),
    ],
)
def test_a_trace_refuses_what_a_call_refuses(shape, arguments, said):
    torch._dynamo.reset()
    x = torch.zeros(shape, requires_grad=arguments.pop("x_requires_grad", False))

    def block(x):
        return sw.quantize(x, **arguments)[0].float() + 0

    for call in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match=said):
            call(x)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize(("m", "k"), [(0, 256), (16, 0), (0, 0)])
def test_an_empty_matrix_has_no_partial_results_on_a_gpu(scales, m, k):
    quantization = Quantization(scales, "both", E4M3, False, shares=True)
    assert quantization.partial([m], k, "cuda") == ((0,), (1,), torch.int32)
    assert math.prod(quantization.partial([16], 256, "cuda")[0]) > 0


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_reduction_without_kernels_is_that_of_the_plan(scales):
    quantization, x = Quantization(scales, False, E4M3, True, shares=True), torch.randn(48, 256).bfloat16()
    plan, outputs = make_plan([x], [quantization])
    results = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in outputs]
    plan(x, *results)
    reduction = quantization.reduce(x)
    assert quantization.reduction(x.shape, "cpu") == outputs[2]
    assert reduction.shape == outputs[2][0] and torch.equal(reduction, results[2])
