"""What runs for a call of a layer that trains: which function, for which gradients, and that it gives the same."""

from __future__ import annotations

import pytest
import torch

import stoneware as sw
from stoneware import nn
from stoneware.nn import frozen_linear, trained_linear
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import RECIPES
from stoneware.ops import dispatch
from stoneware.ops.backend import torch_plan
from stoneware.ops.native_call import Direct
from stoneware.tuning import policy

K, N = 256, 384


def gradients(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, dx and the gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in layer.named_parameters()}}


def test_a_bf16_layer_has_a_second_derivative():
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    twin = torch.nn.Linear(K, N, dtype=torch.bfloat16)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(16, K).bfloat16()
    found = []
    for one in (layer, twin):
        operand = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(one(operand).square().sum(), operand, create_graph=True)
        found.append(torch.autograd.grad(dx.float().square().sum(), [operand, one.weight]))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [*RECIPES, "bf16"])
def test_the_same_call_follows_what_requires_a_gradient_now(kind):
    layer = (
        nn.Linear(K, N, dtype=torch.bfloat16)
        if kind == "bf16"
        else nn.Float8Linear(K, N, recipe=kind, dtype=torch.bfloat16)
    )
    x = torch.randn(16, K).bfloat16()
    for _ in range(2):
        assert layer(x).requires_grad
        with torch.no_grad():
            assert not layer(x).requires_grad
        layer.requires_grad_(False)
        assert not layer(x).requires_grad
        y = layer(x.clone().requires_grad_())
        y.sum().backward()
        assert layer.weight.grad is None
        layer.requires_grad_(True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [32, 15, 528, 2064])
def test_a_gathered_weight_gives_the_gradients_of_its_operands_one_by_one(recipe, m):
    cast = RECIPES[recipe].forward[1]
    weight = torch.randn(N, K).bfloat16()
    quantized = sw.quantize(weight, cast.scales, dtype=cast.dtype, power_of_two=cast.power_of_two)
    gathered = GatheredWeight(*quantized, weight.dtype).requires_grad_()
    x, dy = torch.randn(m, K).bfloat16().requires_grad_(), torch.randn(m, N).bfloat16()
    y = trained_linear.call(x, gathered, None, None, recipe)
    # The reduction of x, unless it is small: backward finds it itself.
    keeps_it = {"tensorwise": m == 2064, "rowwise": m != 32}.get(recipe, False)
    assert len(y.grad_fn.saved_tensors) == 2 + keeps_it
    found = y, *torch.autograd.grad(y, [x, gathered], dy)
    plain = weight.clone().requires_grad_()
    y = trained_linear.call(x, plain, None, None, recipe)
    dx = frozen_linear.grad_input(dy, *quantized, recipe, is_trained=True)
    for ours, expected in zip(found, (y, dx, torch.autograd.grad(y, plain, dy)[0]), strict=True):
        assert torch.equal(ours, expected)


def test_torch_func_goes_through_a_bf16_layer():
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    x = torch.randn(16, K).bfloat16()
    expected = gradients(layer, x, torch.ones(16, N).bfloat16())["weight"]
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    found = torch.func.grad(lambda weights: torch.func.functional_call(layer, weights, (x,)).sum())(weights)
    assert torch.equal(found["weight"], expected)


@pytest.mark.parametrize("layout", [None, "nt", "nn", "tn"])
@pytest.mark.parametrize("has_had_scopes", [False, True])
def test_a_layer_is_torchs_if_each_matmul_runs_torchs_kernel(layout, has_had_scopes, monkeypatch):
    def plan(self, problem, *arguments, **options):
        def run(a, b, out, bias):
            torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

        return torch_plan(run) if problem.layout != layout else lambda *tensors: run(*tensors)

    monkeypatch.setattr(dispatch.Operation, "plan", plan)
    monkeypatch.setattr(policy, "has_had_scopes", lambda: has_had_scopes)
    policy.forget_plans()
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    y = layer(torch.randn(16, K).bfloat16().requires_grad_())
    assert ("KnownLinear" not in y.grad_fn.name()) == (layout is None and not has_had_scopes)
    policy.forget_plans()


def torchs(plan):
    """A plan of torch's that computes as this one."""

    def run(a, b, out, scale_a, scale_b, bias):
        plan(a, b, out, scale_a, scale_b, bias)

    def direct(a, b, scale_a, scale_b, bias):
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
        plan(a, b, out, scale_a, scale_b, bias)
        return out

    return torch_plan(run, Direct(direct, [0, 1, 3, 4, 5]))


@pytest.mark.parametrize("kind", ["training", "frozen", "feed-forward"])
@pytest.mark.parametrize("shape", [(32, K), (2, 16, K)])
def test_a_step_that_runs_torchs_kernel_gives_the_same(kind, shape, monkeypatch):
    if kind == "feed-forward":
        layer = nn.SwiGLU(K, N, frozen=True, dtype=torch.bfloat16)
        layer.load_state_dict(nn.SwiGLU(K, N, recipe="bf16", dtype=torch.bfloat16).state_dict())
    else:
        make = nn.Float8Linear if kind == "training" else nn.Float8InferenceLinear.from_linear
        layer = (
            make(K, N, False, dtype=torch.bfloat16)
            if kind == "training"
            else make(torch.nn.Linear(K, N, False, dtype=torch.bfloat16))
        )
    x = torch.randn(shape).bfloat16()
    y = layer(x)
    expected = gradients(layer, x, torch.ones_like(y))
    plan, calls = dispatch.Operation.plan, []

    def recorded(self, *arguments, **options):
        calls.append(self.spec.name)
        return torchs(plan(self, *arguments, **options))

    monkeypatch.setattr(dispatch.Operation, "plan", recorded)
    policy.forget_plans()
    for name, value in gradients(layer, x, torch.ones_like(y)).items():
        assert value is None if expected[name] is None else torch.equal(value, expected[name]), name
    assert "scaled_mm" in calls
    policy.forget_plans()
