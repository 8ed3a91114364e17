"""The steps of a linear layer that trains.

shares              whether backward uses a reduction of forward
forward_steps       x, weight -> y
forward_steps_of_x8 x in fp8, weight -> y
backward_steps      dy, x, weight -> dx, dw
native_backward     the same as one native call
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn import steps
from stoneware.nn.recipes import BF16, RECIPES, Cast
from stoneware.nn.steps import NONE, Matmul, Step, Steps
from stoneware.quantizing import kernels

_SMALL = 2**19
"""Elements up to which backward finds the tensor scale of an operand again: a launch reads dy for its own scale anyway,
and the host would need more time to keep the reduction than the GPU to repeat it."""


def shares(recipe: str, operand: torch.Tensor) -> bool:
    """Whether backward takes a reduction of this x or weight from forward: both directions use the same cast, which
    needs one, and the operand is not small."""
    if not _has_one_cast(recipe):
        return False
    scales, k = RECIPES[recipe].forward[1].scales, operand.shape[-1]
    if scales == "tensor":
        return operand.numel() > _SMALL
    return scales == "row" and not kernels.has_short_columns(scales, [operand.numel() // k], k)


def _has_one_cast(recipe: str) -> bool:
    if recipe == BF16:
        return False
    casts = RECIPES[recipe]
    return len({pair and pair[1] for pair in (casts.forward, casts.grad_input, casts.grad_weight)}) == 1


def forward_steps(recipe: str, shares_x: bool, shares_weight: bool) -> Steps:
    if recipe == BF16:
        return Steps(
            ("x", "weight", "bias"), ("y",), (Step(Matmul("nt"), ("x", "weight", "bias"), ("y",)),), rows=("y",)
        )
    names, shares, casts = ("x", "weight"), (shares_x, shares_weight), RECIPES[recipe].forward
    quantized = [steps.quantize(name, cast, shares=shares_it) for name, cast, shares_it in zip(names, casts, shares)]
    reductions = [steps.shared(name, cast) for name, cast, shares_it in zip(names, casts, shares) if shares_it]
    multiply = steps.scaled_mm("x", "weight", "y", bias="bias")
    return Steps(("x", "weight", "bias"), ("y", *reductions), (steps.together(*quantized), multiply), rows=("y",))


def forward_steps_of_x8(recipe: str, shares_weight: bool) -> Steps:
    """The steps of an fp8 recipe behind those that quantize x; y is a matrix."""
    cast = RECIPES[recipe].forward[1]
    sequence = (
        steps.quantize("weight", cast, shares=shares_weight), steps.scaled_mm("x", "weight", "y", bias="bias")
    )  # fmt: skip
    reductions = [steps.shared("weight", cast)] * shares_weight
    return Steps(("weight", "x8", "scale_x", "bias"), ("y", *reductions), sequence)


WGRAD = Step(Matmul("tn"), ("dy", "x", NONE), ("dw",))
"""In 16 bits."""


def backward_steps(
    recipe: str, needs_x: bool, needs_weight: bool, shares_x: bool, shares_weight: bool, *, has_x8: bool = False
) -> Steps:
    """The steps of the gradients that are needed; with `has_x8` the calls have the transpose of x in fp8, not x."""
    x_names = ("x_t8", "scale_x_t") if has_x8 else ("x",)
    inputs = ("dy", *x_names * needs_weight, *["weight"] * needs_x)
    results, rows = (*["dx"] * needs_x, *["dw"] * needs_weight), ("dx",) if needs_x else ()
    if recipe == BF16:
        dgrad = Step(Matmul("nn"), ("dy", "weight", NONE), ("dx",))
        return Steps(inputs, results, (*[dgrad] * needs_x, *[WGRAD] * needs_weight), rows=rows)
    grad_input, grad_weight = RECIPES[recipe].grad_input, RECIPES[recipe].grad_weight
    is_fp8 = needs_weight and grad_weight is not None
    dy_casts: list[tuple[Cast, bool | str]] = []
    if needs_x:
        dy_casts.append((grad_input[0], False))
    if needs_weight and grad_weight is not None:
        dy_casts.append((grad_weight[0], True))
    if len(dy_casts) == 2 and dy_casts[0][0] == dy_casts[1][0]:
        dy_casts = [(dy_casts[0][0], "both")]
    quantized = [steps.quantize("dy", cast, transpose=transpose) for cast, transpose in dy_casts]
    reductions: list[str] = []
    if needs_x:
        quantized.append(steps.quantize("weight", grad_input[1], transpose=True, shares=shares_weight))
        reductions += [steps.shared("weight", grad_input[1])] * shares_weight
    if needs_weight and grad_weight is not None and not has_x8:
        quantized.append(steps.quantize("x", grad_weight[1], transpose=True, shares=shares_x))
        reductions[:0] = [steps.shared("x", grad_weight[1])] * shares_x
    sequence = [steps.together(*quantized)] if quantized else []
    if needs_x:
        sequence.append(steps.scaled_mm("dy", "weight_t", "dx", use_fast_accum=False))
    if is_fp8:
        sequence.append(steps.scaled_mm("dy_t", "x_t", "dw", use_fast_accum=False))
    elif needs_weight:
        sequence.append(WGRAD)
    return Steps((*inputs, *reductions), results, tuple(sequence), rows=rows)


FORWARD = {name: forward_steps(name, False, False) for name in (BF16, *RECIPES)}
BACKWARD = {
    (name, needs_x, needs_weight): backward_steps(name, needs_x, needs_weight, False, False)
    for name in (BF16, *RECIPES)
    for needs_x, needs_weight in ((True, False), (False, True), (True, True))
}
"""(recipe, whether dx and dw are needed) -> steps."""


@functools.cache
def native_backward(
    recipe: str,
    needs_x: bool,
    needs_weight: bool,
    *,
    shares_x: bool = False,
    shares_weight: bool = False,
    has_x8: bool = False,
) -> Callable[..., Any]:
    """call(dy, *x, *weight, *reductions) -> dx, dw, or both as a tuple.

    The call has x, or the transpose of x in fp8 and its scales, if `needs_weight`, and the weight if `needs_x`. It has
    the reductions of x and of the weight that it shares.
    """
    by_ops = backward_steps(recipe, needs_x, needs_weight, False, False, has_x8=has_x8)

    def slow(*tensors: torch.Tensor) -> Any:
        results = by_ops.run(*tensors)
        return tuple(results) if len(results) > 1 else results[0]

    native = backward_steps(recipe, needs_x, needs_weight, shares_x, shares_weight, has_x8=has_x8)
    return steps.native_call(native, slow)
