"""A linear layer with a frozen fp8 weight, for inference and for training adapters over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from stoneware.nn import folded_scales, frozen_linear
from stoneware.nn.arguments import autocast_dtype
from stoneware.nn.handover import Handover
from stoneware.nn.linear import check_recipe
from stoneware.nn.recipes import RECIPES, Cast
from stoneware.quantizing.api import quantize


class KeepsFloat8(torch.nn.Module):
    """A module whose fp8 weights and their scales move with .to(device), and keep their dtypes in .to(dtype),
    .half() and the like, which would round values without their scales."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeepsFloat8:
        own = {**self._parameters, **self._buffers}
        fp8_ids = {
            id(tensor)
            for name, tensor in own.items()
            if tensor is not None and (tensor.dtype in FP8 or "scale" in name)
        }

        def without_cast(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in fp8_ids and result.dtype != tensor.dtype else result

        return super()._apply(without_cast, recurse)


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def weight_cast(recipe: str) -> Cast:
    """The cast of a frozen weight.

    Block scales are powers of two. If transformers has no fp8 kernels, it dequantizes a checkpoint to 16 bits; those
    values are then exact, and are quantized to the same bits again.
    """
    cast = RECIPES[recipe].forward[1]
    return replace(cast, power_of_two=True) if cast.scales == "block_2d" else cast


class Float8InferenceLinear(KeepsFloat8, torch.nn.Linear):
    """A linear layer with a frozen fp8 weight: half the memory, and an fp8 matmul.

    x is quantized at each call. x has a gradient, the weight has none: dx is an fp8 matmul with the
    same weight, which is transposed only during that matmul. So adapters (LoRA) train over it without
    a 16-bit copy of the weight.

    The state_dict has `weight` in fp8, `bias`, and `weight_scale_inv`, the factors of the fp8 values.
    Blockwise these have the shape of Hugging Face's fp8 checkpoints, [ceil(out_features / 128),
    ceil(in_features / 128)]; for the other recipes [out_features, 1] or [1]. A 16-bit weight of a
    checkpoint of torch.nn.Linear is quantized when it is loaded.

    Args:
      in_features, out_features, bias, device: see torch.nn.Linear; sizes are multiples of 16, of 128
        for "blockwise".
      recipe: "tensorwise", "rowwise" or "blockwise".
      dtype: of the bias and of x; the default is torch's.

    Shapes:
      x: [..., in_features], bfloat16, float16 or float32, or any dtype under autocast; of the bias, if there is one.
      y: [..., out_features] of that dtype.

    .to(dtype), .half() and the like cast the bias, but not the weight.

    Attributes:
      handover: may provide x in fp8; `convert` sets it.

    Raises:
      TypeError, ValueError: an unknown recipe, or a size that breaks its rule.
      TypeError, ValueError: x is of another dtype or width than the layer.
    """

    handover: Handover | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str = "rowwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_recipe(recipe, in_features, out_features)
        self.recipe = recipe
        super().__init__(in_features, out_features, bias, device="meta", dtype=dtype)
        self.compute_dtype = self.weight.dtype
        cast = weight_cast(recipe)
        shape = {
            "tensor": (1,),
            "row": (out_features, 1),
            "block_2d": (-(-out_features // 128), -(-in_features // 128)),
        }[cast.scales]
        device = torch.get_default_device() if device is None else device
        self.weight = frozen_parameter(torch.zeros(out_features, in_features, dtype=cast.dtype, device=device))
        self.weight_scale_inv = frozen_parameter(torch.ones(shape, dtype=torch.float32, device=device))
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=self.compute_dtype, device=device))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, recipe: str = "rowwise") -> Float8InferenceLinear:
        """The layer with the weight of `linear` quantized, and its bias.

        Raises:
          ValueError: an unknown recipe, or a size that breaks its rule.
        """
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None,
            recipe=recipe, device="meta", dtype=linear.weight.dtype,
        )  # fmt: skip
        layer.quantize_(linear.weight)
        layer.bias = linear.bias
        return layer.train(linear.training)

    def quantize_(self, weight: torch.Tensor) -> None:
        """Quantizes a weight [out_features, in_features] with 16 or 32 bits into this layer."""
        values, scale = self.quantized(weight.detach(), self.recipe)
        self.weight, self.weight_scale_inv = frozen_parameter(values), frozen_parameter(scale)

    @staticmethod
    def quantized(weight: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight in fp8 and its scales."""
        return _cast(weight, weight_cast(recipe))

    def dequantized(self) -> torch.Tensor:
        """The weight [out_features, in_features] in the layer's 16 or 32 bits, rounded once."""
        return dequantize(self.weight.detach(), self.weight_scale_inv.detach(), self.compute_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, dtype = input, autocast_dtype(input)
        parameters: dict[str, Any] = self._parameters  # skips torch.nn.Module's search for an attribute
        if "weight" in parameters:
            weight, scale, bias = parameters["weight"], parameters["weight_scale_inv"], parameters["bias"]
        else:  # a replica of torch.nn.DataParallel
            weight, scale, bias = self.weight, self.weight_scale_inv, self.bias
        if dtype is not None:
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if torch.compiler.is_dynamo_compiling():
            return frozen_linear.linear(x, weight, scale, bias, self.recipe)
        if self.handover is not None and (x_fp8 := self.handover.take(x)):
            return frozen_linear.native_linear("rowwise", True)(x, weight, scale, bias, *x_fp8)
        return frozen_linear.native_linear(self.recipe, False)(x, weight, scale, bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float8InferenceLinear:
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def reset_parameters(self) -> None:
        """Does nothing: a frozen weight is loaded or quantized, never drawn."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Also loads 16-bit weights, which it quantizes."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.dtype not in FP8:
            weight = weight.detach()
            if not self.weight.is_meta:
                weight = weight.to(self.weight.device)
            values, scale = self.quantized(weight, self.recipe)
            state_dict = {**state_dict, f"{prefix}weight": values, f"{prefix}weight_scale_inv": scale}
        super()._load_from_state_dict(state_dict, prefix, *others)


def _cast(x: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quantize(x, cast.scales, dtype=cast.dtype, power_of_two=cast.power_of_two)
    return values, scale


def dequantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, k] of fp8 values and their scales, rounded once.

    Args:
      values: [n, k].
      scale: [1], or [n / i, k / j], one for i x j elements.
      dtype: of the result.
    """
    weight, scales = torch.empty(values.shape, dtype=dtype, device=values.device), scale.reshape(-1, scale.shape[-1])
    for first, end in folded_scales.row_ranges(values):
        rows = values[first:end]
        weight[first:end] = rows.float().mul_(
            folded_scales.spread(folded_scales.part_of(scales, values, first, end), rows)
        )
    return weight


def frozen_parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)
