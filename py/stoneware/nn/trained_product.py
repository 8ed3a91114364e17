"""What layers compute that train in fp8, each direction as one native call.

    forward    x, weight     -> quantized -> y
    backward   dy, weight, x -> quantized, transposed where the product wants it -> dx, dw

Scales of a whole tensor need its largest element first, and those of columns the largest of each. `forward` returns
what its kernels found of x and of the weight, so that `backward` need not read them once more.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from stoneware.nn.native_chain import (
    Call,
    chain,
    dense,
    has_partial,
    is_shareable,
    like,
    matmul_step,
    of_product,
    quantizing_step,
    rows_of,
    scaled_mm_step,
)
from stoneware.nn.recipes import RECIPES, UNIT, Cast


def is_shared(recipe: str) -> bool:
    """Whether `forward` returns what it found of x and of the weight for `backward`."""
    forward, grad_input, grad_weight = (one and one[1] for one in _casts_of(recipe))
    return forward == grad_input == grad_weight and is_shareable(forward)


def is_chained(recipe: str, dy: torch.Tensor, needs_weight: bool) -> bool:
    """Whether `backward` computes the gradients for this dy; if not, the operands are padded or cast first."""
    num_rows = dy.numel() // max(dy.shape[-1], 1)
    if needs_weight and RECIPES[recipe].grad_weight is None:
        return num_rows > 0 and dy.dtype != torch.float32
    return num_rows > 0 and not (needs_weight and num_rows % UNIT)


@functools.cache
def forward(recipe: str, needs_x: bool, needs_weight: bool, slow: Call) -> Call:
    """call(x, weight, bias) -> y, or (y, *found of x, *found of the weight) if `is_shared`.

    What was found of x comes if `needs_weight`, of the weight if `needs_x`.

    Args:
      recipe: a name of RECIPES.
      needs_x, needs_weight: which gradients `backward` computes.
      slow: the same for calls that are more than their plans; it may return y alone.
    """
    gives = [is_shared(recipe) and needs for needs in (needs_weight, needs_x)]
    casts = [
        _Quantized.of(name, cast, f"{name}.rows", gives=given)
        for name, cast, given in zip(("x", "weight"), RECIPES[recipe].forward, gives)
    ]
    found = [one.names[2] for one in casts if one.gives]
    between = [name for one in casts for name in one.names if name not in found]
    outputs = ("y", *found, *between)

    def make(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        rows = rows_of(x)
        building = _Building(x.device)
        for one, tensor in zip(casts, (rows, weight)):
            building.quantize(one, tensor)
        building.described["y"] = of_product(x, weight)
        building.multiply(casts[0].names[:2], casts[1].names[:2], "bias", "y", bias, x.dtype, use_fast_accum=True)
        return (
            building.steps,
            x.device,
            [building.described[name] for name in outputs],
            rows.data_ptr() == x.data_ptr(),
        )

    return chain(
        ("x", "weight", "bias"), outputs, make, slow, optional=("bias",), num_results=1 + len(found)
    )  # fmt: skip


@functools.cache
def backward(recipe: str, needs_x: bool, needs_weight: bool, slow: Call) -> Call:
    """call(dy, *weight, *x, *found of the weight, *found of x) -> dx, dw, or both as a tuple.

    weight comes if `needs_x`, x if `needs_weight`; what was found of each only if `is_shared`, too.

    Args:
      recipe: a name of RECIPES.
      needs_x, needs_weight: which gradients are computed, one at least.
      slow: the same for calls that are more than their plans.
    """
    _, grad_input, grad_weight = _casts_of(recipe)
    casts: list[_Quantized] = []
    takes = is_shared(recipe)
    if needs_x and needs_weight and grad_weight is not None and grad_input[0] == grad_weight[0]:
        casts.append(_Quantized.of("dy", grad_input[0], "dy.rows", transpose="both"))
    else:
        if needs_x:
            casts.append(_Quantized.of("dy", grad_input[0], "dy.rows"))
        if needs_weight and grad_weight is not None:
            casts.append(_Quantized.of("dy", grad_weight[0], "dy.rows", transpose=True))
    if needs_x:
        casts.append(_Quantized.of("weight", grad_input[1], "weight", transpose=True, takes=takes))
    if needs_weight and grad_weight is not None:
        casts.append(_Quantized.of("x", grad_weight[1], "x.rows", transpose=True, takes=takes))
    given = [one.names[-1] for one in casts if one.takes]
    results = ["dx"] * needs_x + ["dw"] * needs_weight
    outputs = (*results, *(name for one in casts for name in one.names if name not in given))
    sources = ["weight"] * needs_x + ["x"] * needs_weight

    def make(dy: torch.Tensor, *tensors: torch.Tensor) -> Any:
        named = {"dy": dy, **dict(zip(sources, tensors))}
        rows = {name: rows_of(tensor) for name, tensor in named.items()}
        building = _Building(dy.device)
        for one in casts:
            building.quantize(one, rows[one.source.partition(".")[0]])
        if needs_x:
            building.described["dx"] = dense((*dy.shape[:-1], named["weight"].shape[1]), dy.dtype)
            building.multiply(("dy8", "scale_dy"), ("weight_t8", "scale_weight_t"), "none", "dx", None, dy.dtype)
        if needs_weight:
            building.described["dw"] = dense((dy.shape[-1], named["x"].shape[-1]), dy.dtype)
            if grad_weight is None:
                building.steps.append(matmul_step(rows["dy"], rows["x"], dy.dtype, ("dy", "x", "dw")))
            else:
                building.multiply(("dy_t8", "scale_dy_t"), ("x_t8", "scale_x_t"), "none", "dw", None, dy.dtype)
        is_direct = all(rows[name].data_ptr() == tensor.data_ptr() for name, tensor in named.items())
        return building.steps, dy.device, [building.described[name] for name in outputs], is_direct

    return chain(("dy", *sources, *given), outputs, make, slow, num_results=len(results))


def _casts_of(recipe: str) -> tuple[Any, Any, Any]:
    found = RECIPES[recipe]
    return found.forward, found.grad_input, found.grad_weight


class _Quantized(NamedTuple):
    """A tensor that a chain quantizes.

    Attributes:
      source: its name, with a view.
      cast, transpose, gives, takes: of `quantizing_step`.
      names: of the results, and of what is found or known of the tensor as a whole.
    """

    source: str
    cast: Cast
    transpose: bool | str
    gives: bool
    takes: bool
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        name: str,
        cast: Cast,
        source: str,
        *,
        transpose: bool | str = False,
        gives: bool = False,
        takes: bool = False,
    ) -> _Quantized:
        names: tuple[str, ...] = ()
        if transpose is not True:
            names += (f"{name}8", f"scale_{name}")
        if transpose is not False:
            names += (f"{name}_t8",)
        if transpose is not False or (gives and cast.scales == "row"):
            names += (f"scale_{name}_t",)
        if has_partial(cast, transpose=bool(transpose), gives=gives, takes=takes):
            names += (f"amax_{name}" if transpose is not True or takes else f"amax_{name}_t",)
        return cls(source, cast, transpose, gives, takes, names)


class _Building:
    """The steps of a chain and its outputs by name, as they are added."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Any] = []
        self.described: dict[str, Any] = {}

    def quantize(self, one: _Quantized, x: torch.Tensor) -> None:
        names = (one.source, *one.names)
        step, outputs = quantizing_step(one.cast, x, names, transpose=one.transpose, gives=one.gives, takes=one.takes)
        self.steps.append(step)
        self.described.update(zip(one.names, outputs))

    def multiply(
        self,
        a: tuple[str, ...],
        b: tuple[str, ...],
        of_bias: str,
        result: str,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        use_fast_accum: bool = False,
    ) -> None:
        """Of names of values and of scales."""
        a8, scale_a, b8, scale_b = (like(self.described[name], self.device) for name in (*a, *b))
        names = (*a, *b, of_bias, result)
        self.steps.append(
            scaled_mm_step(a8, b8, scale_a, scale_b, bias, dtype, names, use_fast_accum=use_fast_accum)
        )  # fmt: skip
