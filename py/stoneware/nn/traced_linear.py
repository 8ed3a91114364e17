"""A linear layer that trains, in a graph of torch.compile. In fp8 each direction has two operators:

    quantize           x, or its transpose in backward: a graph quantizes it once for all layers that read it
    linear             weight     -> quantized -> y
    linear_backward    dy, weight -> quantized -> dx, dw

The last two are one native call each, because the host pays for each operator. In 16 bits, and for a weight that was
gathered in fp8, a graph has the ops of the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn import frozen_linear, steps, trained_steps
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import BF16, RECIPES, Cast
from stoneware.nn.steps import rows_of
from stoneware.ops import registration
from stoneware.ops.matmul.api import matmul
from stoneware.quantizing.api import quantize
from stoneware.tuning import policy


def forward(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., n] of x [..., k] and a weight [n, k]."""
    if recipe == BF16 or isinstance(weight, GatheredWeight):
        return forward_by_ops(recipe, x, weight, bias)
    y = _linear(weight, *_quantized(x, RECIPES[recipe].forward[0]), bias, recipe)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def forward_by_ops(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`forward` with a call of an op for each step."""
    if recipe == BF16:
        return matmul(x, weight.t(), bias)
    if isinstance(weight, GatheredWeight):
        (y,) = frozen_linear.FORWARD[recipe].run(x, weight.quantized, weight.scale, bias)
    else:
        (y,) = trained_steps.FORWARD[recipe].run(x, weight, bias)
    return y


def backward(recipe: str, dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None) -> list[torch.Tensor]:
    """dx, if there is a weight, and dw, if there is an x."""
    if recipe == BF16:
        tensors = [tensor for tensor in (dy, x, weight) if tensor is not None]
        return trained_steps.BACKWARD[recipe, weight is not None, x is not None].run(*tensors)
    of_x: list[torch.Tensor] = []
    if x is not None:
        cast = RECIPES[recipe].grad_weight
        of_x = [x] if cast is None else [*_quantized(x, cast[1], transpose=True)]
    results: list[torch.Tensor] = _linear_backward(dy, weight, of_x, recipe)
    return results


def _quantized(x: torch.Tensor, cast: Cast, *, transpose: bool = False) -> tuple[torch.Tensor, ...]:
    return quantize(rows_of(x), cast.scales, transpose=transpose, dtype=cast.dtype, power_of_two=cast.power_of_two)


@functools.cache
def _native_forward(recipe: str) -> Callable[..., torch.Tensor]:
    rest = trained_steps.forward_steps_of_x8(recipe)
    return steps.native_call(rest, lambda *tensors: rest.run(*tensors)[0], optional=("bias",))


def _run_forward(
    weight: torch.Tensor, x8: torch.Tensor, scale_x: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    y: torch.Tensor = policy.run_in(None, _native_forward(recipe), weight, x8, scale_x, bias)
    return y


def _run_backward(
    dy: torch.Tensor, weight: torch.Tensor | None, of_x: list[torch.Tensor], recipe: str
) -> list[torch.Tensor]:
    tensors = [dy, *of_x, *([] if weight is None else [weight])]
    call = trained_steps.native_backward(recipe, weight is not None, bool(of_x), shares=False, has_x8=len(of_x) > 1)
    results = policy.run_in(None, call, *tensors)
    return [*results] if isinstance(results, tuple) else [results]


def _fake_forward(weight: torch.Tensor, x8: torch.Tensor, *others: Any) -> torch.Tensor:
    return weight.new_empty((x8.shape[0], weight.shape[0]))


def _fake_backward(
    dy: torch.Tensor, weight: torch.Tensor | None, of_x: list[torch.Tensor], recipe: str
) -> list[torch.Tensor]:
    dx = [] if weight is None else [dy.new_empty((*dy.shape[:-1], weight.shape[1]))]
    if not of_x:
        return dx
    num_columns = of_x[0].shape[-1] if len(of_x) == 1 else of_x[0].shape[0]
    return [*dx, dy.new_empty((dy.shape[-1], num_columns))]


_linear = registration.define(
    "linear(Tensor weight, Tensor x8, Tensor scale_x, Tensor? bias, str recipe) -> Tensor",
    ["weight", "x8", "scale_x", "bias"],
    _run_forward,
    _fake_forward,
)
_linear_backward = registration.define(
    "linear_backward(Tensor dy, Tensor? weight, Tensor[] of_x, str recipe) -> Tensor[]",
    ["dy", "weight"],
    _run_backward,
    _fake_backward,
)
