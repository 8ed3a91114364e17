"""Builds the native calls: a FastCall finds the plan of a call by its key, and launches it without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stoneware.errors import UnsupportedError
from stoneware.ops import cuda_context
from stoneware.runtime import native
from stoneware.runtime.native import CALL_MODULE
from stoneware.tuning import policy

MAX_PLANS = 4096
"""A key and its plan took 1.0 KB of Python memory (tracemalloc over 399 scaled_mm plans on a CPU); a
server that sees every m up to 8192 would otherwise keep them all, for each of its layers."""


class Direct(NamedTuple):
    """A call of a function that returns new results. It is a plan without launches, or `direct` of one.

    Attributes:
      function: function(*tensors, *values) -> results.
      tensors: the positions of its tensors among the plan's.
      values: what it takes after them. torch's functions read keywords slower.
    """

    function: Callable[..., Any]
    tensors: Sequence[int]
    values: Sequence[Any] = ()

    @property
    def direct(self) -> Direct:
        return self


Output = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a tensor that a call allocates."""


def build(
    make: Callable[..., Any],
    slow: Callable[..., Any],
    *,
    num_tensors: int,
    outs: Sequence[int],
    optional: Sequence[int],
    aligned: Sequence[int],
    order: Sequence[int] | None = None,
    num_objects: int = 0,
    num_results: int = 1,
    is_layer: bool = False,
    is_cast: bool = False,
) -> tuple[Any, str]:
    """A FastCall, or None and why this installation has none.

    Args:
      make: make(*arguments) -> (plan, is_kept, device, outputs), for a call whose key is new.
      slow: slow(*arguments) is the whole call in Python: gradients, torch dispatch modes and the like.
      num_tensors, num_objects: the arguments of a call: tensors, then objects that can be hashed.
      outs: positions of the tensors that are allocated if they are None; the first `num_results` are returned.
      optional: positions of the tensors that may be None.
      aligned: positions of the tensors whose plan depends on the alignment of their address.
      order: positions of the tensors in the order of a plan's arguments; None: that of the call.
      num_results: of `outs`; the others are memory for what is in between.
      is_layer: whether calls follow gradients.
      is_cast: whether those of a layer under autocast are usual.
    """
    try:
        return native.load(CALL_MODULE).FastCall(
            torch,
            make=make,
            slow=slow,
            state=policy.state,
            epoch=policy.EPOCH,
            enter_thread=cuda_context.make_current,
            num_tensors=num_tensors,
            num_objects=num_objects,
            outs=list(outs),
            optional=list(optional),
            aligned=list(aligned),
            plan_order=list(range(num_tensors) if order is None else order),
            max_plans=MAX_PLANS,
            num_results=num_results,
            is_layer=is_layer,
            is_cast=is_cast,
        ), ""
    except (UnsupportedError, AttributeError) as error:
        # An installation without the module, or a torch without the DLPack exchange API.
        return None, str(error)


def is_kept() -> bool:
    """Whether a plan that is made now serves later calls; a plan of a capture was chosen without measuring."""
    return policy.current_mode() != "on_miss" or not policy.is_capturing()


def dense(shape: Sequence[int], dtype: torch.dtype) -> Output:
    """A row-major output."""
    return tuple(shape), tuple(torch.empty(shape, device="meta").stride()), dtype


def empty(output: Output, device: torch.device) -> torch.Tensor:
    """Allocates an output."""
    shape, strides, dtype = output
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
