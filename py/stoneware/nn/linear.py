"""Linear layers whose matmuls are Stoneware's, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.nn import main_grad, trained_linear
from stoneware.nn.arguments import autocast_dtype, check_size
from stoneware.nn.recipes import BF16, RECIPES, why_not
from stoneware.nn.trained_siblings import Siblings
from stoneware.specs.problem import check_choice


class Linear(torch.nn.Linear):
    """torch.nn.Linear on `sw.matmul`: y = x @ weight.t() + bias, in bfloat16 or float16.

    Arguments, parameters and state_dict are those of torch.nn.Linear. Under torch.autocast x, weight and
    bias are cast to its dtype. Gradients are computed with `sw.matmul` too, and only if they are needed.

    Attributes:
      recipe: "bf16".
      fuse_wgrad_accumulation: whether the gradient of the weight is added to `weight.main_grad` in place,
        and `weight.grad` stays None; see `stoneware.nn.main_grad`. The default is False.
      siblings: layers that `convert` has it computed with; see `stoneware.nn.trained_siblings`. The default is None.

    Shapes:
      x: [..., in_features], bfloat16 or float16, or any dtype under autocast.
      y: [..., out_features] of that dtype.

    Raises:
      TypeError, ValueError: x is of another dtype or width than the weight, or not in 16 bits.
    """

    recipe = BF16
    fuse_wgrad_accumulation = False
    siblings: Siblings | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = input
        parameters: dict[str, Any] = self._parameters  # skips torch.nn.Module's search for an attribute
        if torch.compiler.is_dynamo_compiling() or self.fuse_wgrad_accumulation or "weight" not in parameters:
            return self._general(x)
        weight, bias = parameters["weight"], parameters["bias"]
        if torch.is_grad_enabled():
            if self.siblings is not None and (y := self.siblings.take(self, x)) is not None:
                return y
            return trained_linear.call(x, weight, bias, None, self.recipe)
        return trained_linear.call_without_grad(self.recipe)(x, weight, bias)

    def _general(self, x: torch.Tensor) -> torch.Tensor:
        """Also traces, replicas of torch.nn.DataParallel, parametrized weights and main_grad."""
        weight, bias, recipe = self.weight, self.bias, self.recipe
        if not main_grad.is_enabled(self, weight):
            return trained_linear.general(x, weight, bias, recipe)
        is_quantized = recipe != BF16 and RECIPES[recipe].grad_weight is not None
        dtype = autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        return main_grad.linear(
            lambda weight: trained_linear.general(x, weight, bias, recipe), x, weight, is_quantized=is_quantized
        )


class Float8Linear(Linear):
    """A linear layer that trains in fp8; the parameters stay in 16 or 32 bits.

    x, weight and the gradient of y are quantized at each use, with scales of their current values. x and
    weight are saved for backward in 16 or 32 bits, and quantized there again. The bias and its gradient
    stay in the dtype of y. If the gradient of the weight is an fp8 matmul, the rows (all dimensions of x
    but the last) are padded with zeros to a multiple of 16 for it.

    Args:
      in_features, out_features: multiples of 16; of 128 for "blockwise".
      bias: whether there is one.
      recipe: "tensorwise", "rowwise", "rowwise_with_gw_hp" or "blockwise"; see `stoneware.nn.recipes`.
      device, dtype: of the parameters.

    Attributes:
      fuse_wgrad_accumulation: see `Linear`.

    Shapes:
      x: [..., in_features], bfloat16, float16 or float32, or any dtype under autocast.
      y: [..., out_features] of that dtype.

    Raises:
      TypeError, ValueError: an unknown recipe, or a size that breaks its rule.
      TypeError, ValueError: x is of another dtype or width than the weight.
    """

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
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe!r}"


def check_recipe(name: str, in_features: int, out_features: int) -> None:
    """Raises TypeError or ValueError unless this is the name of a recipe that supports a layer of this size."""
    check_choice("recipe", name, RECIPES)
    check_size("in_features", in_features)
    check_size("out_features", out_features)
    reason = why_not(name, in_features, out_features)
    if reason is not None:
        raise ValueError(f"{reason}; pad the layer, or leave it a torch.nn.Linear")
