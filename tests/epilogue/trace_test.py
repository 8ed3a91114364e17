"""An epilogue is traced to what it computes, or refused by the name of what no kernel can do."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import stoneware as sw
from stoneware.epilogue import arithmetic, link, source, trace
from stoneware.epilogue.expression import UnfusableError
from stoneware.errors import UnsupportedError
from stoneware.linking import toolchain

M, N = 24, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def traced(function, *inputs, shape=(M, N)):
    return trace.trace(function, shape, inputs, torch.device("cpu"))


def written(function, *inputs, main=None):
    expression = traced(function, *inputs)
    return source.write(expression, main=main, has_pairs=[True] * len(inputs))


def compiled(text):
    return toolchain.compile_lto_ir(link.device_code() + text, arch="sm_90a")


UNARY = (
    *(torch.abs, torch.neg, torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p),
    *(torch.sqrt, torch.rsqrt, torch.reciprocal, torch.sin, torch.cos, torch.tan, torch.atan, torch.tanh, torch.erf),
    *(torch.erfc, torch.floor, torch.ceil, torch.round, torch.trunc, torch.sign, torch.relu, torch.sigmoid),
    *(functional.silu, functional.mish, functional.hardswish, functional.hardsigmoid, functional.gelu),
    *(functional.softplus, functional.leaky_relu, functional.elu, functional.selu, functional.relu6),
    lambda x: functional.gelu(x, approximate="tanh"),
    lambda x: functional.softplus(x, beta=2.0, threshold=10.0),
    lambda x: x.clamp(min=-1),
    lambda x: x.clamp(-1, 1),
    lambda x: x.clamp_max(2.5),
    lambda x: x**2,
    lambda x: x**0.5,
    lambda x: x**1.7,
    lambda x: 1 - x,
    lambda x: x / 3,
    lambda x: x.masked_fill(x > 0, 0.5),
    lambda x: torch.where(x.isnan() | (x == float("inf")), 0.0, x),
    lambda x: (x > 0) & ~(x > 1),
    lambda x: x.to(torch.float8_e4m3fn).float(),
    lambda x: x.to(torch.float8_e5m2).float(),
    lambda x: torch.full_like(x, 2) * torch.zeros_like(x) + torch.ones_like(x),
)
BINARY = (
    *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.atan2, torch.copysign),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
    lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: torch.addcmul(x, y, y, value=0.5),
    lambda x, y: torch.addcdiv(x, y, y + 3),
    lambda x, y: torch.logical_or(x > 0, torch.logical_xor(y > 0, x < y)).to(x.dtype),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_compiles_with_every_dtype(dtype):
    x = torch.zeros(M, N, dtype=dtype)
    for others in (UNARY[:24], UNARY[24:], *[[(function, other) for function in BINARY] for other in DTYPES]):

        def epilogue(acc, x, y, others=others):
            results = (one(x) if callable(one) else one[0](x, y) for one in others)
            return tuple(result + 0.0 for result in results)

        y = x if callable(others[0]) else torch.zeros(M, N, dtype=others[0][1])
        assert compiled(written(epilogue, x, y).text)


def test_the_operators_that_are_known_are_tested():
    """Each name of `arithmetic` is in the trace of one of the functions above."""
    found = set()

    def names(node):
        if hasattr(node, "operator"):
            found.add(node.operator)
            for _, argument in node.arguments:
                names(argument)

    x = torch.zeros(M, N)
    for function in UNARY:
        names(traced(lambda acc, x, function=function: function(x) * 1.0, x).outputs[0].value)
    for function in BINARY:
        names(traced(lambda acc, x, y, function=function: function(x, y) * 1.0, x, x).outputs[0].value)
    assert arithmetic.NAMES - found <= {
        "bitwise_xor",
        "isinf",
        "logical_not",
        "logical_and",
        "clamp_min",
        "rsub",
        "sub",
    }


@given(
    function=st.sampled_from(BINARY[:6]),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    shapes=st.tuples(*[st.sampled_from(((M, N), (N,), (M, 1), (1, N), ()))] * 2),
)
def test_shapes_and_dtypes_are_torchs(function, dtypes, shapes):
    tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
    seen = []

    def epilogue(acc, *inputs):
        seen.append(function(*inputs))
        return acc

    traced(epilogue, *tensors)
    expected = function(*tensors)
    assert (seen[0].shape, seen[0].dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize(
    "function", [*((lambda x, y, f=f: f(x)) for f in UNARY), *BINARY, lambda x, y: x + 1.0, lambda x, y: x * True]
)
def test_booleans_are_booleans_floats_or_refused_like_in_torch(function):
    x, y = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
    seen = []

    def epilogue(acc, *inputs):
        seen.append(function(*inputs))
        return acc

    try:
        dtype = function(x, y).dtype
    except RuntimeError:
        dtype = None
    if dtype in (None, torch.int64):
        with pytest.raises(RuntimeError):
            traced(epilogue, x, y, shape=(1, 4))
    else:
        traced(epilogue, x, y, shape=(1, 4))
        assert seen[0].dtype == dtype


def test_a_sum_of_booleans_is_a_boolean():
    text = written(lambda acc, x: acc * ((x > 0) + (acc > 0)), torch.zeros(M, N), main=0).text
    assert "const bool v3 = __fadd_rn(v1, v2)" in text, text


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda acc: acc.softmax(-1), "_softmax"),
        (lambda acc: acc.sum(), "sum"),
        (lambda acc: acc.cumsum(-1), "cumsum"),
        (lambda acc: acc @ acc.t(), "neighbouring columns"),
        (lambda acc: acc if acc.max() > 0 else -acc, "max"),
        (lambda acc: torch.cat([acc, acc]), "cat"),
        (lambda acc: acc[:, : N // 2], "neighbouring columns"),
        (lambda acc: acc.chunk(2, -1)[0], "neighbouring columns"),
        (lambda acc: acc.amax(0), "last dimension"),
        (lambda acc: acc * acc.amax(-1, keepdim=True), "maximum of a row"),
        (lambda acc: acc.double(), "float64; convert the result after the call"),
        (lambda acc: acc.round().to(torch.int32), "int32; convert the result after the call"),
        (lambda acc: acc.long(), "int64; convert the result after the call"),
        (lambda acc: (acc > 0) * 2, "int64; .* 1.0, not 1, to booleans"),
        (lambda acc: acc if acc > 0 else -acc, "in a branch .* use torch.where"),
        (lambda acc: acc + torch.ones(M, N), "inputs="),
        (lambda acc: acc.flip(-1), "compute it after the call"),
        (lambda acc: acc.view(torch.int32).view(torch.float32), "views torch.float32 as torch.int32"),
        (lambda acc: acc.bfloat16().view(torch.float16), "views torch.bfloat16 as torch.float16"),
        (lambda acc: acc.masked_fill(acc, 0.0), "a boolean mask, not torch.float32; compare it with 0"),
        (lambda acc: acc.masked_fill(acc > 0, acc), "a value without dimensions, not of shape .* use torch.where"),
        (lambda acc: acc - True, "sub in an epilogue must get no booleans"),
        (lambda acc: torch.add(acc > 0, acc > 1, alpha=0.5), "add in an epilogue must get no booleans"),
        (lambda acc: torch.where(acc, acc, 0.0), "a boolean condition, not torch.float32"),
        (lambda acc: acc.to(torch.float8_e4m3fn) * 2, "mul in an epilogue must get no fp8; convert it with .float()"),
        (lambda acc: torch.relu(acc.to(torch.float8_e5m2)), "relu in an epilogue must get no fp8"),
        (lambda acc: torch.round(acc, decimals=2), "aten::round with decimals=2"),
        (lambda acc: torch.div(acc, 3, rounding_mode="floor"), "aten::div with rounding_mode='floor'"),
        (lambda acc: [acc.view_as(acc), acc.mul_(2)][0], "a value that has views, but mul_"),
        (lambda acc: torch.mul(acc, 2, out=acc), "aten::mul.out"),
        (lambda acc: acc.detach().mul_(2) + acc, "a value that has views, but mul_"),
        (lambda acc: [acc[..., ::2], torch.relu_(acc)][0], "a value that has views, but relu_"),
        (lambda acc: [acc[..., ::2].mul_(2), acc][1], "a value that has views, but mul_"),
        (lambda acc: [acc.view(M, -1, 2).select(-1, 0).mul_(2), acc][1], "a value that has views, but mul_"),
    ],
)
def test_what_no_kernel_can_do_is_refused_by_name(function, part):
    with pytest.raises(UnsupportedError, match=part):
        traced(function)


@pytest.mark.parametrize(
    ("function", "error", "part"),
    [
        (lambda acc, r: 3, TypeError, "result 0 is 3"),
        (lambda acc, r: (), TypeError, "empty tuple"),
        (lambda acc, r: r[0] * 1.0, ValueError, "must have the shape"),
        (lambda acc, r: acc + r[:, :5], ValueError, "must broadcast"),
        (lambda acc, r: r.add_(acc), UnsupportedError, "must not change its inputs"),
        (lambda acc, r: acc if r[0, 0] > 0 else -acc, UnsupportedError, "in a branch .* use torch.where"),
        (lambda acc, r: acc * r[0, 0].item(), UnsupportedError, r"with .item\(\), .* the tensor itself"),
        (
            lambda acc, r: acc + r.view(torch.bfloat16)[:, ::2],
            UnsupportedError,
            "views torch.float32 as torch.bfloat16",
        ),
    ],
)
def test_a_result_that_does_not_fit_is_refused(function, error, part):
    with pytest.raises(error, match=part):
        traced(function, torch.zeros(M, N))


@pytest.mark.parametrize(
    "change",
    [
        lambda acc, r: r.add_(acc),
        lambda acc, r: torch.add(acc, 1.0, out=r),
        lambda acc, r: r.__setitem__(0, 2.0),
        lambda acc, r: r.__setitem__(r > 0, 2.0),
        lambda acc, r: r.view(-1).zero_(),
        lambda acc, r: r.copy_(acc),
        lambda acc, r: r.set_(acc),
        lambda acc, r: r.resize_(3, 3),
        lambda acc, r: r.t_(),
        lambda acc, r: r.data.mul_(2.0),
        lambda acc, r: setattr(r, "data", acc),
        lambda acc, r: torch._foreach_mul_([r], 2.0),
        lambda acc, r: functional.relu(r, inplace=True),
    ],
)
def test_every_change_of_an_input_is_refused(change):
    """By calls too, whose function would otherwise change the caller's tensor where it is not fused."""
    r, a, b = torch.ones(M, N), torch.ones(M, 8).bfloat16(), torch.ones(8, N).bfloat16()
    with pytest.raises(UnsupportedError, match="must not change"):
        sw.matmul(a, b, epilogue=lambda acc, r: [change(acc, r), acc][1], inputs=(r,))
    assert r.shape == (M, N) and (r == 1).all()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda acc, r: acc * (r[:, :1] * 2.0).add_(acc), "keep shape .24, 1. .* gives .24, 64."),
        (lambda acc, r: acc * (acc > 0).mul_(0.5), "and torch.bool, but gives .* torch.float32; use mul"),
    ],
)
def test_a_change_in_place_keeps_shape_and_kind(function, error):
    with pytest.raises(ValueError, match=error):
        traced(function, torch.zeros(M, N))


