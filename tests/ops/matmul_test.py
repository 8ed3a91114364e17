"""matmul on the reference backend: values against float64, layouts, and refusals."""

from __future__ import annotations

import pytest
import torch
from operands import OUT_DTYPES, poisoned, relative_error

import stoneware as sw
from stoneware.errors import ForwardOnlyError
from stoneware.measuring.tolerance import tolerance


def matrix(num_rows: int, num_columns: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """A random matrix: row-major "n", column-major "t", slices "ns" and "ts", or neither "x"."""
    margin, step = (3, 2) if layout == "x" else (3 * ("s" in layout), 1)
    shape = (num_rows * step + margin, num_columns * step + margin)
    base = torch.randn(shape if layout[0] != "t" else shape[::-1]).to(dtype)
    view = base.t() if layout[0] == "t" else base
    return view[margin:, margin:][::step, ::step]


@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("a_layout", ["n", "t", "ns", "ts", "x"])
@pytest.mark.parametrize("b_layout", ["n", "t", "ns", "ts", "x"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_result_is_near_float64_whatever_the_layout(dtype, a_layout, b_layout, has_bias):
    m, n, k = 33, 40, 129
    torch_dtype = OUT_DTYPES[dtype]
    a, b = matrix(m, k, a_layout, torch_dtype), matrix(k, n, b_layout, torch_dtype)
    bias = torch.randn(n).to(torch_dtype) if has_bias else None
    expected = a.double() @ b.double() + (bias.double() if has_bias else 0)
    out = poisoned(m, n, torch_dtype, ldd=n + 3)
    assert sw.matmul(a, b, bias, out=out) is out
    assert relative_error(out, expected) <= tolerance(dtype, k)
    assert torch.equal(sw.matmul(a, b, bias), out)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_sum_of_nothing_is_the_bias_as_in_torch(m, n, k):
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    bias = torch.randn(n).bfloat16()
    assert torch.equal(sw.matmul(a, b), torch.mm(a, b))
    assert torch.equal(sw.matmul(a, b, bias), torch.addmm(bias, a, b))


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("n", [1, 5])
def test_sizes_of_one_have_arbitrary_strides(m, n, k):
    a = torch.randn(25).bfloat16().as_strided((m, k), (1 if m == 1 else k, 1 if k > 1 else 3))
    b = torch.randn(25).bfloat16().as_strided((k, n), (7 if k == 1 else n, 1 if n > 1 else 9))
    expected = a.double() @ b.double()
    assert (sw.matmul(a, b).double() - expected).abs().max() <= 0.05 * (1 + expected.abs().max())


BAD = {
    "dtypes differ": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8).half()),
        TypeError, ["b.dtype=torch.float16", "bfloat16", "b.to"],
    ),
    "float32": (
        lambda: (torch.zeros(8, 8), torch.zeros(8, 8)), TypeError, ["torch.float32", "a.to("],
    ),
    "rank 3": (
        lambda: (torch.zeros(2, 8, 8).bfloat16(), torch.zeros(8, 8).bfloat16()),
        ValueError, ["a.shape=[2, 8, 8]", "flatten"],
    ),
    "k differs": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(9, 8).bfloat16()),
        ValueError, ["8 is not 9", "weight.t()"],
    ),
    "None": (lambda: (None, torch.zeros(8, 8).bfloat16()), TypeError, ["a=None", "pass one"]),
    "sparse": (
        lambda: (torch.zeros(8, 8).bfloat16().to_sparse(), torch.zeros(8, 8).bfloat16()),
        TypeError, ["a.layout=torch.sparse_coo", "a.to_dense()"],
    ),
    "two devices": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8, device="meta").bfloat16()),
        ValueError, ["b is on meta", "b.to('cpu')"],
    ),
    "bias of other length": (
        lambda: (*[torch.zeros(8, 8).bfloat16()] * 2, torch.zeros(9).bfloat16()),
        ValueError, ["bias.shape=[9]", "[n]=[8]"],
    ),
    "requires grad": (
        lambda: (torch.zeros(8, 8).bfloat16().requires_grad_(), torch.zeros(8, 8).bfloat16()),
        ForwardOnlyError, ["a requires a gradient", "a.detach()"],
    ),
}


BAD_OPTIONS = {
    "backend unhashable": (
        {"backend": {}}, TypeError, ["backend={}", "must be a str", "triton_aot", "leave it out"],
    ),
    "backend unknown": ({"backend": "cublas"}, ValueError, ["'cublas'", "triton_aot, vendor"]),
    "config unhashable": (
        {"config": {}}, TypeError, ["config={}", "stoneware.explain(...).config", "leave it out"],
    ),
    "out of another dtype": (
        {"out": torch.empty(8, 8)}, TypeError,
        ["out.dtype=torch.float32", "torch.bfloat16 or torch.float16"],
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("m", [0, 8])
def test_bad_option_is_refused_with_a_remedy_even_where_nothing_is_computed(name, m):
    options, error, parts = BAD_OPTIONS[name]
    if m == 0 and "out" in options:
        options = {"out": torch.empty(0, 8)}
    with pytest.raises(error) as caught:
        sw.matmul(torch.zeros(m, 8).bfloat16(), torch.zeros(8, 8).bfloat16(), **options)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_error_states_rule_value_and_remedy(name):
    arguments, error, parts = BAD[name]
    with pytest.raises(error) as caught:
        sw.matmul(*arguments())
    for part in parts:
        assert part in str(caught.value)
