"""Several plans as one native call.

A layer's call is a chain of steps: a plan each, of `sw.quantize`, of `sw.scaled_mm` or of `sw.matmul`, and
the names of its tensors. What is between them is allocated with the results and dropped. A host that is
busy with the layers of a small batch saves half of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels.registry import CALL_MODULE
from stoneware.nn.recipes import Cast
from stoneware.ops.matmul import api as matmul
from stoneware.ops.matmul.spec import SPEC as MATMUL
from stoneware.ops.scaled_mm import api as scaled_mm
from stoneware.ops.scaled_mm.spec import SPEC as SCALED_MM
from stoneware.quantizing import api as quantizing
from stoneware.runtime import native
from stoneware.tuning import policy

Call = Callable[..., Any]

Step = tuple[Any, Sequence[str]]
"""A plan and the names of its tensors, with ".t" for the transpose and ".rows" for a matrix of the rows;
"none" is None."""

Described = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of an output."""


def chain(
    inputs: Sequence[str],
    outputs: Sequence[str],
    make: Call,
    slow: Call,
    *,
    optional: Sequence[str] = (),
    num_results: int = 1,
) -> Call:
    """The call: call(*inputs) -> the first output, or a tuple of several.

    Native plans are launched without Python, those between them (the vendor's) are called.

    Args:
      inputs, outputs: names of its tensors; the first `num_results` outputs are returned.
      make: (*inputs) -> (steps, device, description of the outputs, whether the inputs' own memory is read).
      slow: (*inputs) -> results, for calls that are unusual: gradients, traces, torch dispatch modes.
      optional: inputs that may be None.
      num_results: how many outputs are returned.
    """
    # A name without a tensor comes last, and is always None.
    names = (*inputs, *outputs, "none")
    nothing = (None,) * (len(outputs) + 1)
    positions = {name: position for position, name in enumerate(names)}

    def made(*tensors: Any) -> tuple[Any, ...]:
        steps, device, described, is_direct = make(*tensors[: len(inputs)])

        found = [
            (_with_views(plan, views), [positions[name] for name in of])
            for plan, of, views in ((plan, *_parted(wanted)) for plan, wanted in steps)
        ]

        def run(*tensors: Any) -> None:
            for plan, wanted in found:
                plan(*[tensors[position] for position in wanted])

        if is_direct and any(hasattr(plan, "native_launch") for plan, _ in found):
            run.native_launch = [  # type: ignore[attr-defined]
                (getattr(plan, "native_launch", plan), wanted) for plan, wanted in found
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
                aligned=[position for position, name in enumerate(inputs) if name not in optional],
                plan_order=list(range(len(names))),
                max_plans=4096,
                num_results=num_results,
            )
            .call
        )
    except (UnsupportedError, AttributeError):
        return slow_call
    return lambda *tensors: fast(*tensors, *nothing)


def quantizing_step(
    cast: Cast,
    x: torch.Tensor,
    names: Sequence[str],
    *,
    transpose: bool | str = False,
    gives: bool = False,
    takes: bool = False,
) -> tuple[Step, list[Described]]:
    """The step that quantizes x [m, k], and what each of its names but the first is.

    What needs all of x first can be found once for x and for its transpose: the largest element for scales of the
    matrix, the scales of columns for scales of rows.

    Args:
      cast: how.
      x: like that of the calls.
      names: of x, and of the outputs: those of `sw.quantize`, and the partial amax, if there is one
        (`has_partial`). With scales of rows, `gives` has those of columns between the two.
      transpose: of `sw.quantize`.
      gives: whether a later step with the transpose of the same x takes what this one has found.
      takes: whether what an earlier step has found is an input, whose name is the last.
    """
    plan, described = quantizing.make_plan(
        x, cast.scales, transpose, cast.dtype, cast.power_of_two, shares=gives or takes
    )
    return (plan, names), list(described)


def is_shareable(cast: Cast) -> bool:
    """Whether steps of this cast can give and take."""
    return cast.scales in ("tensor", "row")


def has_partial(cast: Cast, *, transpose: bool = False, gives: bool = False, takes: bool = False) -> bool:
    """Whether a step of this cast has a partial amax, memory for what its kernels tell each other."""
    return cast.scales == "tensor" or (cast.scales == "row" and (gives or (transpose and not takes)))


def scaled_mm_step(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    names: Sequence[str],
    *,
    use_fast_accum: bool = True,
) -> Step:
    """The step of a [m, k] @ b[n, k]^T.

    Args:
      a, b, scale_a, scale_b, bias: like those of the calls, as `sw.quantize` gives them.
      dtype: of the result.
      names: of a, scale_a, b, scale_b, bias and the result.
      use_fast_accum: of `sw.scaled_mm`.
    """
    transposed = scale_b.t() if scale_b.ndim == 2 else scale_b
    plan = scaled_mm._PLANS.plan(a, b.t(), scale_a, transposed, bias, None, dtype, use_fast_accum, None, None)
    of_a, of_scale_a, of_b, of_scale_b, of_bias, result = names
    named = {
        "a": f"{of_a}.rows", "b": f"{of_b}.t", "scale_a": f"{of_scale_a}.rows", "scale_b": f"{of_scale_b}.t",
        "bias": of_bias, "out": f"{result}.rows",
    }  # fmt: skip
    return plan, [named[name] for name in SCALED_MM.plan_order]


def matmul_step(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, names: Sequence[str]) -> Step:
    """The step of a[k, m]^T @ b [k, n]; names of a, b and the result."""
    plan = matmul._PLANS.plan(a.t(), b, None, None, dtype, None, None)
    named = {"a": f"{names[0]}.rows.t", "b": f"{names[1]}.rows", "bias": "none", "out": names[2]}
    return plan, [named[name] for name in MATMUL.plan_order]


def like(described: Described, device: torch.device) -> torch.Tensor:
    """A tensor as it is described, whose values are anything."""
    shape, strides, dtype = described
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def dense(shape: Sequence[int], dtype: torch.dtype) -> Described:
    """Of a row-major output."""
    return tuple(shape), tuple(torch.empty(shape, device="meta").stride()), dtype


def of_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> Described:
    """Of x @ weight.t()."""
    return dense((*x.shape[:-1], weight.shape[0]), dtype or x.dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _parted(names: Sequence[str]) -> tuple[list[str], list[Sequence[str]]]:
    """Names, and the views of each."""
    parts = [name.split(".") for name in names]
    return [name for name, *_ in parts], [views for _, *views in parts]


def _with_views(plan: Any, views: Sequence[Sequence[str]]) -> Any:
    """The plan for tensors that it takes these views of. A native launch reads memory alone, whose views are one."""

    def call(*tensors: torch.Tensor | None) -> None:
        plan(*[_view(tensor, wanted) if wanted else tensor for tensor, wanted in zip(tensors, views)])

    if hasattr(plan, "native_launch"):
        call.native_launch = plan.native_launch  # type: ignore[attr-defined]
    return call


def _view(tensor: torch.Tensor | None, views: Sequence[str]) -> torch.Tensor | None:
    if tensor is None or tensor.shape == (1,):  # a scale of a whole tensor stays as it is
        return tensor
    for view in views:
        tensor = tensor.t() if view == "t" else rows_of(tensor)
    return tensor
