"""The feed-forward of two layers without gradients: down(activation(up(x))), the activation in the kernel of up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from stoneware.nn import frozen_linear, steps, trained_linear
from stoneware.nn.recipes import BF16, RECIPES

Activation = Callable[[torch.Tensor], torch.Tensor]


@functools.lru_cache(maxsize=256)
def frozen(recipe: str, activation: Activation, has_fp8: bool) -> Callable[..., torch.Tensor]:
    """call(x, up, its scale, its bias, down, its scale, its bias) -> y with fp8 weights, as one native call.

    Calls that need gradients, and those whose kernel cannot have the activation or is not linked yet, run the layers
    one by one.

    Args:
      recipe: a name of RECIPES.
      activation: a pointwise function that can be hashed.
      has_fp8: whether x in fp8 and its scales follow in the calls; only for "rowwise".
    """
    cast = RECIPES[recipe].forward[0]
    x_fp8, quantized = frozen_linear.input_steps(cast, has_fp8)
    sequence = (
        *quantized,
        _activated(steps.scaled_mm("x", "up", "h", bias="bias_up"), activation),
        steps.quantize("h", cast),
        steps.scaled_mm("h", "down", "y", bias="bias_down"),
    )

    def by_layers(
        x: torch.Tensor,
        up: torch.Tensor, scale_up: torch.Tensor, bias_up: torch.Tensor | None,
        down: torch.Tensor, scale_down: torch.Tensor, bias_down: torch.Tensor | None,
        *x_fp8: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        up_call = frozen_linear.native_linear(recipe, has_fp8)
        h = activation(up_call(x, up, scale_up, bias_up, *x_fp8))
        y: torch.Tensor = frozen_linear.native_linear(recipe, False)(h, down, scale_down, bias_down)
        return y

    weights = ("up8", "scale_up", "bias_up", "down8", "scale_down", "bias_down")
    return steps.native_call(
        steps.Steps(("x", *weights, *x_fp8), ("y",), sequence, rows=("y",)),
        by_layers,
        optional=("bias_up", "bias_down"),
        check=lambda x, up, scale, bias, *others: frozen_linear.check(x, up, bias),
    )


@functools.lru_cache(maxsize=256)
def plain(activation: Activation) -> Callable[..., torch.Tensor]:
    """call(x, up, its bias, down, its bias) -> y in 16 bits; otherwise like `frozen`."""
    up = steps.Step(steps.Matmul("nt"), ("x", "up", "bias_up"), ("h",))
    down = steps.Step(steps.Matmul("nt"), ("h", "down", "bias_down"), ("y",))

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.is_grad_enabled():
            y: torch.Tensor = trained_linear.call(x, weight, bias, None, BF16)
            return y
        return trained_linear.call_without_grad(BF16)(x, weight, bias)

    inputs, sequence = ("x", "up", "bias_up", "down", "bias_down"), (_activated(up, activation), down)
    return steps.native_call(
        steps.Steps(inputs, ("y",), sequence, rows=("y",)),
        lambda x, up, bias_up, down, bias_down: layer(activation(layer(x, up, bias_up)), down, bias_down),
        optional=("bias_up", "bias_down"),
        check=lambda x, up, *others: trained_linear.check_x(BF16, x, up),
    )


def _activated(step: steps.Step, activation: Activation) -> steps.Step:
    assert isinstance(step.op, (steps.ScaledMM, steps.Matmul))
    return step._replace(op=steps.Activated(step.op, activation))