def test_a_change_in_place_is_rounded_to_the_tensors_dtype():
    in_place = traced(lambda acc, r: r.bfloat16().add_(acc) * 1.0, torch.zeros(M, N))
    assert in_place == traced(lambda acc, r: (r.bfloat16() + acc).bfloat16() * 1.0, torch.zeros(M, N))


@pytest.mark.parametrize("copy", [lambda view: view, torch.clone, torch.Tensor.contiguous])
def test_views_of_inputs_are_read_by_their_strides(copy):
    r = torch.zeros(N, 2 * M)
    text = written(lambda acc, r: acc + copy(copy(r.t())[::2]), r, main=0)
    assert (
        "LoadBoth<Float32, false>(at, Parameter<const void*>(params, 0), Parameter<long long>(params, 8)" in text.text
    )
    assert int.from_bytes(text.parameters[8:16], "little") == 2
    assert int.from_bytes(text.parameters[16:24], "little") == 2 * M


@pytest.mark.parametrize("view", [lambda r: r[:, 0], lambda r: r[0, ::2], lambda r: r[:, :1].t(), lambda r: r[:1, ::2]])
def test_a_row_may_have_any_stride(view):
    r = torch.zeros(N, 2 * N)
    text = written(lambda acc, r: acc + view(r), r).text
    assert "LoadOfRow<Float32, false>(at, pair, state->words + 0, Parameter<const void*>(params, 0), Param" in text
    assert compiled(text)


