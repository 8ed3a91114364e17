"""What layers with frozen fp8 weights share: x as an operand, and its gradient as one native call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    quantizing_step,
    rows_of,
    scaled_mm_step,
)
from stoneware.nn.recipes import Cast
from stoneware.quantizing import fused


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises TypeError or ValueError for an x that does not fit a frozen layer."""
    check_x(x, weight.shape[1], FLOATS if bias is None else (bias.dtype,))


def names_of_operand(cast: Cast) -> tuple[str, ...]:
    """Of x in a chain: its values in fp8, their scales, and the partial amax, if there is one."""
    return ("x8", "scale_x", "amax_x")[: 2 + has_partial(cast)]


def operand(
    cast: Cast, x: torch.Tensor, x_fp8: Sequence[torch.Tensor]
) -> tuple[list[Step], torch.Tensor, torch.Tensor, list[Described], bool]:
    """x as the first operand of a chain's product.

    Args:
      cast: how x is quantized.
      x: [..., k], like that of the calls.
      x_fp8: its values in fp8 and their scales, if the calls have them.

    Returns:
      The steps that quantize it; values and scales like those of the calls; the outputs, as
      `names_of_operand` names them, none if x is fp8 already; and whether x's own memory is read.
    """
    if x_fp8:
        values, scale = map(rows_of, x_fp8)
        return [], values, scale, [], True
    rows = rows_of(x)
    step, outputs = quantizing_step(cast, rows, ("x.rows", *names_of_operand(cast)))
    values, scale = (like(one, x.device) for one in outputs[:2])
    # A view of x whose rows are not one after another was copied above.
    return [step], values, scale, outputs, rows.data_ptr() == x.data_ptr()


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
