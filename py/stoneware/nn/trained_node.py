"""What the nodes of autograd that train several layers as one have in common: `trained_swiglu`, `trained_siblings`.

The weights of layers with the same input are one fp8 operand with scales of rows. Weights that were gathered in fp8 are
joined in forward, and in backward as they are transposed; they are not quantized again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.nn import steps
from stoneware.nn.arguments import BITS_16, check_x
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import RECIPES, UNIT, why_not
from stoneware.nn.steps import Step, Steps
from stoneware.ops import native_call, tensor_checks
from stoneware.quantizing import kernels

RECIPE = "rowwise"
"""The recipe whose layers are trained as one node."""

CAST = RECIPES[RECIPE].forward[0]
"""Of every operand."""


def fits(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether a node may compute layers with these weights, which all need gradients, for x or what follows from it."""
    if not _fit(x, weights) or not torch.is_grad_enabled() or not all(weight.requires_grad for weight in weights):
        return False
    device = tensor_checks.check_one_device([("x", x)])
    return device.kind == "cpu" or all(kernels.why_not_joined([weight], device) is None for weight in weights)


def _fit(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    m = x.numel() // x.shape[-1]
    has_rows = x.dtype in BITS_16 and m > 0 and m % UNIT == 0
    return has_rows and all(why_not(RECIPE, *weight.shape) is None for weight in weights)


def are_gathered(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether all of these weights were gathered in fp8, and need gradients in x's dtype."""
    return torch.is_grad_enabled() and all(
        isinstance(weight, GatheredWeight) and weight.requires_grad and weight.dtype == x.dtype for weight in weights
    )


def kind_lookup(make: Callable[..., Any], most: int, num_others: int) -> Callable[..., Any]:
    """find(x, weights, *others) -> make(x, fp8 values of the weights, *others), which is kept for each kind of call.

    The result is None if the layers must be called one by one: a node cannot compute them, a weight was not gathered in
    fp8, or the call is unusual (a torch dispatch mode, a subclass of torch.Tensor).

    Args:
      make: makes what is known of a kind of call.
      most: weights of a call.
      num_others: tensors behind the weights, which may be None.
    """

    def plan(x: torch.Tensor, *tensors: Any) -> tuple[Any, ...]:
        values = [tensor for tensor in tensors[:most] if tensor is not None]
        check_x(x, values[0].shape[1], (x.dtype,))
        kind = make(x, values, *tensors[most:-1]) if _fit(x, values) else None
        return native_call.Direct(lambda: kind, ()), native_call.is_kept(), x.device, (_NOTHING,)

    num_tensors = 2 + most + num_others
    fast, _ = native_call.build(
        plan, lambda *tensors: None, num_tensors=num_tensors, outs=[num_tensors - 1], optional=range(2, num_tensors),
        aligned=[], is_layer=True, is_cast=True,
    )  # fmt: skip

    def find(x: torch.Tensor, weights: Sequence[Any], *others: torch.Tensor | None) -> Any:
        if fast is None or not are_gathered(x, weights):
            return None
        absent = [None] * (most - len(weights))
        return fast.call(x, *(weight.quantized for weight in weights), *absent, *others, None)

    return find


_NOTHING = native_call.dense((1,), torch.float32)
"""The result of a call that allocates none."""


def forward_operands(weights: Sequence[Any]) -> Sequence[torch.Tensor]:
    """What forward takes of weights with the same input: these, or (values, scales) if they were gathered in fp8."""
    if not isinstance(weights[0], GatheredWeight):
        return weights
    return steps.join([weight.quantized for weight in weights]), steps.join([weight.scale for weight in weights])


def backward_operands(weights: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The same for backward, where a step transposes the values: (*values, scales)."""
    if not isinstance(weights[0], GatheredWeight):
        return weights
    return *(weight.quantized for weight in weights), steps.join([weight.scale for weight in weights])


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
