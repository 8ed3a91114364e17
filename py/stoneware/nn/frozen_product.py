"""What layers with frozen fp8 weights compute, each as one native call.

A norm leaves its result in fp8 on the result itself, `attach`, where the layers that take it look first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from stoneware.nn.arguments import FLOATS, check_x
from stoneware.nn.native_chain import (
    Call,
    Described,
    Step,
    chain,
    dense,
    has_partial,
    like,
    of_product,
    quantizing_step,
    rows_of,
    scaled_mm_step,
)
from stoneware.nn.recipes import RECIPES, Cast
from stoneware.ops.scaled_mm.api import scaled_mm
from stoneware.quantizing import fused

_ATTACHED = "_stoneware_fp8"


def attach(y: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Keeps y in fp8, with scales of its rows, as long as y lives and is not changed."""
    setattr(y, _ATTACHED, (values, scale, y._version))


def attached(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(values, scale) of x as it is now, or None."""
    found = getattr(x, _ATTACHED, None)
    return None if found is None or found[2] != x._version else found[:2]


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for an x that does not fit a frozen layer."""
    check_x(x, weight.shape[1], FLOATS if bias is None else (bias.dtype,))


@functools.cache
def linear(recipe: str, slow: Call) -> Call:
    """call(x, weight, scale, bias) -> y for layers of a recipe.

    Args:
      recipe: a name of RECIPES.
      slow: (x, weight, scale, bias, recipe) -> y, for what a plan alone cannot do: gradients, traces, torch
        dispatch modes.
    """
    cast = RECIPES[recipe].forward[0]
    between = ("x8", "scale_x", "amax_x")[: 2 + has_partial(cast)]

    def make(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Any:
        check(x, weight, bias)
        rows = rows_of(x)
        step, outputs = quantizing_step(cast, rows, ("x.rows", *between))
        x8, scale_x = (like(one, x.device) for one in outputs[:2])
        names = ("x8", "scale_x", "weight", "scale", "bias", "y")
        product = scaled_mm_step(x8, weight, scale_x, scale, bias, x.dtype, names)
        # A view of x whose rows are not one after another was copied above.
        return [step, product], x.device, [of_product(x, weight), *outputs], rows.data_ptr() == x.data_ptr()

    return chain(
        ("x", "weight", "scale", "bias"), ("y", *between), make, lambda *tensors: slow(*tensors, recipe),
        optional=("bias",),
    )  # fmt: skip


@functools.cache
def grad_input(cast: Cast, has_row_scales: bool, slow: Call) -> Call:
    """call(dy, weight, scale) -> dx, of a weight [n, k] in fp8 with the scales of its forward product.

    The weight is transposed for the time of the call. A scale of its rows is along the summed dimension, so it
    goes into dy.

    Args:
      cast: of dy.
      has_row_scales: whether the weight's scales are of its rows, [n, 1], or the whole has one, [1].
      slow: the same for calls that are more than their plans.
    """
    names = ("dy8", "scale_dy", "amax_dy")[: 2 + has_partial(cast)]

    def make(dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        rows = rows_of(dy)
        step: Step
        if has_row_scales:
            outputs = [dense(rows.shape, cast.dtype), dense((rows.shape[0], 1), torch.float32)]
            step = fused.scaled_rows_plan(rows, scale, cast.power_of_two), ("dy.rows", "scale", *names)
        else:
            step, outputs = quantizing_step(cast, rows, ("dy.rows", *names))
        n, k = weight.shape
        transposed = [dense((k, n), weight.dtype), dense((k, 1), torch.float32)]
        dy8, scale_dy, weight_t8, ones = (like(one, dy.device) for one in (*outputs[:2], *transposed))
        of_scale, scale_t = ("ones", ones) if has_row_scales else ("scale", scale)
        product = scaled_mm_step(
            dy8, weight_t8, scale_dy, scale_t, None, dy.dtype,
            ("dy8", "scale_dy", "weight_t8", of_scale, "none", "dx"), use_fast_accum=False,
        )  # fmt: skip
        steps = [step, (fused.transpose_plan(weight), ("weight", "weight_t8", "ones")), product]
        dx = dense((*dy.shape[:-1], k), dy.dtype)
        return steps, dy.device, [dx, *outputs, *transposed], rows.data_ptr() == dy.data_ptr()

    return chain(("dy", "weight", "scale"), ("dx", *names, "weight_t8", "ones"), make, slow)


@functools.cache
def linear_of_quantized(dtype: torch.dtype) -> Call:
    """call(x8, scale_x, weight, scale, bias) -> y of this dtype, for rowwise layers."""

    def make(
        x8: torch.Tensor, scale_x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> Any:
        names = ("x8", "scale_x", "weight", "scale", "bias", "y")
        product = scaled_mm_step(rows_of(x8), weight, rows_of(scale_x), scale, bias, dtype, names)
        return [product], x8.device, [of_product(x8, weight, dtype)], True

    def slow(x8: torch.Tensor, scale_x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> Any:
        y = scaled_mm(rows_of(x8), weight.t(), rows_of(scale_x), scale.t(), bias, dtype)
        return y.reshape(*x8.shape[:-1], weight.shape[0])

    return chain(("x8", "scale_x", "weight", "scale", "bias"), ("y",), make, slow, optional=("bias",))


@functools.cache
def swiglu(slow: Call) -> Call:
    """call(x, gate_up, its scale, down, its scale) -> y for rowwise layers; `slow` computes the same."""

    def make(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        check(x, weights[0], None)
        rows = rows_of(x)
        step, outputs = quantizing_step(_CAST, rows, ("x.rows", "x8", "scale_x"))
        x8, scale_x = (like(one, x.device) for one in outputs)
        steps, described = _swiglu(x8, scale_x, x.dtype, *weights)
        is_direct = rows.data_ptr() == x.data_ptr()
        return [step, *steps], x.device, [of_product(x, weights[2]), *outputs, *described], is_direct

    return chain(("x", *_WEIGHTS), ("y", "x8", "scale_x", *_BETWEEN), make, slow)


@functools.cache
def swiglu_of_quantized(dtype: torch.dtype, slow: Call) -> Call:
    """call(x8, scale_x, gate_up, its scale, down, its scale) -> y of this dtype."""

    def make(x8: torch.Tensor, scale_x: torch.Tensor, *weights: torch.Tensor) -> Any:
        steps, described = _swiglu(rows_of(x8), rows_of(scale_x), dtype, *weights)
        return steps, x8.device, [of_product(x8, weights[2], dtype), *described], True

    return chain(("x8", "scale_x", *_WEIGHTS), ("y", *_BETWEEN), make, slow)


@functools.cache
def rms_norm(epsilon: float, slow: Call) -> Call:
    """call(x, weight) -> (y, y8, scale); `slow` gives None for the last two."""

    def make(x: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = rows_of(x)
        plan = fused.rms_norm_plan(rows, weight, epsilon, _CAST.power_of_two)
        shape = tuple(x.shape)
        described = [dense(shape, x.dtype), dense(shape, _CAST.dtype), dense((*shape[:-1], 1), torch.float32)]
        return [(plan, ("x.rows", "weight", "y.rows", "y8.rows", "scale.rows"))], x.device, described, (
            rows.data_ptr() == x.data_ptr()
        )  # fmt: skip

    return chain(("x", "weight"), ("y", "y8", "scale"), make, slow, num_results=3)


_CAST = RECIPES["rowwise"].forward[0]

_WEIGHTS = ("gate_up", "scale_gate_up", "down", "scale_down")

_BETWEEN = ("z", "h8", "scale_h")


def _swiglu(
    x8: torch.Tensor, scale_x: torch.Tensor, dtype: torch.dtype, *weights: torch.Tensor
) -> tuple[list[Step], list[Described]]:
    """The steps from x8 on, and what is between them."""
    gate_up, scale_gate_up, down, scale_down = weights
    m, width = x8.shape[0], down.shape[1]
    described = [dense((m, 2 * width), dtype), dense((m, width), _CAST.dtype), dense((m, 1), torch.float32)]
    z, h8, scale_h = (like(one, x8.device) for one in described)
    to_z = ("x8", "scale_x", "gate_up", "scale_gate_up", "none", "z")
    to_y = ("h8", "scale_h", "down", "scale_down", "none", "y")
    steps: list[Step] = [
        scaled_mm_step(x8, gate_up, scale_x, scale_gate_up, None, dtype, to_z),
        (fused.silu_mul_plan(z, _CAST.power_of_two), _BETWEEN),
        scaled_mm_step(h8, down, scale_h, scale_down, None, dtype, to_y),
    ]
    return steps, described
