"""The recipes of fp8 linear layers: the scales of each of the three matmuls.

    forward      y[m, n]  = x[m, k] @ w[n, k]^T
    grad_input   dx[m, k] = dy[m, n] @ w[n, k]
    grad_weight  dw[n, k] = dy[m, n]^T @ x[m, k]

The tensor cores of Hopper multiply fp8 operands that are contiguous along the summed dimension, so
dy, w and x are quantized again for each matmul, along its summed dimension, from the 16-bit values.

The recipes have the meaning of torchao's recipes of the same names (torchao/float8/config.py). `blockwise` is the
recipe of the DeepSeek-V3 report (section 3.3), with scales of 1x128 and 128x128 elements, except for dw: on Hopper the
two additional casts take longer than its fp8 matmul saves.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from stoneware.kernels import built_matmuls, needs
from stoneware.runtime.dtypes import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of an operand to fp8.

    Attributes:
      scales: of `sw.quantize`.
      dtype: torch.float8_e4m3fn, or torch.float8_e5m2 for a wider range.
      power_of_two: whether scales are powers of two, so that they add no rounding of their own.
    """

    scales: str
    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The casts of (first, second operand) of each matmul; None leaves dw in 16 bits.

    Attributes:
      forward: of x and w.
      grad_input: of dy and w.
      grad_weight: of dy and x.
    """

    forward: tuple[Cast, Cast]
    grad_input: tuple[Cast, Cast]
    grad_weight: tuple[Cast, Cast] | None = None


_TENSOR = Cast(scales="tensor")
_GRADIENT = Cast(scales="tensor", dtype=torch.float8_e5m2)
_ROW = Cast(scales="row", power_of_two=True)
_BLOCK = Cast(scales="block")
_SQUARE = Cast(scales="block_2d")

BF16 = "bf16"
"""The recipe without fp8: `Linear`."""

ROWWISE = "rowwise"
"""The recipe whose operands several layers share, and norms hand over."""

RECIPES = {
    "tensorwise": Recipe(forward=(_TENSOR, _TENSOR), grad_input=(_GRADIENT, _TENSOR), grad_weight=(_GRADIENT, _TENSOR)),
    "rowwise": Recipe(forward=(_ROW, _ROW), grad_input=(_ROW, _ROW), grad_weight=(_ROW, _ROW)),
    "rowwise_with_gw_hp": Recipe(forward=(_ROW, _ROW), grad_input=(_ROW, Cast(scales="tensor", power_of_two=True))),
    "blockwise": Recipe(forward=(_BLOCK, _SQUARE), grad_input=(_BLOCK, _SQUARE)),
}
"""Name -> recipe."""

UNIT = 16
"""in_features and out_features are multiples of it: fp8 rows are multiples of 16 bytes (CUDA driver API,
cuTensorMapEncodeTiled)."""

BLOCK = 128
"""Elements that share a scale of `blockwise`; in_features and out_features are multiples of it."""


def check_is_built(name: str, dtype: torch.dtype, needs_x: bool, needs_weight: bool, needs_bias: bool) -> None:
    """Refuses a call of a layer whose gradients need a matmul that is not built.

    Args:
      name: of the recipe, or BF16.
      dtype: of x.
      needs_x, needs_weight, needs_bias: whether these need a gradient.

    Raises:
      BackwardNotBuiltError: this installation was built without one of the matmuls.
    """
    _needed_matmuls(name, dtype, (needs_x, needs_weight, needs_bias))


# Like torch.compiler.assume_constant_result, which would import all of Dynamo: a trace calls it, but does not trace
# into it.
check_is_built._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _needed_matmuls(name: str, dtype: torch.dtype, needs_input_grad: tuple[bool, ...]) -> tuple[needs.Matmul, ...]:
    needed, dtype_name = frozenset(itertools.compress(("a", "b", "bias"), needs_input_grad)), DTYPE_NAMES[dtype]
    if name == BF16:
        matmuls = needs.matmuls("matmul", dtypes=(dtype_name,) * 3, layout="nt", needs_input_grad=needed)
    else:
        recipe = RECIPES[name]
        matmuls = needs.linear_matmuls(
            dtype=dtype_name,
            forward=_operands(recipe.forward),
            dgrad=_operands(recipe.grad_input),
            wgrad=recipe.grad_weight and _operands(recipe.grad_weight),
            needs_input_grad=needed,
        )
    built_matmuls.check(matmuls, names={"a": "x", "b": "weight"})
    return matmuls


def _operands(casts: tuple[Cast, Cast]) -> needs.Operands:
    a, b = casts
    return DTYPE_NAMES[a.dtype], DTYPE_NAMES[b.dtype], a.scales


def why_not(name: str, in_features: int, out_features: int) -> str | None:
    """Why a layer of this size cannot be computed by the recipe of this name, or BF16, or None."""
    if name == BF16:
        return None
    unit = BLOCK if RECIPES[name].forward[0].scales == "block" else UNIT
    for dimension, size in (("in_features", in_features), ("out_features", out_features)):
        if size % unit or size <= 0:
            return f"{dimension}={size} must be a positive multiple of {unit} for recipe {name!r}"
    return None
