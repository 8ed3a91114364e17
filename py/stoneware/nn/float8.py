"""The product of a linear layer in fp8, with its gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoneware.nn import frozen_product, trained_product
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import BLOCK, RECIPES, UNIT, Cast, Recipe, check_is_built
from stoneware.ops.backward import in_state_of_call
from stoneware.ops.matmul.api import matmul
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize
from stoneware.tuning import policy


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> torch.Tensor:
    """x @ weight.t() + bias with operands in fp8, and its gradients likewise.

    Args:
      x: [..., k], bfloat16, float16 or float32.
      weight: [n, k] of that dtype.
      bias: [n] of that dtype, or None.
      recipe: a name of `stoneware.nn.recipes`.

    Returns:
      [..., n] of that dtype.

    Raises:
      BackwardNotBuiltError: a gradient would be needed that this installation was built without.
    """
    if not torch.is_grad_enabled():
        # Not _Linear, for which an input needs a gradient even under no_grad.
        if torch.compiler.is_dynamo_compiling():
            return _forward(recipe, x, weight, bias)
        return _chained_forward(recipe, False, False)(x, weight, bias)
    needs_bias = bias is not None and bias.requires_grad
    check_is_built(recipe, x.dtype, x.requires_grad, weight.requires_grad, needs_bias)
    return _Linear.apply(x, weight, bias, recipe)


class _Linear(torch.autograd.Function):
    """Saves x and weight as they came: their casts in backward are along the other dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if torch.compiler.is_dynamo_compiling():
            found = _forward(recipe, x, weight, bias)
        else:
            ctx.state = policy.state()
            found = policy.run_in(None, _chained_forward(recipe, needs_x, needs_weight), x, weight, bias)
        found_of: list[torch.Tensor]
        y, *found_of = found if isinstance(found, tuple) else (found,)
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            found_of.pop(0) if found_of and needs_weight else None,
            found_of.pop(0) if found_of and needs_x else None,
        )
        ctx.recipe = recipe
        return y

    @staticmethod
    @once_differentiable
    @in_state_of_call
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, found_of_x, found_of_weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradient = gradient.contiguous()
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            grad_x, grad_weight = _gradients(ctx.recipe, gradient, x, weight, found_of_x, found_of_weight)
        if needs_bias:
            grad_bias = _rows(gradient).sum(0, dtype=torch.float32).to(gradient.dtype)
        return grad_x, grad_weight, grad_bias, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y, as calls of ops."""
    x_cast, weight_cast = RECIPES[recipe].forward
    if isinstance(weight, GatheredWeight):
        weight_operand = weight.quantized, weight.scale
    else:
        weight_operand = _cast(weight, weight_cast)
    y = scaled_mm(*_operands(_cast(_rows(x), x_cast), weight_operand), bias, x.dtype, use_fast_accum=True)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@functools.cache
def _chained_forward(recipe: str, needs_x: bool, needs_weight: bool) -> Any:
    return trained_product.forward(recipe, needs_x, needs_weight, functools.partial(_forward, recipe))


def _gradients(
    recipe: str,
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    found_of_x: torch.Tensor | None,
    found_of_weight: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, if there is a weight, and of the weight, if there is an x."""
    needs_x, needs_weight = weight is not None, x is not None
    given = [one for one in (found_of_weight, found_of_x) if one is not None]
    is_found = len(given) == (needs_x + needs_weight if trained_product.is_shared(recipe) else 0)
    if (
        torch.compiler.is_dynamo_compiling()
        or not is_found
        or not trained_product.is_chained(recipe, gradient, needs_weight)
    ):
        return _gradients_by_ops(recipe, gradient, x, weight)

    found = _chained_gradients(recipe, needs_x, needs_weight)(
        gradient, *(one for one in (weight, x) if one is not None), *given
    )
    if needs_x and needs_weight:
        return found
    return (found, None) if needs_x else (None, found)


@functools.cache
def _chained_gradients(recipe: str, needs_x: bool, needs_weight: bool) -> Any:
    def slow(gradient: torch.Tensor, *tensors: torch.Tensor) -> Any:
        operands = iter(tensors)
        weight = next(operands) if needs_x else None
        x = next(operands) if needs_weight else None
        found = [one for one in _gradients_by_ops(recipe, gradient, x, weight) if one is not None]
        return tuple(found) if len(found) > 1 else found[0]

    return trained_product.backward(recipe, needs_x, needs_weight, slow)


