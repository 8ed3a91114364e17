"""The matmuls of a linear layer that trains in fp8, each direction as one native call.

    forward    x, weight     -> quantized -> y
    backward   dy, weight, x -> quantized, transposed where the matmul needs it -> dx, dw

Scales of a whole tensor need its largest element first, and those of columns the largest of each. Forward returns
these reductions of x and of the weight with y, so that backward need not read the tensors once more.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from stoneware.nn import frozen_linear, steps
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import RECIPES, UNIT, Cast, check_is_built
from stoneware.nn.steps import Call, Step, Steps, rows_of
from stoneware.ops.backward import in_state_of_call
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
            return _forward_by_ops(recipe, x, weight, bias)
        y: torch.Tensor = _native_forward(recipe, False, False)(x, weight, bias)
        return y
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
        # Rows are the summed dimension of dw: they are padded with zeros, also if there are 0 rows.
        num_rows = dy.numel() // dy.shape[-1]
        if padding := -num_rows % UNIT if num_rows else UNIT:
            dx = None if weight is None else _gradients(recipe, dy, None, weight, shared[-1:])[0]
            dy, x = (torch.nn.functional.pad(rows_of(one), (0, 0, 0, padding)) for one in (dy, x))
            return dx, _gradients(recipe, dy, x, None, [])[1]
    tensors = [one for one in (dy, x, weight) if one is not None]
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
def _native_forward(recipe: str, needs_x: bool, needs_weight: bool) -> Call:
    """call(x, weight, bias) -> y, or (y, *reductions) if `backward` can use them: of x for dw, of the weight for dx.

    Unusual calls return y alone.
    """
    shares = _shares(recipe)
    listed = _forward(recipe, shares and needs_weight, shares and needs_x)
    return steps.native_call(listed, functools.partial(_forward_by_ops, recipe), optional=("bias",))


@functools.cache
def _native_backward(recipe: str, needs_x: bool, needs_weight: bool, shares: bool) -> Call:
    """call(dy, *x, *weight, *reductions) -> dx, dw, or both as a tuple.

    x and its reduction come if `needs_weight`, those of the weight if `needs_x`; reductions only if `shares`.
    """

    def slow(*tensors: torch.Tensor) -> Any:
        results = BACKWARD[recipe, needs_x, needs_weight].run(*tensors)
        return tuple(results) if len(results) > 1 else results[0]

    return steps.native_call(_backward(recipe, needs_x, needs_weight, shares), slow)


def _shares(recipe: str) -> bool:
    """Whether forward and backward use the same cast of x and of the weight, which needs a reduction."""
    listed = RECIPES[recipe]
    casts = {pair and pair[1] for pair in (listed.forward, listed.grad_input, listed.grad_weight)}
    return len(casts) == 1 and listed.forward[1].scales in ("tensor", "row")


def _forward(recipe: str, shares_x: bool, shares_weight: bool) -> Steps:
    names, shares, casts = ("x", "weight"), (shares_x, shares_weight), RECIPES[recipe].forward
    quantized = [steps.quantize(name, cast, shares=is_shared) for name, cast, is_shared in zip(names, casts, shares)]
    reductions = [steps.shared(name, cast) for name, cast, is_shared in zip(names, casts, shares) if is_shared]
    multiply = steps.scaled_mm("x", "weight", "y", bias="bias")
    return Steps(("x", "weight", "bias"), ("y", *reductions), (*quantized, multiply), rows=("y",))


def _backward(recipe: str, needs_x: bool, needs_weight: bool, shares: bool) -> Steps:
    grad_input, grad_weight = RECIPES[recipe].grad_input, RECIPES[recipe].grad_weight
    is_fp8 = needs_weight and grad_weight is not None
    of_dy: list[tuple[Cast, bool | str]] = []
    if needs_x:
        of_dy.append((grad_input[0], False))
    if needs_weight and grad_weight is not None:
        of_dy.append((grad_weight[0], True))
    if len(of_dy) == 2 and of_dy[0][0] == of_dy[1][0]:
        of_dy = [(of_dy[0][0], "both")]
    listed: list[Step] = [steps.quantize("dy", cast, transpose=transpose) for cast, transpose in of_dy]
    reductions: list[str] = []
    if needs_x:
        listed.append(steps.quantize("weight", grad_input[1], transpose=True, shares=shares))
        reductions.append(steps.shared("weight", grad_input[1]))
    if needs_weight and grad_weight is not None:
        listed.append(steps.quantize("x", grad_weight[1], transpose=True, shares=shares))
        reductions.insert(0, steps.shared("x", grad_weight[1]))
    if needs_x:
        listed.append(steps.scaled_mm("dy", "weight_t", "dx", use_fast_accum=False))
    if is_fp8:
        listed.append(steps.scaled_mm("dy_t", "x_t", "dw", use_fast_accum=False))
    elif needs_weight:
        listed.append(Step(steps.Matmul(), ("dy", "x", steps.NONE), ("dw",)))
    return Steps(
        ("dy", *["x"] * needs_weight, *["weight"] * needs_x, *(reductions if shares else ())),
        (*["dx"] * needs_x, *["dw"] * needs_weight),
        tuple(listed),
        rows=("dx",) if needs_x else (),
    )


FORWARD = {name: _forward(name, False, False) for name in RECIPES}
BACKWARD = {
    (name, needs_x, needs_weight): _backward(name, needs_x, needs_weight, False)
    for name in RECIPES
    for needs_x, needs_weight in ((True, False), (False, True), (True, True))
}
"""(recipe, whether dx and dw are needed) -> steps."""
