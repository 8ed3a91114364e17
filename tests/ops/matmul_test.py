"""matmul on the reference backend: values against float64, layouts, batches, and refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from operands import OUT_DTYPES, poisoned, relative_error

import stoneware as sw
from stoneware.specs.tolerance import tolerance


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


def view_of(shape: Sequence[int], kind: str) -> torch.Tensor:
    """Random bf16 of a shape: dense, dimensions permuted, a slice, or every other element."""
    if kind == "permuted":
        order = list(range(len(shape)))
        random.shuffle(order)
        base = torch.randn([shape[idx] for idx in order]).bfloat16()
        return base.permute([order.index(idx) for idx in range(len(shape))])
    extra, step = {"dense": (0, 1), "sliced": (2, 1), "stepped": (0, 2)}[kind]
    base = torch.randn([size * step + extra for size in shape]).bfloat16()
    return base[tuple(slice(0, size * step, step) for size in shape)]


VIEWS = ("dense", "permuted", "sliced", "stepped")

BATCHES = {
    # shapes of a and b
    "linear layer": ((2, 3, 5), (5, 7)),
    "linear layer of one row": ((4, 1, 5), (5, 7)),
    "batch": ((3, 4, 5), (3, 5, 2)),
    "two dimensions": ((2, 3, 4, 5), (2, 3, 5, 6)),
    "a for all": ((4, 5), (3, 5, 2)),
    "a for some": ((2, 1, 4, 5), (2, 3, 5, 2)),
    "b for some": ((2, 3, 4, 5), (3, 5, 2)),
    "both for some": ((2, 1, 4, 5), (3, 5, 2)),
    "row": ((5,), (5, 7)),
    "column": ((4, 5), (5,)),
    "row and column": ((5,), (5,)),
    "row for all": ((5,), (3, 2, 5, 7)),
    "column for all": ((3, 2, 4, 5), (5,)),
    "batch of one": ((1, 4, 5), (1, 5, 2)),
    "an empty batch": ((0, 4, 5), (0, 5, 2)),
    "k of 0": ((3, 4, 0), (3, 0, 2)),
}


@pytest.mark.parametrize("a_view", VIEWS)
@pytest.mark.parametrize("b_view", VIEWS)
@pytest.mark.parametrize("shapes", BATCHES)
def test_leading_dimensions_are_those_of_torch_matmul(shapes, a_view, b_view):
    a_shape, b_shape = BATCHES[shapes]
    a, b = view_of(a_shape, a_view), view_of(b_shape, b_view)
    expected = torch.matmul(a.double(), b.double())
    result = sw.matmul(a, b)
    assert result.shape == expected.shape
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)
    if b.ndim == 1:
        return
    bias = torch.randn(b.shape[-1]).bfloat16()
    out = torch.full((*expected.shape[:-1], b.shape[-1] + 3), math.nan).bfloat16()
    sw.matmul(a, b, bias, out=out[..., :-3])
    torch.testing.assert_close(out[..., :-3].double(), expected + bias.double(), rtol=2**-8, atol=1e-5)
    assert out[..., -3:].isnan().all()


def test_out_may_have_its_leading_dimensions_in_any_order():
    a, b = view_of((2, 3, 4, 5), "dense"), view_of((2, 3, 5, 6), "dense")
    out = torch.full((4, 3, 2, 6), math.nan).bfloat16().permute(2, 1, 0, 3)
    assert sw.matmul(a, b, out=out) is out
    assert torch.equal(out, sw.matmul(a, b))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("given", ["out", "out_dtype", "both"])
def test_result_of_float32_is_not_rounded_to_16_bits(given, has_bias):
    k = 129
    a, b = view_of((2, 33, k), "dense"), view_of((k, 40), "sliced")
    bias = torch.randn(40) if has_bias else None
    options = {"out": torch.full((2, 33, 40), math.nan), "out_dtype": torch.float32}
    if given != "both":
        options = {given: options[given]}
    result = sw.matmul(a, b, bias, **options)
    assert result.dtype == torch.float32
    expected = a.double() @ b.double() + (bias.double() if has_bias else 0)
    assert relative_error(result, expected) <= tolerance("fp32", k)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [0, 1, 33])
@pytest.mark.parametrize("k", [0, 129])
def test_products_are_added_to_out_and_rounded_once(m, k, out_dtype):
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, 40).bfloat16()
    before = torch.randn(m, 40).to(out_dtype)
    out = before.clone()
    assert sw.matmul(a, b, out=out, accumulate=True) is out
    assert torch.equal(out, (before.float() + a.float() @ b.float()).to(out_dtype))
    # Neither a plan that overwrites nor one that adds answers for the other.
    sw.matmul(a, b, out=out)
    sw.matmul(a, b, out=out, accumulate=True)
    single = (a.float() @ b.float()).to(out_dtype)
    assert torch.equal(out, (single.float() + a.float() @ b.float()).to(out_dtype))


def test_products_with_a_vector_are_added_to_out():
    a, v = torch.randn(24, 16).bfloat16(), torch.randn(16).bfloat16()
    before = torch.randn(24)
    out = before.clone()
    sw.matmul(a, v, out=out, accumulate=True)
    assert torch.allclose(out, before + a.float() @ v.float(), atol=1e-5)


OUTS = {
    "a batch": lambda: torch.randn(4, 3, 8),
    "batches in another order": lambda: torch.randn(3, 4, 8).transpose(0, 1),
    "two strides of a batch": lambda: torch.randn(2, 5, 3, 8).transpose(0, 1)[:4],
    "rows apart": lambda: torch.randn(4, 3, 11)[..., :8],
    "negated": lambda: torch._neg_view(torch.randn(4, 3, 8)),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OUTS)
def test_products_of_a_batch_are_added_to_an_out_of_any_strides(name, shared):
    out = OUTS[name]()
    a, b = torch.randn(*out.shape[:-1], 16).bfloat16(), torch.randn(*out.shape[:-2], 16, 8).bfloat16()
    b = b[:1] if shared else b
    expected = out + a.float() @ b.float()
    assert sw.matmul(a, b, out=out, accumulate=True) is out
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("value", [1, None, "yes", torch.tensor(True)], ids=str)
def test_accumulate_is_a_bool(value):
    a, b, out = torch.randn(4, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.zeros(4, 8)
    with pytest.raises(TypeError, match=r"accumulate=.* must be a bool; pass True or False"):
        sw.matmul(a, b, out=out, accumulate=value)


def test_products_are_added_to_out_in_a_graph():
    a, b, before = torch.randn(24, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(24, 8)
    out = before.clone()
    added = torch.compile(
        lambda a, b, out: sw.matmul(a, b, out=out, accumulate=True), backend="aot_eager", fullgraph=True
    )
    added(a, b, out)
    assert torch.equal(out, before + a.float() @ b.float())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "has no out; pass out"),
        ({"out": torch.zeros(4, 8), "bias": torch.zeros(8)}, "has a bias"),
        ({"epilogue": lambda acc: acc}, "has no out; pass out"),
    ],
    ids=["no out", "bias", "epilogue"],
)
def test_adding_needs_an_out_and_no_bias(options, reason):
    a, b = torch.randn(4, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    with pytest.raises(ValueError, match=rf"accumulate=True must have an out .*{reason}"):
        sw.matmul(a, b, accumulate=True, **options)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 3, 8), (8, 8, 1)),
        ((4, 3, 8), (9, 8, 1)),
        ((4, 3, 8), (8, 24, 1)),
        ((4, 3, 8), (0, 8, 1)),
        ((2, 2, 3, 8), (24, 24, 8, 1)),
        ((2, 2, 3, 8), (24, 0, 8, 1)),
        ((3, 8), (0, 1)),
    ],
)
def test_an_out_whose_elements_share_memory_is_refused(shape, strides):
    a = torch.randn(*shape[:-1], 16, dtype=torch.bfloat16)
    b = torch.randn(*shape[:-2], 16, 8, dtype=torch.bfloat16)
    out = torch.zeros(1000, dtype=torch.bfloat16).as_strided(shape, strides)
    with pytest.raises(ValueError, match="must keep all elements of shape .* apart"):
        sw.matmul(a, b, out=out)


@pytest.mark.parametrize("strides", [(24, 8, 1), (8, 32, 1), (100, 9, 1), (10, 48, 1)])
def test_an_out_of_any_strides_without_overlap_is_written(strides):
    a, b = (torch.randn(4, *shape, dtype=torch.bfloat16) for shape in ((3, 16), (16, 8)))
    out = torch.full((1000,), math.nan, dtype=torch.bfloat16).as_strided((4, 3, 8), strides)
    sw.matmul(a, b, out=out)
    assert relative_error(out, a.double() @ b.double()) <= tolerance("bf16", 16)


BAD = {
    "dtypes differ": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8).half()),
        TypeError,
        ["b.dtype=torch.float16", "bfloat16", "b.to"],
    ),
    "float32": (lambda: (torch.zeros(8, 8), torch.zeros(8, 8)), TypeError, ["torch.float32", "a.to("]),
    "rank 0": (
        lambda: (torch.zeros(()).bfloat16(), torch.zeros(8, 8).bfloat16()),
        ValueError,
        ["a.shape=[]", "at least 1 dimension", "a * b"],
    ),
    "batches that do not broadcast": (
        lambda: (torch.zeros(2, 1, 8, 8).bfloat16(), torch.zeros(3, 1, 8, 8).bfloat16()),
        ValueError,
        ["[2, 1] and [3, 1] do not", "reshape"],
    ),
    "bias of a vector's result": (
        lambda: (torch.zeros(8, 8).bfloat16(), *[torch.zeros(8).bfloat16()] * 2),
        ValueError,
        ["bias must be None", "add it to the result"],
    ),
    "k of a vector differs": (
        lambda: (torch.zeros(2, 8, 8).bfloat16(), torch.zeros(9).bfloat16()),
        ValueError,
        ["b.shape=[9]", "8 is not 9"],
    ),
    "k differs": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(9, 8).bfloat16()),
        ValueError,
        ["8 is not 9", "weight.t()"],
    ),
    "None": (lambda: (None, torch.zeros(8, 8).bfloat16()), TypeError, ["a=None", "pass one"]),
    "sparse": (
        lambda: (torch.zeros(8, 8).bfloat16().to_sparse(), torch.zeros(8, 8).bfloat16()),
        TypeError,
        ["a.layout=torch.sparse_coo", "a.to_dense()"],
    ),
    "two devices": (
        lambda: (torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8, device="meta").bfloat16()),
        ValueError,
        ["b is on meta", "b.to('cpu')"],
    ),
    "bias of other length": (
        lambda: (*[torch.zeros(8, 8).bfloat16()] * 2, torch.zeros(9).bfloat16()),
        ValueError,
        ["bias.shape=[9]", "[n]=[8]"],
    ),
}


BAD_OPTIONS = {
    "backend unhashable": ({"backend": {}}, TypeError, ["backend={}", "must be a str", "triton_aot", "leave it out"]),
    "backend unknown": ({"backend": "cublas"}, ValueError, ["'cublas'", "triton_aot, vendor"]),
    "config unhashable": ({"config": {}}, TypeError, ["config={}", "stoneware.explain(...).config", "leave it out"]),
    "out of another dtype": (
        {"out": torch.empty(8, 8).double()},
        TypeError,
        ["out.dtype=torch.float64", "an out of torch.bfloat16 or torch.float32"],
    ),
    "out of another dtype than asked for": (
        {"out": torch.empty(8, 8), "out_dtype": torch.bfloat16},
        TypeError,
        ["out.dtype=torch.float32 must be torch.bfloat16", "an out of torch.bfloat16"],
    ),
    "out_dtype unknown": (
        {"out_dtype": torch.float64},
        TypeError,
        ["out_dtype=torch.float64", "torch.bfloat16 or torch.float32"],
    ),
    "out_dtype no dtype": ({"out_dtype": "fp32"}, TypeError, ["out_dtype='fp32'", "torch.float32"]),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("m", [0, 8])
def test_bad_option_is_refused_with_a_remedy_even_where_nothing_is_computed(name, m):
    options, error, parts = BAD_OPTIONS[name]
    if m == 0 and "out" in options:
        options = {**options, "out": options["out"][:0]}
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