def _gradients_by_ops(
    name: str, gradient: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    recipe, rows = RECIPES[name], _rows(gradient)
    both = _both_casts(rows, weight, recipe) if x is not None and weight is not None else None
    by_rows, by_columns = both or (None, None)
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = _grad_input(rows, weight, recipe.grad_input, by_rows)
        grad_x = grad_x.reshape(*gradient.shape[:-1], weight.shape[1])
    if x is not None:
        grad_weight = _grad_weight(rows, _rows(x), recipe.grad_weight, by_columns)
    return grad_x, grad_weight


Operand = tuple[torch.Tensor, torch.Tensor]
"""fp8 values and their scales."""


def _both_casts(gradient: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> tuple[Operand, Operand] | None:
    """The gradient and its transpose in fp8, by one call, where both products take the same cast of it."""
    casts = [one and one[0] for one in (recipe.grad_input, recipe.grad_weight)]
    num_rows = gradient.shape[0]
    if (
        casts[0] is None
        or casts[0] != casts[1]
        or not num_rows
        or num_rows % UNIT
        or isinstance(weight, GatheredWeight)
    ):
        return None
    values, scale, values_t, scale_t = quantize(
        gradient, casts[0].scales, transpose="both", dtype=casts[0].dtype, power_of_two=casts[0].power_of_two
    )
    return (values, scale), (values_t, scale_t)


def _grad_input(
    gradient: torch.Tensor, weight: torch.Tensor, casts: tuple[Cast, Cast] | None, operand: Operand | None
) -> torch.Tensor:
    """gradient [m, n] @ weight [n, k]; `operand` is the gradient in fp8, if it is known."""
    assert casts is not None, "every recipe has fp8 products for dx"
    if isinstance(weight, GatheredWeight):
        return grad_input_of_quantized(gradient, weight.quantized, weight.scale, casts[0])
    operands = _operands(operand or _cast(gradient, casts[0]), _cast(weight, casts[1], transpose=True))
    return scaled_mm(*operands, out_dtype=gradient.dtype, use_fast_accum=False)


def grad_input_of_quantized(
    gradient: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, cast: Cast
) -> torch.Tensor:
    """gradient [..., n] @ weight [n, k], of a weight that is fp8 already, with the scales of its forward product.

    Args:
      gradient: in 16 or 32 bits.
      values, scale: the weight, as `sw.quantize` gives it.
      cast: of the gradient.
    """
    is_square = scale.ndim == 2 and scale.shape[1] > 1
    if is_square or not gradient.numel() or torch.compiler.is_dynamo_compiling():
        return _grad_input_of_quantized(cast, gradient, values, scale)
    slow = _grad_input_slow(cast)
    return frozen_product.grad_input(cast, scale.ndim == 2, slow)(gradient, values, scale)


@functools.cache
def _grad_input_slow(cast: Cast) -> Any:
    return functools.partial(_grad_input_of_quantized, cast)


def _grad_input_of_quantized(
    cast: Cast, gradient: torch.Tensor, values: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    rows, scale_t = _rows(gradient), scale
    if cast.scales == "block":
        scale_t = scale.t().contiguous()
    elif scale.ndim == 2:
        # A scale of the weight's rows is along the summed dimension, so it goes into the gradient, relative to the
        # largest, lest float16 overflows.
        largest = scale.amax(0)
        scale_t = largest.expand(values.shape[1], 1).contiguous()
        rows = rows * (scale / largest).t().to(rows.dtype)
    operands = _operands(_cast(rows, cast), (values.t().contiguous(), scale_t))
    grad_x = scaled_mm(*operands, out_dtype=gradient.dtype, use_fast_accum=False)
    return grad_x.reshape(*gradient.shape[:-1], values.shape[1])


def _grad_weight(
    gradient: torch.Tensor, x: torch.Tensor, casts: tuple[Cast, Cast] | None, operand: Operand | None
) -> torch.Tensor:
    """gradient [m, n]^T @ x [m, k]; `operand` is the transpose of the gradient in fp8, if it is known."""
    dtype = gradient.dtype
    if casts is None:
        # Parameters in 32 bits get a sum in 32 bits of products of 16.
        gradient, x = (one.bfloat16() if one.dtype == torch.float32 else one for one in (gradient, x))
        return matmul(gradient.t(), x, out_dtype=dtype)
    if not gradient.shape[0]:
        return gradient.new_zeros(gradient.shape[1], x.shape[1])
    padding = -gradient.shape[0] % (BLOCK if casts[0].scales == "block" else UNIT)
    if padding:
        gradient, x = (torch.nn.functional.pad(one, (0, 0, 0, padding)) for one in (gradient, x))
    operands = _operands(operand or _cast(gradient, casts[0], transpose=True), _cast(x, casts[1], transpose=True))
    return scaled_mm(*operands, out_dtype=gradient.dtype, use_fast_accum=False)


def _cast(x: torch.Tensor, cast: Cast, *, transpose: bool = False) -> Operand:
    values, scale = quantize(x, cast.scales, transpose=transpose, dtype=cast.dtype, power_of_two=cast.power_of_two)
    return values, scale


def _operands(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `scaled_mm`, from casts of a [m, k] and of b [n, k]."""
    return a[0], b[0].t(), a[1], b[1].t() if b[1].ndim == 2 else b[1]