def test_as_strided_begins_at_the_first_element_of_a_view():
    r = torch.zeros(M + 1, N)[1:]
    strided = traced(lambda acc, r: acc + r[2:].as_strided((M - 2, N), (N, 1))[:1], r)
    assert strided == traced(lambda acc, r: acc + r[2:3], r)
    with pytest.raises(UnsupportedError, match=r"has a storage_offset, .* inputs\[0\] begins .* slice the input first"):
        traced(lambda acc, r: acc + r.as_strided((M, N), (N, 1), N), r)


def test_a_view_that_would_copy_is_refused():
    with pytest.raises(UnsupportedError, match=r"views .* copy nothing, but _unsafe_view makes none of inputs\[0\]"):
        traced(lambda acc, r: acc + r.t().reshape(N, M).t(), torch.zeros(N, M))


@pytest.mark.parametrize("function", [lambda pairs: pairs[0], lambda pairs: pairs.unbind(0)[1]])
def test_rows_of_pairs_are_not_taken_for_columns(function):
    with pytest.raises(UnsupportedError, match="over rows"):
        traced(lambda acc: function(acc.view(2, 2, 2)), shape=(2, 4))


def test_rows_of_several_dimensions_need_one_stride():
    x = torch.zeros(4, 6, N)
    assert traced(lambda acc, x: acc + x, x, shape=(4, 6, N)).outputs[0].kind == "full"
    with pytest.raises(UnfusableError, match="one stride over all"):
        traced(lambda acc, x: acc + x[:, :6], torch.zeros(4, 8, N), shape=(4, 6, N))


