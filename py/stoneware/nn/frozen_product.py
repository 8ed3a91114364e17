"""What layers with frozen fp8 weights compute, each as one native call.

A call is a chain of plans: that of `sw.quantize`, that of `sw.scaled_mm`, and those of the kernels that
quantize what they compute. What is between them is allocated with the result and dropped. A host that is
busy with the layers of a small batch saves half of its time.

A norm leaves its result in fp8 on the result itself, `attach`, where the layers that take it look first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels.registry import CALL_MODULE
from stoneware.nn.linear import FLOATS, check_x
from stoneware.nn.recipes import RECIPES
from stoneware.ops.scaled_mm import api as scaled_mm
from stoneware.ops.scaled_mm.spec import SPEC
from stoneware.quantizing import api as quantizing
from stoneware.quantizing import fused
from stoneware.runtime import native
from stoneware.tuning import policy

Call = Callable[..., Any]

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
    between = ("x8", "scale_x", "partial")[: 2 + (RECIPES[recipe].forward[0].scales == "tensor")]

    def make(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Any:
        check(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        step, device, outputs, (x8, scale_x) = _quantizing(recipe, rows, between)
        product = _product(x8, weight, scale_x, scale, bias, x.dtype)
        steps = [step, (product, _operands("x8", "scale_x", "weight", "scale", "bias", "y"))]
        # A view of x whose rows are not one after another was copied above.
        return steps, device, [_like(x, weight), *outputs], rows.data_ptr() == x.data_ptr()

    return _native(
        ("x", "weight", "scale", "bias"), ("y", *between), make, lambda *tensors: slow(*tensors, recipe), ("bias",)
    )


@functools.cache
def linear_of_quantized(dtype: torch.dtype) -> Call:
    """call(x8, scale_x, weight, scale, bias) -> y of this dtype, for rowwise layers."""

    def make(
        x8: torch.Tensor, scale_x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> Any:
        product = _product(_rows(x8), weight, _rows(scale_x), scale, bias, dtype)
        steps = [(product, _operands("x8", "scale_x", "weight", "scale", "bias", "y"))]
        return steps, x8.device, [_like(x8, weight, dtype)], True

    def slow(x8: torch.Tensor, scale_x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> Any:
        y = scaled_mm.scaled_mm(_rows(x8), weight.t(), _rows(scale_x), scale.t(), bias, dtype)
        return y.reshape(*x8.shape[:-1], weight.shape[0])

    return _native(("x8", "scale_x", "weight", "scale", "bias"), ("y",), make, slow, ("bias",))


@functools.cache
def swiglu(slow: Call) -> Call:
    """call(x, gate_up, its scale, down, its scale) -> y for rowwise layers; `slow` computes the same."""

    def make(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        check(x, weights[0], None)
        rows = x.reshape(-1, x.shape[-1])
        step, device, outputs, (x8, scale_x) = _quantizing("rowwise", rows, ("x8", "scale_x"))
        steps, described = _swiglu(x8, scale_x, x.dtype, *weights)
        return [step, *steps], device, [_like(x, weights[2]), *outputs, *described], rows.data_ptr() == x.data_ptr()

    return _native(("x", *_WEIGHTS), ("y", "x8", "scale_x", *_BETWEEN), make, slow)


@functools.cache
def swiglu_of_quantized(dtype: torch.dtype, slow: Call) -> Call:
    """call(x8, scale_x, gate_up, its scale, down, its scale) -> y of this dtype."""

    def make(x8: torch.Tensor, scale_x: torch.Tensor, *weights: torch.Tensor) -> Any:
        steps, described = _swiglu(_rows(x8), _rows(scale_x), dtype, *weights)
        return steps, x8.device, [_like(x8, weights[2], dtype), *described], True

    return _native(("x8", "scale_x", *_WEIGHTS), ("y", *_BETWEEN), make, slow)


@functools.cache
def rms_norm(epsilon: float, slow: Call) -> Call:
    """call(x, weight) -> (y, y8, scale); `slow` gives None for the last two."""

    def make(x: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        plan = fused.rms_norm_plan(rows, weight, epsilon, _CAST.power_of_two)
        shape = tuple(x.shape)
        described = [
            (shape, _strides(shape), dtype)
            for shape, dtype in ((shape, x.dtype), (shape, _CAST.dtype), ((*shape[:-1], 1), torch.float32))
        ]
        return [(plan, ("x.rows", "weight", "y.rows", "y8.rows", "scale.rows"))], x.device, described, (
            rows.data_ptr() == x.data_ptr()
        )  # fmt: skip

    return _native(("x", "weight"), ("y", "y8", "scale"), make, slow, num_results=3)


_CAST = RECIPES["rowwise"].forward[0]

_WEIGHTS = ("gate_up", "scale_gate_up", "down", "scale_down")

_BETWEEN = ("z", "h8", "scale_h")


def _swiglu(
    x8: torch.Tensor, scale_x: torch.Tensor, dtype: torch.dtype, *weights: torch.Tensor
) -> tuple[list[Any], list[Any]]:
    """The steps from x8 on, and what is between them."""
    gate_up, scale_gate_up, down, scale_down = weights
    m, width = x8.shape[0], down.shape[1]
    z = torch.empty(m, 2 * width, dtype=dtype, device=x8.device)
    h8 = torch.empty(m, width, dtype=_CAST.dtype, device=x8.device)
    scale_h = torch.empty(m, 1, dtype=torch.float32, device=x8.device)
    steps = [
        (
            _product(x8, gate_up, scale_x, scale_gate_up, None, dtype),
            _operands("x8", "scale_x", "gate_up", "scale_gate_up", "none", "z"),
        ),
        (fused.silu_mul_plan(z, _CAST.power_of_two), _BETWEEN),
        (
            _product(h8, down, scale_h, scale_down, None, dtype),
            _operands("h8", "scale_h", "down", "scale_down", "none", "y"),
        ),
    ]
    return steps, [(tuple(one.shape), tuple(one.stride()), one.dtype) for one in (z, h8, scale_h)]


def _quantizing(recipe: str, rows: torch.Tensor, names: Sequence[str]) -> tuple[Any, torch.device, Any, Any]:
    """The first step, its device, its outputs as they are described, and x8 and scale_x of such kinds."""
    cast = RECIPES[recipe].forward[0]
    plan, _, device, outputs = quantizing.made(
        rows, len(names) == 3, cast.scales, False, cast.dtype, cast.power_of_two
    )  # fmt: skip
    examples = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in outputs[:2]
    ]
    return (plan, ("x.rows", *names)), device, outputs, examples


def _product(
    x8: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> Any:
    scale_b = scale.t() if scale.ndim == 2 else scale
    return scaled_mm._PLANS.plan(x8, weight.t(), scale_x, scale_b, bias, None, dtype, True, None, None)


def _operands(x8: str, scale_x: str, weight: str, scale: str, bias: str, y: str) -> list[str]:
    named = {
        "a": f"{x8}.rows", "b": f"{weight}.t", "scale_a": f"{scale_x}.rows", "scale_b": f"{scale}.t", "bias": bias,
        "out": f"{y}.rows",
    }  # fmt: skip
    return [named[name] for name in SPEC.plan_order]


def _native(
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    make: Call,
    slow: Call,
    optional: tuple[str, ...] = (),
    num_results: int = 1,
) -> Call:
    """The native call.

    Args:
      inputs, outputs: names of its tensors; the first `num_results` outputs are returned.
      make: (*inputs) -> (steps, device, description of the outputs, whether the inputs' own memory is read).
        A step is a plan and the names of its tensors, with ".t" for the transpose and ".rows" for a matrix
        of the rows; "none" is None.
      slow: (*inputs) -> results, for calls that are unusual.
      optional: inputs that may be None.
    """
    # A name without a tensor comes last, and is always None.
    names = (*inputs, *outputs, "none")
    nothing = (None,) * (len(outputs) + 1)
    positions = {name: position for position, name in enumerate(names)}

    def made(*tensors: Any) -> tuple[Any, ...]:
        steps, device, described, is_direct = make(*tensors[: len(inputs)])

        def run(*tensors: Any) -> None:
            for plan, wanted in steps:
                plan(*[_view(tensors[positions[name.partition(".")[0]]], name.partition(".")[2]) for name in wanted])

        if is_direct and all(hasattr(plan, "native_launch") for plan, _ in steps):
            run.native_launch = [  # type: ignore[attr-defined]
                (plan.native_launch, [positions[name.partition(".")[0]] for name in wanted]) for plan, wanted in steps
            ]
        is_kept = policy.current_mode() != "on_miss" or not policy.is_capturing()
        return run, is_kept, device, tuple(described)

    def slow_call(*tensors: Any) -> Any:
        return slow(*tensors[: len(inputs)])

    outs = list(range(len(inputs), len(inputs) + len(outputs)))
    try:
        fast = (
            native.load(CALL_MODULE)
            .FastCall(
                torch,
                make=made,
                slow=slow_call,
                state=policy.state,
                epoch=policy.EPOCH,
                num_tensors=len(names),
                num_objects=0,
                outs=outs,
                optional=[*(positions[name] for name in optional), *outs, positions["none"]],
                aligned=[0],
                plan_order=list(range(len(names))),
                max_plans=4096,
                num_results=num_results,
            )
            .call
        )
    except (UnsupportedError, AttributeError):
        return slow_call
    return lambda *tensors: fast(*tensors, *nothing)


def _view(tensor: torch.Tensor | None, view: str) -> torch.Tensor | None:
    if tensor is None or not view or tensor.ndim == 1:
        return tensor
    return tensor.t() if view == "t" else _rows(tensor)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Of x @ weight.t()."""
    shape = (*x.shape[:-1], weight.shape[0])
    return shape, _strides(shape), dtype or x.dtype


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
