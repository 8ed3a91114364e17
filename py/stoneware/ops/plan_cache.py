"""The calls of an op: the plan for each kind of call is made once and cached.

The call path, after the op's function in `api.py`:

    OpPlans.call   the native module's: reads the tensors, finds the plan and launches it, all
                   without Python; asks `_make` for a plan that it does not have
    OpPlans.slow   the whole call in Python, for what the native module leaves to it: gradients,
                   forward-mode AD, torch.func, negated views, subclasses of torch.Tensor, torch
                   dispatch modes, tensors without memory. It asks the native module for the plan,
                   so plans are in one place and have one key. A call that needs a gradient comes
                   back to OpPlans.call, inside a torch.autograd.Function.

Where the native module cannot be used, `slow` is every call, and each call makes its plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from stoneware.ops import native_call, registration, tensor_checks
from stoneware.ops.backend import Plan
from stoneware.ops.dispatch import Operation
from stoneware.specs.op_spec import OpSpec


class OpPlans:
    """The calls of an op, and their plans; a full table of plans is emptied.

    A plan's key also has `policy.state()` and the epoch, on which the plan depends too.

    A subclass is made in the op's `api.py`, with the op's backends and checks, and has its one instance
    there as `_PLANS`; making it registers the op's operator. Its methods take the arguments of a call:
    the tensors of the spec with out, then the spec's other arguments, backend and config.

    Attributes:
      operation: the op with its backends.
      checks: has two functions, both of which take a call's arguments without backend and config:
        plan(make, *arguments), the plan for every call with arguments of this kind: usually make(problem),
          adapted to the call's tensors. Raises TypeError or ValueError if an argument breaks a rule
        result(*arguments), the shape and the dtype of an out that the call allocates. Sizes may be symbols
          of a trace. Raises ValueError if the operands do not fit
      has_gradients: whether the op's folder has a backward.py, with a `rule` (`stoneware.ops.backward.Rule`).
      spec: of the op.
      operator: the call through the torch operator, for tracing.
      call: call(*tensors, *objects) is a call; returns out.
      plan: plan(*tensors, *objects) is the plan of a call, which is checked.
      fast: the native module's part, a FastCall; None where it cannot be used.
      why_not_fast: the reason for that; empty if it can.
      fused: the calls with an epilogue (`stoneware.ops.fused`).
    """

    operation: Operation
    checks: ModuleType
    has_gradients: ClassVar[bool] = False
    spec: ClassVar[OpSpec]
    operator: ClassVar[Callable[..., torch.Tensor]]
    call: Callable[..., torch.Tensor]

    def __init_subclass__(cls) -> None:
        if "operation" not in vars(cls):
            return  # a subclass of the class of an op
        cls.spec = cls.operation.spec
        api = sys.modules[cls.__module__]
        cls.operator = staticmethod(
            registration.register(
                cls.spec, cls.checks.result, lambda *arguments: api._PLANS.eager(*arguments), cls.has_gradients
            )
        )

    def __init__(self) -> None:
        self._tensors, self._num_tensors = self.spec.tensors, len(self.spec.tensors)
        self._order = [self._tensors.index(name) for name in self.spec.plan_order]
        self._aligned = self._order[:3]  # the operands and out
        self.fused: dict[Any, Any] = {}
        self.fast, self.why_not_fast = self._fast_call()
        if self.fast is not None:
            self.call, self.plan = self.fast.call, self.fast.plan
        else:
            self.call, self.plan = self.slow, lambda *arguments: self._make(*arguments)[0]

    def checked_plan(self, *arguments: Any) -> Plan:
        """Checks the arguments, and makes the plan for every call with arguments of this kind."""
        *call_arguments, backend, config = arguments
        tensors = tensor_checks.check_tensors(self.spec, *call_arguments)
        self.operation.check_argument(backend, config)
        device = tensor_checks.check_one_device(tensors)

        def make(problem: Any) -> Plan:
            return self.operation.plan(problem, device, backend=backend, config=config)

        plan: Plan = self.checks.plan(make, *call_arguments)
        return plan

    def slow(self, *arguments: Any) -> torch.Tensor:
        """A whole call of any kind."""
        return (self.operator if tensor_checks.is_traced(arguments[: self._num_tensors]) else self.run)(*arguments)

    def eager(self, *arguments: Any) -> torch.Tensor:
        """The call as the operator's implementation. Every dispatch mode has seen it, so it must not dispatch
        again."""
        return (self.run if tensor_checks.is_traced(arguments[: self._num_tensors]) else self.call)(*arguments)

    def run(self, *arguments: Any) -> torch.Tensor:
        """A whole call on tensors with memory, in Python."""
        tensors = list(arguments[: self._num_tensors])
        named = zip(self._tensors, tensors)
        if tensor_checks.needs_gradient(tensors):
            if not self.has_gradients or tensors[-1] is not None:
                tensor_checks.refuse_gradients(self.spec.name, named, is_out=self.has_gradients)
            tensor_checks.refuse_tangents(self.spec.name, named)
            from stoneware.ops import backward

            return backward.apply(self.call, backward.rule_of(self.spec), len(tensors) - 1, *arguments)
        plan = self.plan(*arguments)
        tensor_checks.refuse_tangents(self.spec.name, named)
        if any(tensor is not None and tensor.is_neg() for tensor in tensors):
            return self._run_negated(arguments)
        out = tensors[-1]
        if out is None:
            shape, dtype = self.checks.result(*arguments[:-2])
            out = tensors[-1] = torch.empty(shape, dtype=dtype, device=tensors[0].device)
        plan(*[tensors[position] for position in self._order])
        return out

    def _make(self, *arguments: Any) -> tuple[Any, ...]:
        """A new plan for the native module: (plan, is_kept, device, outputs). out is the only output: (shape,
        strides, dtype)."""
        plan = self.checked_plan(*arguments)
        if self.spec.must_be_aligned:  # the key includes whether they are
            tensor_checks.check_addresses([(self.spec.tensors[idx], arguments[idx]) for idx in self._aligned])
        output = native_call.dense(*self.checks.result(*arguments[:-2]))
        return plan, native_call.is_kept(), arguments[0].device, (output,)

    def _run_negated(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """A call with views that torch negates when it reads them, like the imaginary part of a conjugate.
        Kernels read the memory itself."""
        tensors = [tensor if tensor is None else tensor.resolve_neg() for tensor in arguments[: self._num_tensors]]
        result = self.run(*tensors, *arguments[self._num_tensors :])
        out = arguments[self._num_tensors - 1]
        return result if out is None or out is result else out.copy_(result)

    def _fast_call(self) -> tuple[Any, str]:
        """The native module's part of this op, or None and why."""
        spec = self.spec
        optional = [idx for idx, kind in enumerate(spec.inputs.values()) if kind == "Tensor?"]
        return native_call.build(
            self._make,
            self.slow,
            num_tensors=self._num_tensors,
            num_objects=len(spec.arguments) + 2,  # backend and config
            outs=[len(spec.inputs)],
            optional=[*optional, len(spec.inputs)],
            aligned=self._aligned,
            order=self._order,
        )
