"""Calls with an epilogue: values, gradients and errors, on the reference backend."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.ops.matmul.api import _PLANS

M, N, K = 24, 64, 32


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return normal(M, K), normal(N, K), normal(M, N), normal(N)


def test_a_float32_result_has_the_out_dtype_and_others_keep_theirs(tensors):
    a, w, r, _ = tensors

    def epilogue(acc, r):
        return acc + r, acc.to(torch.float16), acc[:, ::2] * acc[:, 1::2], acc.abs().amax(-1)

    results = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r,))
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float16, torch.bfloat16, torch.float32]
    assert [tuple(result.shape) for result in results] == [(M, N), (M, N), (M, N // 2), (M,)]
    wide = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r,), out_dtype=torch.float32)
    acc = a.float() @ w.float().t()
    assert torch.allclose(wide[0], acc + r, atol=1e-5) and torch.allclose(wide[3], acc.abs().amax(-1))


def test_a_row_maximum_is_float32_and_a_result_of_one_column_is_not(tensors):
    a, w, *_ = tensors
    results = sw.matmul(a, w.t()[:, :1], epilogue=lambda acc: (acc * 1.0, acc.bfloat16().amax(-1)))
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float32]


def test_a_tuple_of_one_stays_a_tuple(tensors):
    a, w, *_ = tensors
    assert isinstance(sw.matmul(a, w.t(), epilogue=lambda acc: (acc,)), tuple)


def test_scaled_and_grouped_products_have_epilogues(tensors):
    a, w, r, bias = tensors
    a8, w8 = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(M, 1), torch.rand(1, N)
    scaled = sw.scaled_mm(a8, w8.t(), scale_a, scale_b, bias, epilogue=lambda acc, r: acc * r, inputs=(r,))
    acc = (a8.float() @ w8.float().t()) * scale_a * scale_b + bias
    assert torch.allclose(scaled.float(), acc * r, rtol=0.01, atol=0.01)
    offs = torch.tensor([10, M], dtype=torch.int32)
    weights = normal(2, N, K)
    grouped = sw.grouped_mm(a, weights.mT, offs, epilogue=torch.relu)
    expected = torch.cat([a[:10].float() @ weights[0].float().t(), a[10:].float() @ weights[1].float().t()])
    assert torch.allclose(grouped.float(), expected.relu(), rtol=0.02, atol=0.02)


def test_leading_dimensions_are_rows(tensors):
    _, w, *_ = tensors
    x, r = normal(2, 5, K), normal(2, 5, N)
    result = sw.matmul(x, w.t(), epilogue=lambda acc, r: acc * r, inputs=(r,))
    assert torch.allclose(result.float(), (x.float() @ w.float().t()) * r, rtol=0.01, atol=0.01)


def test_gradients_are_those_of_float64(tensors):
    a, w, r, bias = (tensor.requires_grad_() for tensor in tensors)

    def epilogue(acc, r, bias):
        return functional.gelu(acc + bias) * r, acc.sigmoid()

    first, second = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r, bias))
    weights = torch.randn_like(first), torch.randn_like(second)
    found = torch.autograd.grad([first, second], [a, w, r, bias], weights)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (a, w, r, bias)]
    expected_results = epilogue(doubles[0] @ doubles[1].t(), *doubles[2:])
    expected = torch.autograd.grad(expected_results, doubles, [weight.double() for weight in weights])
    for one, reference in zip(found, expected):
        assert one.dtype == torch.bfloat16
        assert (one.double() - reference).norm() / reference.norm() < 0.006


def test_an_input_that_the_function_detaches_has_no_gradient(tensors):
    a, w, r, _ = (tensor.requires_grad_() for tensor in tensors)
    sw.matmul(a, w.t(), epilogue=lambda acc, r: acc + r.detach(), inputs=(r,)).sum().backward()
    assert a.grad is not None and w.grad is not None and r.grad is None


def test_gradients_are_differentiable_once(tensors):
    a, w, *_ = tensors
    a.requires_grad_()
    (grad,) = torch.autograd.grad(sw.matmul(a, w.t(), epilogue=torch.sigmoid).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_gradients_are_right_of_a_function_that_changes_acc_in_place(tensors):
    def in_place(acc):
        with torch.no_grad():
            acc.mul_(2)
        return acc * acc

    a, w, *_ = tensors
    a.requires_grad_()
    (found,) = torch.autograd.grad(sw.matmul(a, w.t(), epilogue=in_place).sum(), a)
    acc = a.detach().double() @ w.double().t()
    reference = (4 * acc) @ w.double()  # the gradient of acc * acc at twice the sums
    assert (found.double() - reference).norm() / reference.norm() < 0.01


def test_a_tensor_that_needs_a_gradient_is_an_input(tensors):
    a, w, *_ = tensors
    learned = torch.nn.Parameter(torch.tensor(2.0))
    with pytest.raises(UnsupportedError, match=r"requires_grad=True as arguments, .* pass it in inputs="):
        sw.matmul(a, w.t(), epilogue=lambda acc: acc * learned)
    assert torch.equal(
        sw.matmul(a, w.t(), epilogue=lambda acc: acc * learned.detach()),
        sw.matmul(a, w.t(), epilogue=lambda acc: acc * 2.0),
    )


def test_each_result_has_memory_of_its_own(tensors):
    a, w, r, _ = tensors

    def epilogue(acc, r):
        return acc, r, acc, r.view(M, N)

    before = r.clone()
    results = sw.matmul(a, w.t(), epilogue=epilogue, inputs=(r,), out_dtype=torch.float32)
    assert len({result.data_ptr() for result in (*results, r)}) == 5
    results[1].zero_()
    assert torch.equal(r, before) and torch.equal(results[3], before)


class Pair(NamedTuple):
    first: float
    second: float


@dataclasses.dataclass(frozen=True)
class Scale:
    name: str
    value: float = dataclasses.field(compare=False)


@pytest.mark.parametrize(
    ("one", "other", "read"),
    [
        (0.0, -0.0, lambda value: value),
        ((1, (0.0,)), (1, (-0.0,)), lambda value: value[1][0]),
        (Scale("a", 0.0), Scale("a", -0.0), lambda value: value.value),
        (Pair(1.0, 0.0), Pair(1.0, -0.0), lambda value: value.second),
    ],
)
def test_functions_that_read_equal_objects_of_other_values_are_two(one, other, read, tensors):
    a, w, *_ = tensors

    def result(value):
        return sw.matmul(a, w.t(), epilogue=lambda acc: torch.copysign(acc, read(value)))

    assert (result(one) >= 0).all() and (result(other) <= 0).all()


def test_a_method_is_the_same_function_at_each_call(tensors):
    class Layer:
        scale = 2.0

        def epilogue(self, acc):
            return acc * self.scale

    a, w, *_ = tensors
    layer = Layer()
    sw.matmul(a, w.t(), epilogue=layer.epilogue)
    count = len(_PLANS.fused)
    sw.matmul(a, w.t(), epilogue=layer.epilogue)
    assert len(_PLANS.fused) == count


def test_compiled_and_vectorized_calls_are_right(tensors):
    a, w, r, _ = tensors

    def call(a, w, r):
        return sw.matmul(a, w.t(), epilogue=lambda acc, r: functional.silu(acc) + r, inputs=(r,))

    expected = call(a, w, r)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(a, w, r), expected)
    batch = torch.func.vmap(call, in_dims=(0, None, 0))(torch.stack([a, a]), w, torch.stack([r, r]))
    assert torch.equal(batch[0], expected) and torch.equal(batch[1], expected)


FACTOR = 2.0


def test_a_function_is_known_by_its_code_and_what_it_reads(tensors, monkeypatch):
    a, w, *_ = tensors
    _PLANS.fused.clear()

    def call(factor):
        return sw.matmul(a, w.t(), epilogue=lambda acc: acc * factor)

    one, two, again = call(1.0), call(2.0), call(1.0)
    assert torch.equal(one, again) and torch.equal(two, one * 2)
    assert len(_PLANS.fused) == 2

    def by_global():
        return sw.matmul(a, w.t(), epilogue=lambda acc: acc * FACTOR)

    assert torch.equal(by_global(), two)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    assert torch.equal(by_global(), one)


def scaled_by_global(x):
    return x * FACTOR


def test_a_number_that_a_called_function_reads_is_read_at_each_call(tensors, monkeypatch):
    a, w, *_ = tensors
    a.requires_grad_()

    def call(factor):
        def scaled(x, *, times=1):
            return scaled(x, times=times - 1) if times else x * factor

        return sw.matmul(a, w.t(), epilogue=lambda acc: scaled_by_global(scaled(acc)))

    one = call(1.0)
    assert torch.equal(call(4.0), one * 4)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    assert torch.equal(call(1.0), one / 2)
    (grad,) = torch.autograd.grad(one.sum(), a)  # of the number at the call
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert torch.equal(grad, torch.autograd.grad(call(1.0).sum(), a)[0])


def test_numbers_that_change_later_keep_the_values_of_the_call(tensors, monkeypatch):
    _, w, *_ = tensors
    weights = [w.float(), normal(N, N).float(), normal(N, N).float()]

    def reference(x, seed):
        for offset, weight in enumerate(weights):
            x = sw.dropout(x @ weight.t(), 0.5, seed, offset) * FACTOR
        return x

    def network(x, seed):
        for offset, weight in enumerate(weights):
            epilogue = lambda acc: sw.dropout(acc, 0.5, seed, offset) * FACTOR  # noqa: E731
            x = sw.matmul(x.bfloat16(), weight.bfloat16().t(), epilogue=epilogue)
        return x

    for rows in (M, M, 2 * M):  # the third has another trace
        a = normal(rows, K).float().requires_grad_()
        monkeypatch.setitem(globals(), "FACTOR", 2.0)
        found, expected = network(a, 11), reference(a, 11)
        assert torch.equal(found == 0, expected == 0)
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        (grad,) = torch.autograd.grad(found.float().sum(), a)
        (wanted,) = torch.autograd.grad(expected.sum(), a)
        assert (grad - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("unhashable", [None, [1.0]])
def test_the_gradients_of_a_loop_have_the_number_of_each_step(tensors, unhashable):
    a, w, *_ = tensors
    a.requires_grad_()
    results = []
    for factor in (1.0, 2.0, 4.0):

        def epilogue(acc, *, other=unhashable):
            return acc * factor * (other[0] if other else 1)

        results.append(sw.matmul(a, w.t(), epilogue=epilogue))
    grads = [torch.autograd.grad(result.sum(), a)[0] for result in results]
    assert torch.equal(grads[1], grads[0] * 2) and torch.equal(grads[2], grads[0] * 4)
    factor = 8.0  # the cell that the last function reads
    assert torch.equal(sw.matmul(a, w.t(), epilogue=epilogue), results[0] * 8)


def test_prepare_calls_the_op(tensors):
    a, w, *_ = tensors
    assert sw.prepare(sw.matmul, a, w.t(), epilogue=torch.relu) is None


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"out": torch.empty(M, N, dtype=torch.bfloat16)}, ValueError, "out of matmul must be None with an epilogue"),
        ({"inputs": torch.ones(1)}, TypeError, "must be a tuple of tensors"),
        ({"inputs": (3,)}, TypeError, r"inputs\[0\] must be a torch.Tensor, not int"),
        ({"inputs": (torch.ones(5),)}, ValueError, "must broadcast"),
        ({"inputs": (torch.ones(N),) * 30}, ValueError, "must have at most 32 tensors"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype=torch.float64 must be"),
        ({"backend": "none"}, ValueError, "unknown backend"),
        ({"epilogue": "relu"}, TypeError, "epilogue='relu' must be a function of the sums and the inputs, not str"),
        ({"epilogue": lambda acc, r: acc + r}, TypeError, "inputs= has tensors, 0: .*pass one tensor in inputs="),
        ({"epilogue": lambda acc: acc, "inputs": (torch.ones(N),)}, TypeError, "inputs= has tensors, 1: "),
        ({"epilogue": lambda acc, *_: acc.softmax(-1)}, UnsupportedError, "_softmax"),
    ],
)
def test_errors_state_the_rule(tensors, options, error, part):
    a, w, *_ = tensors
    with pytest.raises(error, match=part):
        sw.matmul(a, w.t(), **{"epilogue": lambda acc, *inputs: acc + inputs[0] if inputs else acc, **options})


def test_a_result_without_dimensions_is_refused(tensors):
    a, w, *_ = tensors
    with pytest.raises(ValueError, match="that of two vectors has none; pass a matrix"):
        sw.matmul(a[0], w[0], epilogue=torch.relu)
    assert sw.matmul(a[:1], w[0], epilogue=torch.relu).shape == (1,)


@pytest.mark.parametrize("op", [sw.matmul, sw.scaled_mm, sw.grouped_mm])
@pytest.mark.parametrize("inputs", [(torch.ones(N),), [torch.ones(N)], torch.ones(N)])
def test_inputs_without_an_epilogue_are_refused(op, inputs):
    operands = {"matmul": 2, "scaled_mm": 4, "grouped_mm": 3}[op.__name__]
    with pytest.raises(ValueError, match="inputs=.* must come with an epilogue, and epilogue=None; pass a function"):
        op(*[torch.ones(N, N)] * operands, inputs=inputs)
