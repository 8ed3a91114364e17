"""What torch.compile's pass fuses, what it leaves alone, and that neither changes a value."""

from __future__ import annotations

import pytest
import torch
from captured import Captured
from torch.nn import functional

import stoneware as sw
from stoneware.inductor import EpilogueFusion, fusion, gain
from stoneware.kernels.config import Config

M, N, K = 24, 64, 32
silu = functional.silu


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def operands(*shape):
    return normal(*(shape or (M,)), K), normal(N, K)


def fused(function, *tensors, expected=("matmul_epilogue",)):
    """Checks which operators the graph has after the pass, and the values; returns the captured function."""
    captured = Captured(function, EpilogueFusion(always=True))
    with torch.no_grad():
        results = captured(*tensors)
        assert captured.operators() == list(expected)
        for result, reference in zip(as_tuple(results), as_tuple(function(*tensors)), strict=True):
            assert (result.dtype, result.shape) == (reference.dtype, reference.shape)
            assert result.stride() == reference.stride()
            limit = 0.06 if result.dtype.itemsize == 1 else 0.006
            assert (result.double() - reference.double()).norm() <= limit * reference.double().norm()
    return captured


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


FUNCTIONS = {
    "silu": lambda y, r, bias: silu(y),
    "gelu of a bias, times a matrix": lambda y, r, bias: functional.gelu(y + bias) * r,
    "a constant, where": lambda y, r, bias: torch.where(y > 0.5, y, -1.0) + functional.leaky_relu(y),
    "casts of inputs": lambda y, r, bias: (y.float() * r.float() + bias.float()).to(torch.float16),
    "fp8": lambda y, r, bias: (y * 3).clamp(-448, 448).to(torch.float8_e4m3fn),
    "a row maximum": lambda y, r, bias: (silu(y), silu(y).abs().amax(-1)),
    "a row maximum that keeps its dimension": lambda y, r, bias: (y.relu(), y.abs().amax(1, keepdim=True)),
    "the matmul's result too": lambda y, r, bias: (y, silu(y)),
    "swiglu": lambda y, r, bias: silu(y[..., ::2]) * y[..., 1::2],
    "pairs": lambda y, r, bias: silu(y.view(M, N // 2, 2)[..., 0]) * 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pointwise_operators_become_part_of_the_matmul(name):
    arguments = *operands(), normal(M, N), normal(N)
    fused(
        lambda a, w, r, bias: FUNCTIONS[name](sw.matmul(a, w.t()), r, bias),
        *arguments,
        expected=["matmul_epilogue"] + ["convert_element_type"] * ("row maximum" in name),
    )


def test_results_are_those_of_float64():
    a, w, r = *operands(), normal(M, N)
    captured = Captured(lambda a, w, r: silu(sw.matmul(a, w.t())) * r, EpilogueFusion(always=True))
    with torch.no_grad():
        result = captured(a, w, r)
    expected = silu(a.double() @ w.double().t()) * r.double()
    assert (result.double() - expected).norm() < 0.004 * expected.norm()


def test_scaled_and_grouped_matmuls_are_fused():
    a, w = operands()
    a8, w8 = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    scale_a, scale_b, bias = torch.rand(M, 1), torch.rand(1, N), normal(N)
    fused(
        lambda *tensors: silu(sw.scaled_mm(*tensors)),
        *(a8, w8.t(), scale_a, scale_b, bias),
        expected=["scaled_mm_epilogue"],
    )
    offs = torch.tensor([10, M], dtype=torch.int32)
    fused(
        lambda *tensors: sw.grouped_mm(*tensors).relu(), a, normal(2, N, K).mT, offs, expected=["grouped_mm_epilogue"]
    )


def test_views_with_more_dimensions_are_fused_for_every_size():
    w, bias = normal(N, K), normal(N)

    def block(x, w, r, bias):
        y = sw.matmul(x.reshape(-1, K), w.t()).view(*x.shape[:-1], N)
        h = silu(y + bias) * r
        return h, h.abs().amax(-1)

    captured = Captured(block, EpilogueFusion(always=True), dynamic=True)
    for sizes in ((2, 5), (3, 7)):
        x, r = normal(*sizes, K), normal(*sizes, N)
        with torch.no_grad():
            h, amax = captured(x, w, r, bias)
            expected_h, expected_amax = block(x, w, r, bias)
        assert torch.allclose(h, expected_h, rtol=0.02, atol=0.02)
        assert amax.shape == expected_amax.shape and torch.allclose(amax, expected_amax, rtol=0.02)
    assert len(captured.graphs) == 1
    assert captured.operators() == ["matmul_epilogue", "convert_element_type"]


def test_a_call_with_an_epilogue_is_fused_again():
    a, w, r = *operands(), normal(M, N)
    fused(lambda a, w, r: sw.matmul(a, w.t(), epilogue=lambda acc, r: silu(acc) + r, inputs=(r,)), a, w, r)


def test_an_input_that_is_computed_after_the_matmul_is_moved_before_it():
    a, w, x = *operands(), normal(M, N)
    expected = ["exp", "sum", "matmul_epilogue"]
    fused(lambda a, w, x: silu(sw.matmul(a, w.t())) * x.exp().sum(0, dtype=x.dtype), a, w, x, expected=expected)


def test_two_matmuls_share_what_follows_them():
    a, w = operands()
    fused(
        lambda a, w, v: silu(sw.matmul(a, w.t())) * sw.matmul(a, v.t()),
        *(a, w, normal(N, K)),
        expected=["matmul", "matmul_epilogue"],
    )


def test_gradients_of_a_fused_forward_are_right():
    a, w, r = (tensor.requires_grad_() for tensor in (*operands(), normal(M, N)))
    captured = Captured(lambda a, w, r: silu(sw.matmul(a, w.t())) * r, EpilogueFusion(always=True))
    result = captured(a, w, r)
    weight = torch.randn_like(result)
    found = torch.autograd.grad(result, (a, w, r), weight)
    assert "matmul_epilogue" in captured.operators()
    doubles = [tensor.detach().double().requires_grad_() for tensor in (a, w, r)]
    reference = silu(doubles[0] @ doubles[1].t()) * doubles[2]
    for one, expected in zip(found, torch.autograd.grad(reference, doubles, weight.double())):
        assert (one.double() - expected).norm() < 0.01 * expected.norm()


def kept(function, *tensors):
    """Checks that the matmul stays; returns the operators."""
    captured = Captured(function, EpilogueFusion(always=True))
    with torch.no_grad():
        result = captured(*tensors)
    assert torch.allclose(result, function(*tensors), rtol=0.02, atol=0.02)
    names = captured.operators()
    assert "matmul" in names and "matmul_epilogue" not in names
    return names


CONFIG = Config(backend="reference", kernel="torch.matmul_float32", max_swizzle=1, raster="heuristic")


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.cumsum(0),
        lambda y: y.view(N, M).relu(),
        lambda y: y[:, : N // 2].relu(),
        lambda y: y.t().relu(),
        lambda y: y.amax(0),
        lambda y: y * y.sum(),
        lambda y: y.float(),
        lambda y: torch.remainder(y, 0.5),
        lambda y: y + torch.ones(3, M, N, dtype=y.dtype),
    ],
)
def test_what_an_epilogue_cannot_have_stays_outside(function):
    kept(lambda a, w: function(sw.matmul(a, w.t())), *operands())


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"config": CONFIG}])
def test_a_call_with_a_backend_or_a_config_stays(options):
    kept(lambda a, w: sw.matmul(a, w.t(), **options).relu(), *operands())


