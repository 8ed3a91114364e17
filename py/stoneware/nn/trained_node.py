"""What the nodes of autograd that train several layers as one have in common: `trained_swiglu`, `trained_siblings`.

The weights of layers with the same input are one fp8 operand with scales of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoneware.nn import steps
from stoneware.nn.arguments import BITS_16
from stoneware.nn.recipes import RECIPES, UNIT, why_not
from stoneware.nn.steps import Step, Steps
from stoneware.ops import tensor_checks
from stoneware.quantizing import kernels
from stoneware.tuning import policy

RECIPE = "rowwise"
"""The recipe whose layers are trained as one node."""

CAST = RECIPES[RECIPE].forward[0]
"""Of every operand."""


def fits(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether a node may compute layers with these weights, which all need gradients, for x or what follows from it."""
    m = x.numel() // x.shape[-1]
    if x.dtype not in BITS_16 or not m or m % UNIT or not torch.is_grad_enabled():
        return False
    if not all(weight.requires_grad and why_not(RECIPE, *weight.shape) is None for weight in weights):
        return False
    device = tensor_checks.check_one_device([("x", x)])
    return device.kind == "cpu" or all(kernels.why_not_joined([weight], device) is None for weight in weights)


def gradient_matmul(a: str, b: str, result: str) -> Step:
    """The step of a matmul in backward."""
    return steps.scaled_mm(a, b, result, use_fast_accum=False)


def native(layer: Steps, optional: Sequence[str] = ()) -> Callable[..., Any]:
    """call(*inputs) -> a tuple of the results. Unusual calls never come here."""
    return steps.native_call(layer, lambda *tensors: tuple(layer.run(*tensors)), optional=optional)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """torch.autograd.Function.apply without its checks for torch.func, whose calls never come here."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def backward(state: Any, gradients: Callable[..., Any], ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """gradients(ctx, *dy) in the state of the forward call; a second derivative is refused."""
    if torch.is_grad_enabled():  # create_graph=True
        gradients = once_differentiable(gradients)
    results: tuple[torch.Tensor | None, ...] = policy.run_in(state, gradients, ctx, *dy)
    return results
