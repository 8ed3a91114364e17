"""The product of a linear layer in fp8, with its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import BLOCK, RECIPES, UNIT, Cast, Recipe, check_is_built
from stoneware.ops.matmul.api import matmul
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing.api import quantize


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
    if torch.is_grad_enabled():
        needs_bias = bias is not None and bias.requires_grad
        check_is_built(recipe, x.dtype, x.requires_grad, weight.requires_grad, needs_bias)
    rows = x.reshape(-1, x.shape[-1])
    return _Linear.apply(rows, weight, bias, recipe).reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """Saves x and weight as they came: their casts in backward are along the other dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.recipe = recipe
        x_cast, weight_cast = RECIPES[recipe].forward
        if isinstance(weight, GatheredWeight):
            weight_operand = weight.quantized, weight.scale
        else:
            weight_operand = _cast(weight, weight_cast)
        return scaled_mm(*_operands(_cast(x, x_cast), weight_operand), bias, x.dtype, use_fast_accum=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        recipe = RECIPES[ctx.recipe]
        gradient = gradient.contiguous()
        both = _both_casts(gradient, weight, recipe) if needs_x and needs_weight else None
        by_rows, by_columns = both or (None, None)
        return (
            _grad_input(gradient, weight, recipe.grad_input, by_rows) if needs_x else None,
            _grad_weight(gradient, x, recipe.grad_weight, by_columns) if needs_weight else None,
            gradient.sum(0, dtype=torch.float32).to(gradient.dtype) if needs_bias else None,
            None,
        )


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
        return grad_input_of_quantized(gradient, weight.quantized, weight.scale, casts)
    operands = _operands(operand or _cast(gradient, casts[0]), _cast(weight, casts[1], transpose=True))
    return scaled_mm(*operands, out_dtype=gradient.dtype, use_fast_accum=False)


def grad_input_of_quantized(
    gradient: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, casts: tuple[Cast, Cast]
) -> torch.Tensor:
    """gradient [m, n] @ weight [n, k], of a weight that is fp8 already, with the scales of its forward product.

    Args:
      gradient: in 16 or 32 bits.
      values, scale: the weight, as `sw.quantize` gives it.
      casts: of the gradient, and of the weight where it is not fp8 already.
    """
    gradient, weight_operand = _transposed(gradient, values, scale, casts[1])
    operands = _operands(_cast(gradient, casts[0]), weight_operand)
    return scaled_mm(*operands, out_dtype=gradient.dtype, use_fast_accum=False)


def _transposed(
    gradient: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, cast: Cast
) -> tuple[torch.Tensor, Operand]:
    """gradient [m, n], and the transpose of a weight [n, k] that is fp8 already, as `cast` has its scales.

    A scale of the weight's rows is along the summed dimension, so it goes into the gradient, relative to the
    largest, lest float16 overflows.
    """
    values_t = values.t().contiguous()
    if scale.ndim == 1:
        return gradient, (values_t, scale)
    if cast.scales == "block_2d":
        return gradient, (values_t, scale.t().contiguous())
    largest = scale.amax(0)
    scale_t = largest if cast.scales == "tensor" else largest.expand(values.shape[1], 1).contiguous()
    return gradient * (scale / largest).t().to(gradient.dtype), (values_t, scale_t)


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
