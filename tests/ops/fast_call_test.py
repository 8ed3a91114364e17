"""Calls that were made before: which of them go without Python, and that they are the same calls."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fresh_plans import K, M, N, call, counts, in_python, plans  # noqa: F401
from operands import poisoned, random_fp8, scaled_operands
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import stoneware as sw
from stoneware.errors import ForwardOnlyError
from stoneware.kernels.config import Config
from stoneware.ops.grouped_mm import api as grouped_mm_api
from stoneware.ops.matmul import api as matmul_api
from stoneware.ops.scaled_mm import api

REFERENCE = Config(backend="reference", kernel="torch.matmul_float32")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("m", [0, 1, 33])
def test_known_call_gives_what_python_gives(plans, m, has_out, has_bias, scale, out_dtype):
    for repetition in range(3):
        x = scaled_operands(m, N, K, scale_a=scale, scale_b=scale, bias_dtype=out_dtype if has_bias else None)
        out = poisoned(m, N, out_dtype, ldd=64) if has_out else None
        result = call(x, out_dtype=out_dtype, out=out)
        assert result is out or not has_out
        expected = in_python(plans, x, out_dtype=out_dtype)
        assert torch.equal(result, expected)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert has_out or result.stride() == expected.stride()
        assert counts(plans) == (repetition, 1, 0)


def test_known_matmul_is_a_hit(monkeypatch):
    fresh = type(matmul_api._PLANS)()
    monkeypatch.setattr(matmul_api, "_PLANS", fresh)
    for _ in range(3):
        a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
        bias = torch.randn(N).bfloat16()
        assert torch.equal(sw.matmul(a, b, bias), type(fresh)().run(a, b, bias, None, None, False, None, None))
    assert counts(fresh) == (2, 1, 0)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
def test_known_grouped_mm_is_a_hit_whatever_its_offsets(monkeypatch, has_out, is_fp8):
    fresh = type(grouped_mm_api._PLANS)()
    monkeypatch.setattr(grouped_mm_api, "_PLANS", fresh)
    for ends in ([5, 5, M], [0, 20, M], [M, M, M]):
        a, weights = random_fp8(M, K), random_fp8(3 * N, K).view(3, N, K)
        scales = (torch.rand(M) + 0.5, torch.rand(3, N) + 0.5) if is_fp8 else (None, None)
        if not is_fp8:
            a, weights = a.bfloat16(), weights.bfloat16()
        tensors = a, weights.mT, torch.tensor(ends, dtype=torch.int32), *scales
        out = poisoned(M, N, torch.bfloat16) if has_out else None
        result = sw.grouped_mm(*tensors, out=out)
        assert result is out or not has_out
        assert torch.equal(result, type(fresh)().run(*tensors, None, None, None, None))
    assert counts(fresh) == (2, 1, 0)


def test_grouped_mm_with_another_number_of_groups_asks_for_a_plan(monkeypatch):
    fresh = type(grouped_mm_api._PLANS)()
    monkeypatch.setattr(grouped_mm_api, "_PLANS", fresh)
    a = torch.randn(M, K).bfloat16()
    for groups in (2, 3):
        weights = torch.randn(groups, N, K).bfloat16()
        offs = torch.full((groups,), M, dtype=torch.int32)
        assert torch.equal(sw.grouped_mm(a, weights.mT, offs), sw.matmul(a, weights[0].t()))
    assert counts(fresh) == (0, 2, 0)


def test_matmul_of_a_misaligned_operand_has_a_plan_of_its_own(monkeypatch):
    fresh = type(matmul_api._PLANS)()
    monkeypatch.setattr(matmul_api, "_PLANS", fresh)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    shifted = torch.empty(M * K + 1, dtype=torch.bfloat16)[1:].view(M, K).copy_(a)
    expected = sw.matmul(a, b)
    assert torch.equal(sw.matmul(shifted, b), expected)
    assert (fresh.fast.num_made, len(fresh.fast)) == (2, 2)


@pytest.mark.parametrize(
    "change",
    [
        "m",
        "k",
        "lda",
        "ldb",
        "out",
        "ldd",
        "bias",
        "scale_a",
        "out_dtype",
        "use_fast_accum",
        "backend",
        "config",
        "tuning",
        "scale strides",
    ],
)
def test_call_of_another_kind_asks_for_a_plan(plans, change):
    x = scaled_operands(M, N, K)
    call(x)
    assert counts(plans) == (0, 1, 0)
    other, options = scaled_operands(M, N, K), {}
    if change == "m":
        other = scaled_operands(M + 1, N, K)
    elif change == "k":
        other = scaled_operands(M, N, K + 16)
    elif change in ("lda", "ldb"):
        wide = scaled_operands(M, N, 2 * K)
        other = type(x)(
            wide.a[:, :K] if change == "lda" else x.a,
            wide.b[:K] if change == "ldb" else x.b,
            x.scale_a,
            x.scale_b,
            None,
        )
    elif change in ("out", "ldd"):
        call(x, out=poisoned(M, N, torch.bfloat16))
        options["out"] = poisoned(M, N, torch.bfloat16, ldd=N + (16 if change == "ldd" else 0))
    elif change == "bias":
        other = scaled_operands(M, N, K, bias_dtype=torch.bfloat16)
    elif change == "scale_a":
        other = scaled_operands(M, N, K, scale_a="tensor")
    elif change == "out_dtype":
        options["out_dtype"] = torch.float16
    elif change == "use_fast_accum":
        options["use_fast_accum"] = False
    elif change == "backend":
        options["backend"] = "reference"
    elif change == "config":
        options["config"] = REFERENCE
    elif change == "scale strides":
        other = type(x)(x.a, x.b, (torch.rand(M, 3) + 1)[:, :1], x.scale_b, None)
    num_made = plans.fast.num_made
    if change == "tuning":
        with sw.tuning("error_on_miss"):
            result = call(other)
    else:
        result = call(other, **options)
    assert plans.fast.num_made == num_made + (0 if change == "out" else 1)
    assert torch.equal(
        result,
        in_python(
            plans,
            other,
            out_dtype=options.get("out_dtype", torch.bfloat16),
            use_fast_accum=options.get("use_fast_accum", True),
        ),
    )


@pytest.mark.parametrize("has_module", [True, False])
@pytest.mark.parametrize("value", [1, 0, 1.0, torch.tensor(True)], ids=str)
def test_what_equals_a_bool_is_none_whatever_was_called_before(plans, has_module, value):
    if not has_module:
        plans.call = plans.slow
    x = scaled_operands(M, N, K)
    for known in (None, True, False):
        if known is not None:
            call(x, use_fast_accum=known)
        with pytest.raises(TypeError, match="use_fast_accum=.* must be a bool; pass True or False"):
            call(x, use_fast_accum=value)


def test_equal_objects_are_the_same_kind(plans):
    x = scaled_operands(M, N, K)
    for _ in range(3):
        backend = "".join("reference")  # not the literal itself
        call(x, config=Config(backend=backend, kernel="torch.matmul_float32"), backend=backend)
    assert counts(plans) == (2, 1, 0)


def test_parameter_is_a_tensor(plans):
    x = scaled_operands(M, N, K)
    call(x)
    weight = torch.nn.Parameter(x.b, requires_grad=False)
    call(type(x)(x.a, weight, x.scale_a, x.scale_b, None))
    assert counts(plans) == (1, 1, 0)


def test_gradients_are_left_to_python_which_makes_the_same_call(plans):
    x = scaled_operands(M, N, K)
    expected = call(x)
    x.scale_a.requires_grad_()
    result = call(x)
    assert result.requires_grad and torch.equal(result, expected)
    assert counts(plans) == (1, 1, 1)
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        assert call(x).is_inference()
    assert counts(plans) == (3, 1, 1)


def test_tangents_are_refused_and_a_dual_level_alone_is_left_to_python(plans):
    x = scaled_operands(M, N, K)
    expected = call(x)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    with forward_ad.dual_level():
        scale = forward_ad.make_dual(x.scale_a, torch.ones_like(x.scale_a))
        dual = type(x)(x.a, x.b, scale, x.scale_b, None)
        for context in (contextlib.nullcontext, torch.no_grad):
            with (
                context(),
                pytest.raises(ForwardOnlyError, match="forward-mode derivative, and scale_a has a tangent; pass"),
            ):
                call(dual)
        with pytest.raises(ForwardOnlyError, match="out has a tangent"):
            call(x, out=forward_ad.make_dual(out, torch.ones_like(out)))
        with torch.inference_mode():
            assert torch.equal(call(dual), expected)
        assert torch.equal(call(x), expected)
    assert counts(plans) == (0, 2, 5)  # one plan with `out`, one without
    call(x)
    assert counts(plans) == (1, 2, 5)


@pytest.mark.parametrize("has_module", [True, False])
@pytest.mark.parametrize("op", ["scaled_mm", "matmul", "grouped_mm"])
def test_tangents_are_refused_by_every_op_and_operator(monkeypatch, op, has_module):
    api_of_op = {"scaled_mm": api, "matmul": matmul_api, "grouped_mm": grouped_mm_api}[op]
    fresh = type(api_of_op._PLANS)()
    if not has_module:
        fresh.call = fresh.slow
    monkeypatch.setattr(api_of_op, "_PLANS", fresh)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    if op == "scaled_mm":
        x = scaled_operands(M, N, K)
        tensors, name, objects = [x.a, x.b, x.scale_a, x.scale_b, None], "scale_a", (torch.bfloat16, True, None, None)
        position = 2
    else:
        position, name, objects = 0, "a", (None, *([False] if op == "matmul" else []), None, None)
        tensors = (
            [a, b, None]
            if op == "matmul"
            else [a, torch.randn(1, N, K).bfloat16().mT, torch.tensor([M], dtype=torch.int32), None, None]
        )
    function, operator = getattr(sw, op), getattr(torch.ops.stoneware, op)
    with forward_ad.dual_level():
        tensors[position] = forward_ad.make_dual(tensors[position], torch.ones_like(tensors[position]))
        for run in (function, lambda *given: operator(*given, *objects)):
            with pytest.raises(ForwardOnlyError, match=f"{op} has no .*{name} has a tangent"):
                run(*tensors)


def test_transforms_of_torch_func_see_the_operator():
    a, b = torch.randn(3, M, K).bfloat16(), torch.randn(K, N).bfloat16()

    def multiply(a):
        return sw.matmul(a, b)

    with pytest.raises(ForwardOnlyError, match="a has a tangent"):
        torch.func.jvp(multiply, (a[0],), (torch.ones_like(a[0]),))
    assert torch.equal(torch.vmap(multiply)(a), torch.stack([multiply(one) for one in a]))


def test_subclass_is_left_to_python(plans):
    class Labelled(torch.Tensor):
        pass

    x = scaled_operands(M, N, K)
    expected = call(x)
    labelled = type(x)(x.a.as_subclass(Labelled), x.b, x.scale_a, x.scale_b, None)
    for _ in range(2):
        assert torch.equal(call(labelled), expected)
    assert counts(plans) == (0, 1, 2)


def test_negated_views_are_read_as_what_they_mean(plans):
    x = scaled_operands(M, N, K)
    value = torch.complex(torch.tensor(0.0), torch.tensor(-1.5)).conj().imag
    assert value.is_neg() and value.item() == 1.5
    negated = type(x)(x.a, x.b, x.scale_a, value, None)
    plain = type(x)(x.a, x.b, x.scale_a, torch.tensor(1.5), None)
    expected = call(plain)
    assert torch.equal(call(negated), expected)
    out = poisoned(M, N, torch.bfloat16)
    assert call(negated, out=out) is out
    assert torch.equal(out, expected)
    assert plans.fast.num_slow == 2


@pytest.mark.parametrize(
    "make",
    [
        torch._neg_view,
        lambda x: (
            torch.empty(x.shape, dtype=torch.complex32).conj().imag.as_strided(x.shape, x.stride()).copy_(x.neg())
        ),
    ],
    ids=["_neg_view", "as_strided"],
)
def test_negated_view_of_unit_stride_is_read_and_written_as_what_it_means(monkeypatch, make):
    fresh = type(matmul_api._PLANS)()
    monkeypatch.setattr(matmul_api, "_PLANS", fresh)
    a, b, bias = torch.randn(12, 16).half(), torch.randn(16, 24).half(), torch.randn(24).half()
    expected = sw.matmul(a, b, bias)
    for position in range(3):
        tensors = [a, b, bias]
        tensors[position] = make(tensors[position])
        assert tensors[position].is_neg() and 1 in tensors[position].stride()
        sign = tensors[position].resolve_neg()
        tensors_meant = [*tensors]
        tensors_meant[position] = sign
        assert torch.equal(sw.matmul(*tensors), sw.matmul(*tensors_meant))
    out = make(torch.zeros(12, 24).half())
    for _ in range(2):
        assert out.is_neg() and sw.matmul(a, b, bias, out=out) is out
        assert torch.equal(out.resolve_neg(), expected)
    assert fresh.fast.num_slow == 5


def test_dispatch_mode_sees_one_operator(plans):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(str(function))
            return function(*arguments, **(keywords or {}))

    seen = []
    x = scaled_operands(M, N, K)
    expected = call(x)
    with Recorder():
        result = call(x, config=REFERENCE)
        call(x, out=torch.empty(M, N, dtype=torch.bfloat16))
    assert torch.equal(result, expected)
    assert [name for name in seen if "stoneware" in name] == [
        "stoneware.scaled_mm.default",
        "stoneware.scaled_mm_out.default",
    ]


def test_function_mode_sees_the_allocation(plans):
    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            seen.append(function)
            return function(*arguments, **(keywords or {}))

    x = scaled_operands(M, N, K)
    call(x)
    seen = []
    with Recorder():
        call(x)
    assert torch.empty_strided in seen
    assert plans.fast.num_hits == 1


def test_fake_tensors_give_fake_results(plans):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        a = torch.empty(M, K, dtype=torch.float8_e4m3fn)
        b = torch.empty(N, K, dtype=torch.float8_e4m3fn).t()
        result = sw.scaled_mm(a, b, torch.ones(M, 1), torch.ones(1, N), out_dtype=torch.float16)
        y = sw.matmul(torch.empty(M, K).bfloat16(), torch.empty(K, N).bfloat16())
    for fake, dtype in ((result, torch.float16), (y, torch.bfloat16)):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype) == ((M, N), dtype)


def test_tensors_without_memory_are_refused_in_our_words_after_a_plan_was_made(plans):
    x = scaled_operands(M, N, K)
    call(x)
    for scale, part in (
        (x.scale_a.to_mkldnn(), "scale_a.layout=torch._mkldnn"),
        (x.scale_a.to_sparse(), "scale_a.layout=torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(M)], layout=torch.jagged), "not a nested one"),
        ([1.0], "scale_a of scaled_mm must be a torch.Tensor"),
    ):
        with pytest.raises(TypeError, match=part):
            sw.scaled_mm(x.a, x.b, scale, x.scale_b)
    with pytest.raises(TypeError, match="out_dtype=\\[\\]"):
        call(x, out_dtype=[])
