"""The matmuls of a linear layer that trains in fp8, each direction as one native call.

    forward    x, weight     -> quantized -> y
    backward   dy, weight, x -> quantized, transposed where the matmul needs it -> dx, dw

A tensor scale needs the largest element of the tensor, and column scales the largest of each column. Forward returns
these reductions of x and of the weight with y, so backward need not read the tensors again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoneware.nn import frozen_linear, steps
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import RECIPES, UNIT, Cast, check_is_built
from stoneware.nn.steps import Step, Steps, rows_of
from stoneware.ops.backward import in_state_of_call
from stoneware.tuning import policy


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> torch.Tensor:
    """x @ weight.t() + bias with fp8 operands, also in its gradients.

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
        # Not _Linear: its ctx.needs_input_grad is True even under no_grad.
        if torch.compiler.is_dynamo_compiling():
            return _forward_by_ops(recipe, x, weight, bias)
        y: torch.Tensor = _native_forward(recipe, False, False)(x, weight, bias)
        return y
    needs_bias = bias is not None and bias.requires_grad
    check_is_built(recipe, x.dtype, x.requires_grad, weight.requires_grad, needs_bias)
    return _Linear.apply(x, weight, bias, recipe)


class _Linear(torch.autograd.Function):
    """Saves x and weight before their casts, because backward casts them along the other dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if torch.compiler.is_dynamo_compiling():
            results = _forward_by_ops(recipe, x, weight, bias)
        else:
            ctx.state = policy.state()
            results = policy.run_in(None, _native_forward(recipe, needs_x, needs_weight), x, weight, bias)
        shared: list[torch.Tensor]
        y, *shared = results if isinstance(results, tuple) else (results,)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, *shared)
        ctx.recipe = recipe
        return y

    @staticmethod
    @once_differentiable
    @in_state_of_call
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *shared = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = dbias = None
        if x is not None or weight is not None:
            dx, dw = _gradients(ctx.recipe, dy, x, weight, shared)
        if ctx.needs_input_grad[2]:
            dbias = rows_of(dy).sum(0, dtype=torch.float32).to(dy.dtype)
        return dx, dw, dbias, None


def _gradients(
    recipe: str, dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, shared: list[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, if there is a weight, and of the weight, if there is an x.

    Args:
      shared: the reductions of x and of the weight, if `_native_forward` returned them.
    """
    if isinstance(weight, GatheredWeight):
        dx: torch.Tensor | None = frozen_linear.grad_input(dy, weight.quantized, weight.scale, recipe, is_trained=True)
        return dx, None if x is None else _gradients(recipe, dy, x, None, [])[1]
    if x is not None and RECIPES[recipe].grad_weight is not None:
        # dw sums over the rows, which are padded with zeros; 0 rows are padded too.
        num_rows = dy.numel() // dy.shape[-1]
        if padding := -num_rows % UNIT if num_rows else UNIT:
            dx = None if weight is None else _gradients(recipe, dy, None, weight, shared[-1:])[0]
            dy, x = (torch.nn.functional.pad(rows_of(tensor), (0, 0, 0, padding)) for tensor in (dy, x))
            return dx, _gradients(recipe, dy, x, None, [])[1]
    tensors = [tensor for tensor in (dy, x, weight) if tensor is not None]
    needs = weight is not None, x is not None
    if torch.compiler.is_dynamo_compiling():
        results = BACKWARD[recipe, *needs].run(*tensors)
    else:
        results = _native_backward(recipe, *needs, bool(shared))(*tensors, *shared)
    if len(tensors) == 3:
        dx, dw = results
        return dx, dw
    (result,) = results if isinstance(results, list) else (results,)
    return (result, None) if weight is not None else (None, result)


def _forward_by_ops(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, GatheredWeight):
        (y,) = frozen_linear.FORWARD[recipe].run(x, weight.quantized, weight.scale, bias)
    else:
        (y,) = FORWARD[recipe].run(x, weight, bias)
    return y


