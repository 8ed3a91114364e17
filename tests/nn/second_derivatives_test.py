"""Gradients with a graph: they are those without, and what they depend on has no second derivative in fp8."""

from __future__ import annotations

import pytest
import torch

from stoneware import nn
from stoneware.nn.recipes import RECIPES

K, N = 256, 384

recipes = pytest.mark.parametrize("recipe", RECIPES)


@recipes
def test_a_second_derivative_is_refused(recipe):
    x = torch.randn(16, K, requires_grad=True)
    layer = nn.Float8Linear(K, N, recipe=recipe)
    for loss in (lambda y: y.square().sum(), torch.sum):  # of the second, dx depends on the weight alone
        (dx,) = torch.autograd.grad(loss(layer(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            dx.sum().backward()


@recipes
def test_a_gradient_of_a_checkpoint_with_a_graph_is_that_without(recipe):
    x, layer = torch.randn(16, K, requires_grad=True), nn.Float8Linear(K, N, recipe=recipe)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(found, expected) and found.requires_grad


def test_a_gradient_that_depends_on_nothing_else_has_none():
    """The gradient of x depends on dy and on the frozen weight, like in torch."""
    x, layer = torch.randn(16, K, requires_grad=True), nn.Float8Linear(K, N).requires_grad_(False)
    for frozen in (layer, nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N))):
        (dx,) = torch.autograd.grad(frozen(x).sum(), x, create_graph=True)
        assert not dx.requires_grad


@pytest.mark.parametrize("trained", ["ab", "b"])
def test_a_second_derivative_of_an_adapter_is_refused(trained):
    layer = nn.Lora(nn.Float8InferenceLinear.from_linear(torch.nn.Linear(K, N).bfloat16()), 4)
    layer.a.requires_grad_("a" in trained)
    torch.nn.init.normal_(layer.b.weight)
    x = torch.randn(16, K).bfloat16().requires_grad_()
    gradients = torch.autograd.grad(layer(x).sum(), [x, layer.b.weight], create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(gradient.sum(), x if gradient is gradients[1] else layer.b.weight, retain_graph=True)
