"""x @ weight.t() + bias with a frozen fp8 weight, and the gradient of x; the weight has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stoneware.nn import steps
from stoneware.nn.arguments import FLOATS, check_no_transform, check_x
from stoneware.nn.recipes import RECIPES, Cast, check_is_built
from stoneware.nn.steps import Op, Step, Steps, rows_of
from stoneware.ops.backward import differentiable_once, in_state_of_call
from stoneware.ops.native_call import Output, dense
from stoneware.quantizing import fused
from stoneware.tuning import policy


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for an x that does not fit a frozen layer."""
    check_x(x, weight.shape[1], FLOATS if bias is None else (bias.dtype,))


def linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: str
) -> torch.Tensor:
    """y as calls of ops, for autograd, for traces and for torch dispatch modes.

    Args:
      x: [..., k] in 16 or 32 bits.
      weight, scale: [n, k], as `sw.quantize` returns them for the recipe.
      bias: [n] of x's dtype, or None.
      recipe: a name of RECIPES.
    """
    check(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        check_no_transform()
        check_is_built(recipe, x.dtype, x.requires_grad, False, bias is not None and bias.requires_grad)
        return _Linear.apply(x, weight, scale, bias, recipe)
    (y,) = FORWARD[recipe].run(x, weight, scale, bias)
    return y


@functools.cache
def native_linear(recipe: str, has_fp8: bool, shares_x: bool = False) -> Callable[..., Any]:
    """call(x, weight, scale, bias) -> y as one native call, or as `linear`.

    Args:
      recipe: a name of RECIPES.
      has_fp8: whether x in fp8 and its scales follow bias in the calls; only for "rowwise".
      shares_x: whether the call returns (y, the reduction of x that backward can use); unusual calls return y alone.
    """
    return steps.native_call(
        _forward(recipe, has_fp8, shares_x),
        lambda x, weight, scale, bias, *x_fp8: linear(x, weight, scale, bias, recipe),
        optional=("bias",),
        check=lambda x, weight, scale, bias, *x_fp8: check(x, weight, bias),
    )


def grad_input(
    dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, recipe: str, *, is_trained: bool = False
) -> torch.Tensor:
    """dx = dy [..., n] @ weight [n, k], with the scales of the forward matmul.

    The weight is transposed during the call.

    Args:
      dy: in 16 or 32 bits.
      weight, scale, recipe: as for `linear`.
      is_trained: whether dy has the cast of a layer that trains; otherwise that of x.
    """
    if torch.compiler.is_dynamo_compiling():
        (dx,) = GRAD_INPUT[recipe, is_trained].run(dy, weight, scale)
        return dx
    native: torch.Tensor = native_grad_input(recipe, is_trained)(dy, weight, scale)
    return native


@functools.cache
def native_grad_input(recipe: str, is_trained: bool) -> Callable[..., Any]:
    """call(dy, weight, scale) -> dx as one native call."""
    gradient = GRAD_INPUT[recipe, is_trained]
    return steps.native_call(gradient, lambda *tensors: gradient.run(*tensors)[0])


def input_steps(cast: Cast, has_fp8: bool, shares: bool = False) -> tuple[tuple[str, ...], tuple[Step, ...]]:
    """(inputs, steps) of a layer that reads x in fp8: the calls have it, or a step quantizes x."""
    return (("x8", "scale_x"), ()) if has_fp8 else ((), (steps.quantize("x", cast, shares=shares),))


def _forward(recipe: str, has_fp8: bool, shares_x: bool = False) -> Steps:
    cast = RECIPES[recipe].forward[0]
    x_fp8, quantized = input_steps(cast, has_fp8, shares_x)
    return Steps(
        ("x", "weight8", "scale_weight", "bias", *x_fp8),
        ("y", *[steps.shared("x", cast)] * shares_x),
        (*quantized, steps.scaled_mm("x", "weight", "y", bias="bias")),
        rows=("y",),
    )


@dataclass(frozen=True)
class Transpose(Op):
    """The dense transpose of the rows of fp8 matrices [n, k], and ones [k, 1] as its scales if the other operand has
    the real ones."""

    def __call__(self, dtype: torch.dtype, *parts: torch.Tensor) -> Sequence[torch.Tensor]:
        x8 = steps.join(parts)
        return x8.t().contiguous(), torch.ones(x8.shape[1], 1, device=x8.device)

    def plan(self, dtype: torch.dtype, *parts: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return fused.transpose_plan(*parts), [dense((k, n), parts[0].dtype), dense((k, 1), torch.float32)]


@dataclass(frozen=True)
class TransposeScales(Op):
    """The transpose of scales of blocks, dense."""

    def __call__(self, dtype: torch.dtype, scale: torch.Tensor) -> Sequence[torch.Tensor]:
        return (scale.t().contiguous(),)

    def plan(self, dtype: torch.dtype, scale: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        def run(scale: torch.Tensor, transposed: torch.Tensor) -> None:
            transposed.copy_(scale.t())

        return run, [dense(scale.t().shape, scale.dtype)]


@dataclass(frozen=True)
class ScaleRows(Op):
    """x [..., k] times factors [k, 1], quantized with a scale for each row."""

    cast: Cast

    def __call__(self, dtype: torch.dtype, x: torch.Tensor, factors: torch.Tensor) -> Sequence[torch.Tensor]:
        # In x's dtype, which has kernels; relative to the largest factor, or float16 would overflow.
        largest = factors.amax(0)
        scaled = rows_of(x) * (factors / largest).t().to(x.dtype)
        values, scale = steps.quantize("x", self.cast).op(dtype, scaled)
        return values, scale * largest

    def plan(self, dtype: torch.dtype, x: torch.Tensor, factors: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        rows = rows_of(x)
        outputs = [dense(rows.shape, self.cast.dtype), dense((rows.shape[0], 1), torch.float32)]
        return fused.scaled_rows_plan(rows, factors, self.cast.power_of_two), outputs

    def arguments(self, x: torch.Tensor, *others: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.reshape(-1, x.shape[-1]), *others


def gradient_quantization(cast: Cast) -> Step:
    """The step that quantizes dy for dx."""
    if cast.scales != "row":
        return steps.quantize("dy", cast)
    # A scale of the weight's rows is along the summed dimension, so it goes into dy.
    return Step(ScaleRows(cast), ("dy", "scale_weight"), ("dy8", "scale_dy"))


def dx_steps(cast: Cast, dy: str = "dy", parts: Sequence[str] = ("weight8",)) -> tuple[Step, ...]:
    """The steps of dx = dy @ weight when dy is quantized.

    Args:
      cast: of dy.
      dy: its name.
      parts: names of the fp8 matrices that have the weight's rows.
    """
    sequence = [Step(Transpose(), tuple(parts), ("weight_t8", "ones"))]
    scale = "ones" if cast.scales == "row" else "scale_weight"
    if cast.scales == "block":
        sequence.append(Step(TransposeScales(), (scale,), ("scale_weight_t",)))
        scale = "scale_weight_t"
    return *sequence, Step(steps.ScaledMM(False), (f"{dy}8", "weight_t8", f"scale_{dy}", scale, steps.NONE), ("dx",))


def _grad_input(cast: Cast) -> Steps:
    sequence = gradient_quantization(cast), *dx_steps(cast)
    return Steps(("dy", "weight8", "scale_weight"), ("dx",), sequence, rows=("dx",))


FORWARD = {name: _forward(name, False) for name in RECIPES}
GRAD_INPUT = {
    (name, is_trained): _grad_input((recipe.grad_input if is_trained else recipe.forward)[0])
    for name, recipe in RECIPES.items()
    for is_trained in (False, True)
}
"""(recipe, `is_trained`) -> the steps of dx."""


class _Linear(torch.autograd.Function):
    """Saves only the weight, not x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: str
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.recipe = recipe
        y: torch.Tensor
        if torch.compiler.is_dynamo_compiling():
            (y,) = FORWARD[recipe].run(x, weight, scale, bias)
        else:
            ctx.state = policy.state()
            y = policy.run_in(None, native_linear(recipe, False), x, weight, scale, bias)
        return y

    @staticmethod
    @differentiable_once
    @in_state_of_call
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        needs_x, _, _, needs_bias = ctx.needs_input_grad[:4]
        dy = dy.contiguous()
        dx = grad_input(dy, weight, scale, ctx.recipe) if needs_x else None
        dbias = rows_of(dy).sum(0, dtype=torch.float32).to(dy.dtype) if needs_bias else None
        return dx, None, None, dbias, None