@functools.cache
def _native_forward(recipe: str, needs_x: bool, needs_weight: bool) -> Callable[..., Any]:
    """call(x, weight, bias) -> y, or (y, *reductions) if backward can use them: of x for dw, of the weight for dx.

    Unusual calls return only y.
    """
    shares = _shares(recipe)
    forward = _forward(recipe, shares and needs_weight, shares and needs_x)
    return steps.native_call(forward, functools.partial(_forward_by_ops, recipe), optional=("bias",))


@functools.cache
def _native_backward(recipe: str, needs_x: bool, needs_weight: bool, shares: bool) -> Callable[..., Any]:
    """call(dy, *x, *weight, *reductions) -> dx, dw, or both as a tuple.

    The call has x if `needs_weight` and the weight if `needs_x`, with their reductions if `shares`.
    """

    def slow(*tensors: torch.Tensor) -> Any:
        results = BACKWARD[recipe, needs_x, needs_weight].run(*tensors)
        return tuple(results) if len(results) > 1 else results[0]

    return steps.native_call(_backward(recipe, needs_x, needs_weight, shares), slow)


def _shares(recipe: str) -> bool:
    """Whether forward and backward use the same cast of x and of the weight, which needs a reduction."""
    all_casts = RECIPES[recipe]
    casts = {pair and pair[1] for pair in (all_casts.forward, all_casts.grad_input, all_casts.grad_weight)}
    return len(casts) == 1 and all_casts.forward[1].scales in ("tensor", "row")


def _forward(recipe: str, shares_x: bool, shares_weight: bool) -> Steps:
    names, shares, casts = ("x", "weight"), (shares_x, shares_weight), RECIPES[recipe].forward
    quantized = [steps.quantize(name, cast, shares=shares_it) for name, cast, shares_it in zip(names, casts, shares)]
    reductions = [steps.shared(name, cast) for name, cast, shares_it in zip(names, casts, shares) if shares_it]
    multiply = steps.scaled_mm("x", "weight", "y", bias="bias")
    return Steps(("x", "weight", "bias"), ("y", *reductions), (*quantized, multiply), rows=("y",))


def _backward(recipe: str, needs_x: bool, needs_weight: bool, shares: bool) -> Steps:
    grad_input, grad_weight = RECIPES[recipe].grad_input, RECIPES[recipe].grad_weight
    is_fp8 = needs_weight and grad_weight is not None
    dy_casts: list[tuple[Cast, bool | str]] = []
    if needs_x:
        dy_casts.append((grad_input[0], False))
    if needs_weight and grad_weight is not None:
        dy_casts.append((grad_weight[0], True))
    if len(dy_casts) == 2 and dy_casts[0][0] == dy_casts[1][0]:
        dy_casts = [(dy_casts[0][0], "both")]
    sequence: list[Step] = [steps.quantize("dy", cast, transpose=transpose) for cast, transpose in dy_casts]
    reductions: list[str] = []
    if needs_x:
        sequence.append(steps.quantize("weight", grad_input[1], transpose=True, shares=shares))
        reductions.append(steps.shared("weight", grad_input[1]))
    if needs_weight and grad_weight is not None:
        sequence.append(steps.quantize("x", grad_weight[1], transpose=True, shares=shares))
        reductions.insert(0, steps.shared("x", grad_weight[1]))
    if needs_x:
        sequence.append(steps.scaled_mm("dy", "weight_t", "dx", use_fast_accum=False))
    if is_fp8:
        sequence.append(steps.scaled_mm("dy_t", "x_t", "dw", use_fast_accum=False))
    elif needs_weight:
        sequence.append(Step(steps.Matmul(), ("dy", "x", steps.NONE), ("dw",)))
    return Steps(
        ("dy", *["x"] * needs_weight, *["weight"] * needs_x, *(reductions if shares else ())),
        (*["dx"] * needs_x, *["dw"] * needs_weight),
        tuple(sequence),
        rows=("dx",) if needs_x else (),
    )


FORWARD = {name: _forward(name, False, False) for name in RECIPES}
BACKWARD = {
    (name, needs_x, needs_weight): _backward(name, needs_x, needs_weight, False)
    for name in RECIPES
    for needs_x, needs_weight in ((True, False), (False, True), (True, True))
}
"""(recipe, whether dx and dw are needed) -> steps."""
