"""A frozen layer's call, x quantized and multiplied by an fp8 weight, as one native call.

The plan is that of `sw.quantize` and then that of `sw.scaled_mm`; what is between them is allocated
with the result and dropped. A host that is busy with the layers of a small batch saves half of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels.registry import CALL_MODULE
from stoneware.nn.recipes import RECIPES
from stoneware.ops.scaled_mm import api as scaled_mm
from stoneware.ops.scaled_mm.spec import SPEC
from stoneware.quantizing import api as quantizing
from stoneware.runtime import native
from stoneware.tuning import policy

Call = Callable[..., torch.Tensor]

_BETWEEN = ("x8", "scale_x", "partial")


@functools.cache
def call(recipe: str, slow: Call) -> Call:
    """call(x, weight, scale, bias) for layers of a recipe.

    Args:
      recipe: a name of RECIPES.
      slow: the same call, for what a plan alone cannot do: gradients, traces, torch dispatch modes.
    """
    has_partial = RECIPES[recipe].forward[0].scales == "tensor"
    outputs = ("y", *_BETWEEN[: 2 + has_partial])
    nothing = (None,) * len(outputs)

    def make(*tensors: Any) -> tuple[Any, ...]:
        return _made(recipe, has_partial, *tensors[:4])

    def slow_call(*tensors: Any) -> torch.Tensor:
        return slow(*tensors[:4], recipe)

    try:
        fast = (
            native.load(CALL_MODULE)
            .FastCall(
                torch,
                make=make,
                slow=slow_call,
                state=policy.state,
                epoch=policy.EPOCH,
                num_tensors=4 + len(outputs),
                num_objects=0,
                outs=list(range(4, 4 + len(outputs))),
                optional=[3, *range(4, 4 + len(outputs))],
                aligned=[0],
                plan_order=list(range(4 + len(outputs))),
                max_plans=4096,
            )
            .call
        )
    except (UnsupportedError, AttributeError):
        return slow_call
    return lambda x, weight, scale, bias: fast(x, weight, scale, bias, *nothing)


def _made(
    recipe: str,
    has_partial: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[Any, ...]:
    cast = RECIPES[recipe].forward[0]
    rows = x.reshape(-1, x.shape[-1])
    m, n = rows.shape[0], weight.shape[0]
    quantize, _, device, between = quantizing.made(rows, has_partial, cast.scales, False, cast.dtype, cast.power_of_two)
    x8, scale_x = (
        torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in between[:2]
    )
    right, scale_w = weight.t(), scale.t() if scale.ndim == 2 else scale
    multiply = scaled_mm._PLANS.plan(x8, right, scale_x, scale_w, bias, None, x.dtype, True, None, None)

    def run(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any, y: torch.Tensor, *others: Any
    ) -> None:
        quantize(x.reshape(m, -1), *others)
        tensors = {"a": others[0], "b": weight.t(), "scale_a": others[1], "bias": bias, "out": y.view(m, n)}
        tensors["scale_b"] = scale.t() if scale.ndim == 2 else scale
        multiply(*[tensors[name] for name in SPEC.plan_order])

    # Views of x whose rows are not one after another were copied above.
    if rows.data_ptr() == x.data_ptr() and hasattr(quantize, "native_launch") and hasattr(multiply, "native_launch"):
        positions = {"a": 5, "b": 1, "scale_a": 6, "scale_b": 2, "bias": 3, "out": 4}
        run.native_launch = [  # type: ignore[attr-defined]
            (quantize.native_launch, (0, *range(5, 7 + has_partial))),
            (multiply.native_launch, [positions[name] for name in SPEC.plan_order]),
        ]
    shape = (*x.shape[:-1], n)
    strides = tuple(torch.empty(shape, device="meta").stride())
    is_kept = policy.current_mode() != "on_miss" or not policy.is_capturing()
    return run, is_kept, device, ((shape, strides, x.dtype), *between)