def test_more_tensors_than_a_kernel_takes_stay_outside():
    a, w = operands()

    def function(a, w, *rows):
        y = sw.matmul(a, w.t())
        for row in rows:
            y = y + row
        return y

    kept(function, a, w, *[normal(N) for _ in range(30)])


def test_wide_arguments_of_a_reduction_stay_outside():
    a, w = operands()
    captured = fused(
        lambda a, w, r: functional.layer_norm(sw.matmul(a, w.t()) * r, (N,)),
        *(a, w, normal(M, N)),
        expected=Captured.operators(norm_after(a, w)),
    )
    [result] = [node for node in captured.graphs[0].nodes if "getitem" in str(node.target)][:1]
    assert result.meta["val"].dtype == torch.bfloat16


def norm_after(a, w):
    """The graph of a matmul, a product and a norm, with the first two fused."""

    def call(a, w, r):
        y = torch.ops.stoneware.matmul_epilogue(
            *(a, w.t(), None, [r], None, False, '[1,[["mul.Tensor",["%0","%1"],{}]],[[2,"full","bfloat16"]]]')
        )
        return functional.layer_norm(y[0], (N,))

    captured = Captured(call, lambda graph: None)
    with torch.no_grad():
        captured(a, w, normal(M, N))
    return captured


def test_nothing_is_moved_over_a_change_of_memory():
    a, w, r = *operands(), normal(M, N)
    captured = Captured(lambda a, w, r: silu(sw.matmul(a, w.t())) * r, lambda graph: None)
    with torch.no_grad():
        captured(a, w, r)
    [graph] = captured.graphs
    matmul = next(node for node in graph.nodes if node.target is torch.ops.stoneware.matmul.default)
    holder = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(matmul):
        graph.call_function(torch.ops.aten.mul_.Scalar, (holder, 2))
    before = str(graph)
    EpilogueFusion(always=True)(graph)
    assert str(graph) == before


def test_without_a_predicted_gain_nothing_changes(monkeypatch):
    a, w = operands()
    predicted = []
    asked = []

    def saved_us(op, tensors, arguments, device, *, saved_bytes):
        asked.append((op, [tuple(tensor.shape) for tensor in tensors[:2]], saved_bytes))
        return predicted[-1]

    monkeypatch.setattr(gain, "saved_us", saved_us)

    def call(a, w):
        return silu(sw.matmul(a, w.t()))

    names = []
    for saved in (None, -0.5, 0.5):
        predicted.append(saved)
        captured = Captured(call, EpilogueFusion())
        with torch.no_grad():
            captured(a, w)
        names.append("matmul_epilogue" in captured.operators())
    assert names == [False, False, True]
    assert asked[0] == ("matmul", [(M, K), (K, N)], 2 * 2 * M * N)


def test_nothing_is_fused_on_a_cpu():
    captured = Captured(lambda a, w: sw.matmul(a, w.t()).relu(), EpilogueFusion())
    with torch.no_grad():
        captured(*operands())
    assert captured.operators() == ["matmul", "relu"]


def test_an_operator_passes_torch_s_own_checks():
    a, w = operands()
    steps = '[["mul.Tensor",["%0","%1"],{}],["amax.default",["%2",[-1]],{}]]'
    text = f'[1,{steps},[[2,"full","bfloat16"],[3,"row_max","float32"]]]'
    torch.library.opcheck(
        fusion.OPERATORS["matmul"],
        (a, w.t(), None, [normal(M, N)], None, False, text),
        test_utils=["test_schema", "test_faketensor"],
    )
