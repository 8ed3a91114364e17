"""A linear layer that trains, in a graph of torch.compile. In fp8 it has three operators:

    quantize           x -> in fp8, and its transpose if dw is to have it
    linear             weight     -> quantized -> y, and the reduction of the weight that dx can use
    linear_backward    dy, weight -> quantized -> dx, dw

The last two are one native call each, because the host pays for each operator. Layers that need the same of one x share
its operator. If dw has fp8 operands, and the rows of x need no padding, a graph keeps the transpose for backward, not
x: it takes half the memory, and x is not read again. In 16 bits, and for a weight that was gathered in fp8, a graph has
the ops of the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.nn import frozen_linear, steps, trained_steps
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import BF16, RECIPES, Cast
from stoneware.nn.steps import rows_of
from stoneware.ops import registration
from stoneware.ops.matmul.api import matmul
from stoneware.quantizing.api import Quantization, quantize
from stoneware.tuning import policy


def forward(
    recipe: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    needs_x: bool = False,
    needs_weight: bool = False,
) -> list[torch.Tensor]:
    """y [..., n] of x [..., k] and a weight [n, k], and what `backward` takes as `kept`.

    Args:
      needs_x, needs_weight: whether backward is to give dx and, from this x without padding, dw.
    """
    if recipe == BF16 or isinstance(weight, GatheredWeight):
        return [forward_by_ops(recipe, x, weight, bias)]
    cast, of_dw = RECIPES[recipe].forward[0], RECIPES[recipe].grad_weight
    is_both = needs_weight and of_dw is not None and of_dw[1] == cast
    x8, scale_x, *of_x = _quantized(x, cast, transpose="both" if is_both else False)
    y, *of_weight = _linear(weight, x8, scale_x, bias, recipe, needs_x and trained_steps.shares(recipe, weight))
    return [y.reshape(*x.shape[:-1], weight.shape[0]), *of_x, *of_weight]


def forward_by_ops(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`forward` with a call of an op for each step."""
    if recipe == BF16:
        return matmul(x, weight.t(), bias)
    if isinstance(weight, GatheredWeight):
        (y,) = frozen_linear.FORWARD[recipe].run(x, weight.quantized, weight.scale, bias)
    else:
        (y,) = trained_steps.FORWARD[recipe].run(x, weight, bias)
    return y


def backward(
    recipe: str,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    kept: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """dx, if there is a weight, and dw, if there is an x.

    Args:
      kept: of the transpose of x, if there is an x and forward was to give it: values and scales; of the weight, if
        dx uses it: its reduction.
    """
    if recipe == BF16:
        tensors = [tensor for tensor in (dy, x, weight) if tensor is not None]
        return trained_steps.BACKWARD[recipe, weight is not None, x is not None].run(*tensors)
    of_x, of_weight = (kept[:2], kept[2:]) if len(kept) > 1 else ((), kept)
    if x is not None and not of_x:
        cast = RECIPES[recipe].grad_weight
        of_x = [x] if cast is None else _quantized(x, cast[1], transpose=True)
    results: list[torch.Tensor] = _linear_backward(dy, weight, [*of_x], [*of_weight], recipe)
    return results


def _quantized(x: torch.Tensor, cast: Cast, *, transpose: bool | str) -> tuple[torch.Tensor, ...]:
    return quantize(rows_of(x), cast.scales, transpose=transpose, dtype=cast.dtype, power_of_two=cast.power_of_two)


def _weight_quantization(recipe: str) -> Quantization:
    """How `linear` quantizes the weight if it shares."""
    cast = RECIPES[recipe].forward[1]
    return Quantization(cast.scales, False, cast.dtype, cast.power_of_two, shares=True)


@functools.cache
def _native_forward(recipe: str, shares: bool) -> Callable[..., Any]:
    """call(weight, x8, scale_x, bias) -> y, or (y, the reduction of the weight) if it `shares`."""
    by_ops = trained_steps.forward_steps_of_x8(recipe, False)

    def slow(weight: torch.Tensor, *others: torch.Tensor | None) -> Any:
        (y,) = by_ops.run(weight, *others)
        return (y, _weight_quantization(recipe).reduce(weight)) if shares else y

    return steps.native_call(trained_steps.forward_steps_of_x8(recipe, shares), slow, optional=("bias",))


def _run_forward(
    weight: torch.Tensor, x8: torch.Tensor, scale_x: torch.Tensor, bias: torch.Tensor | None, recipe: str, shares: bool
) -> list[torch.Tensor]:
    results = policy.run_in(None, _native_forward(recipe, shares), weight, x8, scale_x, bias)
    return [*results] if isinstance(results, tuple) else [results]


def _run_backward(
    dy: torch.Tensor, weight: torch.Tensor | None, of_x: list[torch.Tensor], of_weight: list[torch.Tensor], recipe: str
) -> list[torch.Tensor]:
    tensors = [dy, *of_x, *([] if weight is None else [weight]), *of_weight]
    call = trained_steps.native_backward(
        recipe, weight is not None, bool(of_x), shares_weight=bool(of_weight), has_x8=len(of_x) > 1
    )
    results = policy.run_in(None, call, *tensors)
    return [*results] if isinstance(results, tuple) else [results]


def _fake_forward(
    weight: torch.Tensor, x8: torch.Tensor, scale_x: torch.Tensor, bias: torch.Tensor | None, recipe: str, shares: bool
) -> list[torch.Tensor]:
    y = weight.new_empty((x8.shape[0], weight.shape[0]))
    if not shares:
        return [y]
    shape, strides, dtype = _weight_quantization(recipe).reduction(weight.shape, weight.device.type)
    return [y, torch.empty_strided(shape, strides, dtype=dtype, device=weight.device)]


def _fake_backward(
    dy: torch.Tensor, weight: torch.Tensor | None, of_x: list[torch.Tensor], *others: Any
) -> list[torch.Tensor]:
    dx = [] if weight is None else [dy.new_empty((*dy.shape[:-1], weight.shape[1]))]
    if not of_x:
        return dx
    num_columns = of_x[0].shape[-1] if len(of_x) == 1 else of_x[0].shape[0]
    return [*dx, dy.new_empty((dy.shape[-1], num_columns))]


_linear = registration.define(
    "linear(Tensor weight, Tensor x8, Tensor scale_x, Tensor? bias, str recipe, bool shares) -> Tensor[]",
    ["weight", "x8", "scale_x", "bias"],
    _run_forward,
    _fake_forward,
)
_linear_backward = registration.define(
    "linear_backward(Tensor dy, Tensor? weight, Tensor[] of_x, Tensor[] of_weight, str recipe) -> Tensor[]",
    ["dy", "weight"],
    _run_backward,
    _fake_backward,
)