def test_the_text_does_not_depend_on_sizes():
    texts = set()
    for m, n in itertools.product((8, 300), (64, 128)):
        expression = traced(
            lambda acc, b, r: functional.gelu(acc + b) * r, torch.zeros(n), torch.zeros(m, n), shape=(m, n)
        )
        texts.add(source.write(expression, main=0, has_pairs=[True, True]).text)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("function", "rounded"),
    [
        (lambda x, s: x < 0.1, lambda x, s: x < 0.10009765625),
        (lambda x, s: x == 0.1, lambda x, s: x == 0.10009765625),
        (lambda x, s: x**1.7, lambda x, s: x**1.703125),
        (lambda x, s: x < torch.tensor(0.1), lambda x, s: x < 0.10009765625),
        (lambda x, s: x * s, lambda x, s: x * s.bfloat16()),
        (lambda x, s: torch.where(x > s, x, s), lambda x, s: torch.where(x > s.bfloat16(), x, s.bfloat16())),
        (lambda x, s: x.float() * torch.full_like(x, 0.1), lambda x, s: x.float() * torch.full_like(x, 0.10009765625)),
    ],
)
def test_numbers_and_scalar_tensors_are_rounded_to_16_bits_where_torch_rounds_them(function, rounded):
    x, s = torch.zeros(M, N, dtype=torch.bfloat16), torch.zeros(())
    expressions = [traced(lambda acc, x, s, each=each: each(x, s) * acc, x, s) for each in (function, rounded)]
    assert expressions[0] == expressions[1]
    assert traced(lambda acc, s: acc * s + 0.1, s) != traced(lambda acc, s: acc * s.bfloat16() + 0.10009765625, s)


def test_a_number_below_the_least_of_fp16_is_false():
    x, tiny = torch.ones(M, N, dtype=torch.float16), torch.tensor(1e-10)
    assert not torch.logical_and(x, tiny).any()
    text = written(lambda acc, x: torch.logical_and(x, tiny), x).text
    assert "(Truth(v0.x) && Truth(0x0.0p+0f))" in text, text


@pytest.mark.parametrize(("divisor", "literal"), [(0.1, float.hex(0.10000000149011612) + "f"), (1e39, "INFINITY_F")])
def test_a_quotient_by_a_number_has_the_reciprocal_of_its_float32(divisor, literal):
    """1 / 1e39 is 0 there, and infinity times 0 is NaN like infinity divided by infinity."""
    assert f"__fmul_rn(acc.x, 1.0f / {literal})" in written(lambda acc: acc / divisor).text


def test_the_sign_of_nan_is_zero():
    """Like torch's: NaN is neither more nor less than 0."""
    assert "const float v0 = ((acc.x > 0.0f) - (acc.x < 0.0f));" in written(torch.sign).text


def test_too_many_tensors_stay_unfused():
    inputs = [torch.zeros(M, N + 8)[:, :N] for _ in range(40)]
    with pytest.raises(UnfusableError, match="at most 512 bytes"):
        written(lambda acc, *inputs: sum(inputs, acc), *inputs)


def test_a_trace_imports_no_torch_distributed_and_no_compiler():
    program = (
        "import sys, torch\nfrom stoneware.epilogue import trace\nbefore = set(sys.modules)\n"
        "def f(acc, r, b):\n"
        "    x = torch.nn.functional.silu(acc + b).add_(r[None, :, 0]).clamp(max=torch.tensor(6.0))\n"
        "    return x, (x[:, ::2] * x[:, 1::2]).to(torch.float8_e4m3fn), x.abs().amax(-1)\n"
        "trace.trace(f, (24, 64), (torch.zeros(64, 2), torch.zeros(64)), torch.device('cpu'))\n"
        "print(sorted({name for name in set(sys.modules) - before if name.startswith('torch.')}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n", run.stdout


def test_an_argument_that_is_kept_cannot_be_used_later():
    kept = []
    traced(lambda acc: kept.append(acc) or acc * 2)
    with pytest.raises(UnsupportedError, match="while it runs"):
        kept[0] + 1
