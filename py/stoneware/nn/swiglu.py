"""The gated feed-forward of Llama and related models: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stoneware.errors import quoted
from stoneware.nn import frozen_linear, steps, trained_swiglu
from stoneware.nn.arguments import autocast_dtype, check_size, has_hooks, is_distributed
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.linear import Float8Linear, Linear
from stoneware.nn.recipes import BF16, RECIPES
from stoneware.quantizing.fused import silu_mul
from stoneware.specs.problem import check_bool

HALVES = ("gate_proj", "up_proj")
"""Names of the two layers that are one matmul here, in the order of its rows."""

_PARAMETERS = ("weight", "weight_scale_inv")

ONE_CALL = ("rowwise", "blockwise")
"""The recipes whose frozen layers quantize the activation in its own kernel."""


class SwiGLU(torch.nn.Module):
    """y = down(silu(gate(x)) * up(x)), where gate and up are one matmul.

    With frozen rowwise or blockwise layers a call is one native call. The kernel of the activation also quantizes it,
    and Python never sees the tensors between the matmuls.

    The state_dict has `gate_proj`, `up_proj` and `down_proj`, like in Hugging Face. Frozen tensorwise layers have
    `gate_up_proj`, because its single scale cannot be split.

    Args:
      hidden_size: of x and y.
      intermediate_size: of gate and of up; both sizes are multiples that the recipe requires.
      recipe: "bf16" or one of `stoneware.nn.recipes`.
      frozen: whether the layers are `Float8InferenceLinear`, with fp8 weights.
      device, dtype: of the parameters.

    Shapes:
      x, y: [..., hidden_size], with the dtypes of the layers.

    Raises:
      TypeError, ValueError: an unknown recipe, a size that breaks its rule, or frozen layers without fp8.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: str = "rowwise",
        frozen: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_bool("frozen", frozen)
        check_size("intermediate_size", intermediate_size)
        if frozen and recipe == BF16:
            raise ValueError(
                f"recipe={quoted(recipe)} must be one of {', '.join(RECIPES)} for frozen layers; pass one of these"
            )

        def layer(in_features: int, out_features: int) -> torch.nn.Linear:
            if recipe == BF16:
                return Linear(in_features, out_features, bias=False, device=device, dtype=dtype)
            kind = Float8InferenceLinear if frozen else Float8Linear
            return kind(in_features, out_features, bias=False, recipe=recipe, device=device, dtype=dtype)

        self.gate_up_proj = layer(hidden_size, 2 * intermediate_size)
        self.down_proj = layer(intermediate_size, hidden_size)
        self.register_state_dict_post_hook(_split_halves)
        self.register_load_state_dict_pre_hook(_merge_halves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        if (
            type(gate_up) is not type(down)
            or not isinstance(gate_up, (Linear, Float8InferenceLinear))
            or gate_up.recipe != down.recipe
            or torch.compiler.is_dynamo_compiling()
            or has_hooks(gate_up)
            or has_hooks(down)
        ):
            return self._by_layers(x)
        parameters: list[dict[str, Any]] = [gate_up._parameters, down._parameters]
        if isinstance(gate_up, Linear):
            weights = [own.get("weight") for own in parameters]
            if (
                any(weight is None for weight in weights)
                or gate_up.fuse_wgrad_accumulation
                or down.fuse_wgrad_accumulation
            ):
                return self._by_layers(x)
            return trained_swiglu.call(x, weights[0], None, weights[1], None, gate_up.recipe)
        if gate_up.recipe not in ONE_CALL or autocast_dtype(x) is not None:
            return self._by_layers(x)
        return frozen(gate_up.recipe, False)(x, *(own[name] for own in parameters for name in _PARAMETERS))

    def _by_layers(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return y


@functools.cache
def frozen(recipe: str, has_fp8: bool) -> Callable[..., Any]:
    """call(x, gate_up, its scale, down, its scale) -> y.

    Args:
      recipe: one of ONE_CALL.
      has_fp8: whether x in fp8 and its scales follow the weights in the calls; only for "rowwise".
    """
    cast = RECIPES[recipe].forward[0]
    x_fp8, quantized = frozen_linear.input_steps(cast, has_fp8)
    sequence = (
        *quantized,
        steps.scaled_mm("x", "gate_up", "z"),
        steps.Step(steps.SiluMul(cast), ("z",), ("h8", "scale_h")),
        steps.scaled_mm("h", "down", "y"),
    )
    weights = ("gate_up8", "scale_gate_up", "down8", "scale_down")
    return steps.native_call(
        steps.Steps(("x", *weights, *x_fp8), ("y",), sequence, rows=("y",)),
        lambda *tensors: frozen_by_ops(recipe, *tensors[:5]),
        check=lambda x, gate_up, *others: frozen_linear.check(x, gate_up, None),
    )


def frozen_by_ops(
    recipe: str,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scale_gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_down: torch.Tensor,
) -> torch.Tensor:
    """`frozen` as calls of ops, for autograd, traces and torch dispatch modes."""
    z = frozen_linear.linear(x, gate_up, scale_gate_up, None, recipe)
    return frozen_linear.linear(silu_mul(z), down, scale_down, None, recipe)


def halves_of(joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first and the second half of the rows, in the same memory.

    Each has its own storage, which safetensors and transformers require; a view would have the whole storage.
    """
    halves = joined.chunk(2)
    if joined.requires_grad or joined.is_meta or is_distributed(joined):
        return halves
    # As bytes: DLPack lacks fp8 in some versions of torch.
    return tuple(torch.from_dlpack(half.view(torch.uint8)).view(joined.dtype) for half in halves)


def _split_halves(module: SwiGLU, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Splits gate_up_proj in a state_dict."""
    joined = {name: state_dict.get(f"{prefix}gate_up_proj.{name}") for name in _PARAMETERS}
    tensors = {name: tensor for name, tensor in joined.items() if tensor is not None}
    if any(tensor.shape[0] % 2 for tensor in tensors.values()):
        return
    for name, tensor in tensors.items():
        del state_dict[f"{prefix}gate_up_proj.{name}"]
        state_dict.update(zip([f"{prefix}{half}.{name}" for half in HALVES], halves_of(tensor)))


def _merge_halves(module: SwiGLU, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Concatenates gate_proj and up_proj in a state_dict."""
    for name in _PARAMETERS:
        halves = [f"{prefix}{half}.{name}" for half in HALVES]
        if all(half in state_dict for half in halves):
            state_dict[f"{prefix}gate_up_proj.{name}"] = torch.cat([state_dict.pop(half) for half in halves])
