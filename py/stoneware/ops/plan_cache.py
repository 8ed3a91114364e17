"""An op's calls: the plan of each kind of call is made once and then found.

The call path, after the op's function in `api.py`:

    PlanCache.call   the native module's: reads the tensors, finds the plan and launches it, all
                     without Python; asks `_made` for a plan that it does not have
    PlanCache.slow   the whole call in Python, for what the native module leaves to it: gradients,
                     forward-mode AD, torch.func, negated views, subclasses of torch.Tensor, torch
                     dispatch modes, tensors without memory. It asks `PlanCache.plan`, the native
                     module's too, so plans are in one place and have one key.

Where the native module cannot be used, `_PythonPlans` has the plans and `slow` is every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels.registry import CALL_MODULE
from stoneware.ops import tensor_checks
from stoneware.ops.tensor_checks import POINTER_MULTIPLE
from stoneware.ops.workspace import workspace
from stoneware.runtime import native
from stoneware.tuning import policy as tuning

MAX_PLANS = 4096
"""A key and its plan took 1.0 KB of Python memory (tracemalloc over 399 scaled_mm plans on a CPU); a
server that sees every m up to 8192 would otherwise keep them all, for each of its layers."""

Plan = Callable[..., None]

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_no_torch_dispatch = torch.Tensor.__torch_dispatch__


class PlanCache:
    """The calls of an op, and their plans; the oldest go when there are too many.

    What a plan depends on beside its call, `tuning.state()` and the epoch, is part of its key.

    A subclass is an op. Its methods take the arguments of a call: the tensors, then the objects.

    Attributes:
      op: its name.
      tensors: the names of its tensors; the first is an input, the last is "out".
      objects: the names of its other arguments, which are hashable.
      optional: tensors that may be None.
      aligned: tensors of which it matters whether their address is a multiple of
        POINTER_MULTIPLE bytes.
      must_be_aligned: whether no plan takes those where it is not.
      plan_order: the tensors in the order in which a plan takes them.
      call: call(*tensors, *objects) is a call; returns out.
      plan: plan(*tensors, *objects) is the plan of a call, which is checked.
      fast: the native module's part, a FastCall; None where it cannot be used.
      why_not_fast: the reason for that; empty if it can.
    """

    op: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]
    objects: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ("bias", "out")
    aligned: ClassVar[tuple[str, ...]] = ("a", "b", "out")
    must_be_aligned: ClassVar[bool] = True
    plan_order: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._positions = [self.tensors.index(name) for name in self.plan_order]
        self._aligned = [self.tensors.index(name) for name in self.aligned]
        self.fast, self.why_not_fast = self._fast_call()
        if self.fast is not None:
            self.call, self.plan = self.fast.call, self.fast.plan
        else:
            self.call, self.plan = self.slow, _PythonPlans(self._made, len(self.tensors)).plan

    def checked_plan(self, *arguments: Any) -> Plan:
        """Checks the arguments, and makes the plan for every call with arguments of this kind."""
        raise NotImplementedError

    def result(self, *arguments: Any) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the dtype of an out that the call allocates."""
        raise NotImplementedError

    def traced(self, *arguments: Any) -> torch.Tensor:
        """The call as an operator of torch's, for what traces or replaces operators."""
        raise NotImplementedError

    def slow(self, *arguments: Any) -> torch.Tensor:
        """A whole call, of whatever kind."""
        if is_traced(arguments[: len(self.tensors)]):
            return self.traced(*arguments)
        return self.run(*arguments)

    def run(self, *arguments: Any) -> torch.Tensor:
        """A whole call on tensors with memory, in Python."""
        plan = self.plan(*arguments)
        tensors = list(arguments[: len(self.tensors)])
        tensor_checks.refuse_gradients(self.op, list(zip(self.tensors, tensors)))
        if any(tensor is not None and tensor.is_neg() for tensor in tensors):
            return self._run_negated(arguments)
        out = tensors[-1]
        if out is None:
            shape, dtype = self.result(*arguments)
            out = tensors[-1] = torch.empty(shape, dtype=dtype, device=tensors[0].device)
        plan(*[tensors[position] for position in self._positions])
        return out

    def _made(self, *arguments: Any) -> tuple[Any, ...]:
        """A new plan and what is kept with it: (plan, is_kept, shape, strides, dtype, device)."""
        plan = self.checked_plan(*arguments)
        if self.must_be_aligned:  # of a plan that is kept they are: the key tells
            tensor_checks.check_addresses([(self.tensors[position], arguments[position]) for position in self._aligned])
        shape, dtype = self.result(*arguments)
        strides = tuple(torch.empty(shape, device="meta").stride())
        # During a capture nothing is measured; a call outside of it will be.
        is_kept = tuning.current_mode() != "on_miss" or not tuning.is_capturing()
        return plan, is_kept, shape, strides, dtype, arguments[0].device

    def _run_negated(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """A call with views that are negated when they are read, as of a conjugate's imaginary
        part; kernels read memory as it is."""
        *inputs, out = arguments[: len(self.tensors)]
        resolved = self.run(
            *[tensor if tensor is None else tensor.resolve_neg() for tensor in inputs],
            None if out is not None and out.is_neg() else out,
            *arguments[len(self.tensors) :],
        )
        return resolved if out is None else out if out is resolved else out.copy_(resolved)

    def _fast_call(self) -> tuple[Any, str]:
        """The native module's part of this op, or None and why."""

        def positions(names: tuple[str, ...]) -> list[int]:
            return [self.tensors.index(name) for name in names if name in self.tensors]

        try:
            return native.load(CALL_MODULE).FastCall(
                torch,
                make=self._made,
                slow=self.slow,
                state=tuning.state,
                epoch=tuning.EPOCH,
                workspace=workspace,
                num_tensors=len(self.tensors),
                num_objects=len(self.objects),
                out=self.tensors.index("out"),
                optional=positions(self.optional),
                aligned=positions(self.aligned),
                plan_order=self._positions,
                max_plans=MAX_PLANS,
            ), ""
        except (UnsupportedError, AttributeError) as error:
            # An installation without the module, or a torch without the DLPack exchange API.
            return None, str(error)


class _PythonPlans:
    """Finds plans where the native module cannot; all go when there are too many."""

    def __init__(self, make: Callable[..., tuple[Any, ...]], num_tensors: int) -> None:
        self._make, self._num_tensors = make, num_tensors
        self._plans: dict[Hashable, Plan] = {}

    def plan(self, *arguments: Any) -> Plan:
        try:
            key = self._key(arguments)
            plan = self._plans.get(key)
        except (AttributeError, TypeError, RuntimeError):
            # Not tensors, or without strides, or an unhashable argument; the checks say which.
            plan = key = None
        if plan is None:
            plan, is_kept, *_ = self._make(*arguments)
            if is_kept and key is not None:
                if len(self._plans) >= MAX_PLANS:
                    self._plans = {}
                self._plans[key] = plan
        return plan

    def _key(self, arguments: tuple[Any, ...]) -> Hashable:
        """What the native module's key has; a misaligned tensor has one of its own."""
        kinds = [
            tensor
            if tensor is None
            else (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.layout,
                tensor.data_ptr() % POINTER_MULTIPLE,
            )
            for tensor in arguments[: self._num_tensors]
        ]
        return *kinds, *arguments[self._num_tensors :], tuning.state(), tuning.generation()


def is_traced(tensors: tuple[Any, ...]) -> bool:
    """Whether a torch dispatch mode or a tensor's class wants to see operators, not their effects:
    torch.export, FakeTensorMode, counters of operations, the transforms of torch.func. A nested
    tensor is for the checks to refuse.
    """
    return _num_dispatch_modes() > 0 or any(
        _is_functorch_wrapped(tensor)
        or (type(tensor).__torch_dispatch__ is not _no_torch_dispatch and not tensor.is_nested)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )
