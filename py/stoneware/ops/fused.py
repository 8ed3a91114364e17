"""Calls of an op with an epilogue: the function runs in the op's kernel, on the sums in its registers.

    call            what `sw.matmul(..., epilogue=f)` calls: finds the calls of this function, or makes them
    _FusedCalls     the calls of one op with one function: a FastCall, like that of the op itself
    _make           the plan for a kind of call: an open kernel with the function linked in, or, where that
                    cannot be or is not linked yet, the op's own kernel with a float32 result, and the function

A call that needs gradients is fused too, with the sums as a further result (`fused_backward.py`).

Both plans give the same values, up to float32 rounding. Torch dispatch modes and torch.compile get the second
one, so that they see torch's operators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from stoneware.epilogue import linked, source
from stoneware.epilogue.expression import Expression
from stoneware.epilogue.identity import check_function, frozen, identity
from stoneware.epilogue.trace import frames_of
from stoneware.errors import LinkError, TuningMissError, UnsupportedError, quoted
from stoneware.kernels.config import Config
from stoneware.kernels.sm90_kernels import BACKEND as SM90
from stoneware.ops import native_call, tensor_checks
from stoneware.ops.backend import Plan, torch_plan
from stoneware.ops.fused_backward import Trained
from stoneware.ops.fused_lead import KERNEL_US, lead_us
from stoneware.ops.fused_problem import (
    Epilogue,
    main_output,
    narrow_dtype,
    place_of_out_dtype,
    problem_of,
    traced,
    with_sums,
)
from stoneware.ops.plan_cache import OpPlans
from stoneware.runtime import native
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import TORCH_DTYPES
from stoneware.tuning import policy

_LOG = logging.getLogger("stoneware.epilogue")

_MOST_FUNCTIONS = 1024
"""Most functions of an op whose calls are kept."""

MOST_TENSORS = 32
"""kMaxTensors of cc/call/made_plan.h."""

_BYTES_PER_US = 4.8e6
"""The bandwidth of an H200 by its data sheet. An H100 has less, so a fused call saves at least the time of its bytes
at this rate."""

_is_compiling = torch.compiler.is_dynamo_compiling


def call(plans: OpPlans, function: Epilogue | None, inputs: Sequence[torch.Tensor], *arguments: Any) -> Any:
    """A call of the op with an epilogue.

    Args:
      plans: of the op.
      function: function(acc, *inputs) -> the results; None is refused.
      inputs: tensors.
      arguments: of the op's call: its tensors with out, its other arguments, backend and config.

    Returns:
      What the function returns: a tensor or a tuple of them, with float32 results in the call's out dtype.

    Raises:
      TypeError, ValueError: an argument breaks a rule.
      UnsupportedError: the function uses an operator that no kernel can have.
    """
    if function is None:
        raise ValueError(
            f"inputs={quoted(type(inputs))} must come with an epilogue, and epilogue=None; pass a function of the sums "
            "and the inputs, or leave inputs out"
        )
    num_tensors = len(plans.spec.inputs)
    tensors, out, objects = arguments[:num_tensors], arguments[num_tensors], arguments[num_tensors + 1 :]
    if out is not None:
        raise ValueError(f"out of {plans.spec.name} must be None with an epilogue; leave it out, and use the result")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"inputs={quoted(type(inputs))} must be a tuple of tensors; pass inputs=(tensor,)")
    if _is_compiling():
        return _unfused(plans, plans.operator, function, tensors, inputs, objects)
    return calls_of(plans, function, inputs, tensors, objects).call(*tensors, *inputs)


def calls_of(
    plans: OpPlans, function: Epilogue, inputs: Sequence[torch.Tensor], tensors: Sequence[Any], objects: Sequence[Any]
) -> _FusedCalls:
    """The calls of the op with this function, made at the first.

    Args:
      plans, function, inputs: as for `call`.
      tensors: of the op, without out.
      objects: its other arguments, backend and config.
    """
    key = identity(function), len(inputs), getattr(tensors[0], "dtype", None), *objects
    try:
        calls: _FusedCalls | None = plans.fused.get(key)
    except TypeError as error:  # an object that cannot be hashed
        raise TypeError(
            f"epilogue={quoted(function)} must be a function that can be hashed; pass a function"
        ) from error
    if calls is None:
        if len(plans.fused) >= _MOST_FUNCTIONS:
            plans.fused.clear()
        calls = plans.fused[key] = _FusedCalls(plans, frozen(function), tensors, inputs, objects)
    return calls


class _Kind(NamedTuple):
    """A kind of call that can be fused.

    Attributes:
      problem, config: what runs.
      source: the epilogue.
      main: the result that the kernel stores, or None.
    """

    problem: Any
    config: Config
    source: source.Source
    main: int | None


class _FusedCalls:
    """The calls of an op with one epilogue, for one dtype of a and one set of other arguments.

    Args:
      plans: of the op.
      function: the epilogue, frozen: it runs again for each new shape, and in backward.
      tensors, inputs: of the first call.
      objects: the op's other arguments, backend and config.
    """

    def __init__(
        self,
        plans: OpPlans,
        function: Epilogue,
        tensors: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        objects: Sequence[Any],
    ) -> None:
        self.plans, self.function, self.objects = plans, function, tuple(objects)
        self._num_tensors, self._num_inputs = len(tensors), len(inputs)
        self._sums_too: _FusedCalls | None = None
        check_function(function, len(inputs))
        self._check(tensors, inputs)
        self._check_arguments(tensors)
        expression, _ = self._traced(tensors, inputs)
        self._num_outputs, self._is_tuple = len(expression.outputs), expression.is_tuple
        first_out = self._num_tensors + self._num_inputs
        spec = plans.spec
        outs = range(first_out, first_out + self._num_outputs + 1)  # and a row for what the kernel stores in vain
        if outs.stop > MOST_TENSORS:
            raise ValueError(
                f"a call of {spec.name} with an epilogue must have at most {MOST_TENSORS} tensors, optional ones, "
                f"results and one more included, but has {outs.stop}; pass fewer inputs, or join some with torch.stack"
            )
        operands = [0, 1]
        optional = [idx for idx, kind in enumerate(spec.inputs.values()) if kind == "Tensor?"]
        self._nones = (None,) * len(outs)
        self._fast, _ = native_call.build(
            self._make,
            self._slow,
            num_tensors=outs.stop,
            num_objects=0,
            outs=outs,
            optional=[*optional, *outs],
            aligned=[*operands, *range(self._num_tensors, first_out)],
            num_results=self._num_outputs,
        )
        run = self._fast.call if self._fast is not None else self._slow
        self._said: set[str] = set()
        self.call = run if self._num_outputs > 1 or not self._is_tuple else lambda *tensors: (run(*tensors),)

    def plan(self, *tensors: Any) -> Plan:
        """The plan of a call with these tensors, those of the op and the inputs; a fused one has a native launch."""
        return self._fast.plan(*tensors, *self._nones) if self._fast is not None else self._make(*tensors)[0]

    def kernel_plan(self, *tensors: Any) -> tuple[Plan | None, bool]:
        """The plan of the fused kernel as a step of a layer, for a function without inputs.

        Returns:
          The plan, which takes what the plan of the op itself takes; and whether later calls of this kind have the
          same answer. The plan is None where the layer should run the function after the op: the kernel is not linked
          yet, cannot be, or is not predicted to be faster; or rows must have the bits of an unfused call.
        """
        device = self._check(tensors, ())
        expression, shape = self._traced(tensors, ())
        kind = self._kind(tensors, (), expression, shape, device)
        if not isinstance(kind, _Kind) or kind.main is None or policy.is_batch_invariant():
            return None, True
        lead = lead_us(self.plans.operation, kind.problem, device)
        saved_bytes = 2 * math.prod(shape) * TORCH_DTYPES[kind.problem.out_dtype].itemsize
        if lead is None or lead > KERNEL_US + saved_bytes / _BYTES_PER_US:
            return None, True
        kernel = self._linked(kind, must_be=False)
        if kernel is None:
            return None, linked.has_failed(kind.config.kernel, kind.source.text)
        return self._native_plan(kind, kernel, expression, device), True

    def _check(self, tensors: Sequence[Any], inputs: Sequence[Any]) -> Device:
        """Raises TypeError or ValueError unless all are tensors on one device, which it returns."""
        spec = self.plans.spec
        named = tensor_checks.check_tensors(spec, *tensors)
        for position, tensor in enumerate(inputs):
            name = f"inputs[{position}]"
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}; pass a tensor")
            tensor_checks.check_memory(name, tensor)
            named.append((name, tensor))
        return tensor_checks.check_one_device(named)

    def _check_arguments(self, tensors: Sequence[Any]) -> None:
        """Raises what the op raises without an epilogue; a call that torch traces makes these checks itself."""
        if tensor_checks.is_traced(tensors):
            return
        *objects, backend, config = self.objects
        self.plans.operation.check_argument(backend, config)
        self.plans.checks.plan(lambda problem: tensor_checks.run_nothing, *tensors, None, *objects)

    def _traced(self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor]) -> tuple[Expression, tuple[int, ...]]:
        """What the function computes, and the shape of the op's result."""
        shape, dtype = self.plans.checks.result(*tensors, None, *self.objects[:-2])
        return traced(self.function, shape, dtype, inputs, tensors[0].device), tuple(shape)

    def _slow(self, *arguments: Any) -> Any:
        """A whole call of any kind; torch dispatch modes see torch's operators."""
        tensors, inputs = self.split(arguments)
        self._check(tensors, inputs)
        both = (*tensors, *inputs)
        if tensor_checks.needs_gradient(both) and not self._is_unusual(both):
            results = Trained.apply(self, self._with_sums(tensors, inputs), *both)
            return results if self._num_outputs > 1 else results[0]
        results = _unfused(self.plans, self.plans.call, self.function, tensors, inputs, self.objects)
        return results[0] if self._is_tuple and self._num_outputs == 1 else results

    def _is_unusual(self, tensors: Sequence[Any]) -> bool:
        """Whether torch's operators must see a call that needs gradients."""
        return (
            tensor_checks.is_traced(tensors)
            or forward_ad._current_level >= 0
            or torch._C._are_functorch_transforms_active()
            or any(tensor is not None and tensor.is_neg() for tensor in tensors)
        )

    def _with_sums(self, tensors: Sequence[Any], inputs: Sequence[Any]) -> _FusedCalls:
        """The calls that return the op's result too, behind the function's."""
        if self._sums_too is not None:
            return self._sums_too
        function = with_sums(self.function, narrow_dtype(tensors[0].dtype))
        self._sums_too = _FusedCalls(self.plans, function, tensors, inputs, self.objects)
        return self._sums_too

    def split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        end = self._num_tensors + self._num_inputs
        return arguments[: self._num_tensors], arguments[self._num_tensors : end]

    def _make(self, *arguments: Any) -> tuple[Any, ...]:
        """A plan for the native module: (plan, is_kept, device, outputs)."""
        tensors, inputs = self.split(arguments)
        device = self._check(tensors, inputs)
        self._check_arguments(tensors)
        expression, shape = self._traced(tensors, inputs)
        outputs = [native_call.dense(output.shape, output.dtype) for output in expression.outputs]
        kind = self._kind(tensors, inputs, expression, shape, device)
        row: tuple[Sequence[int], torch.dtype] = ((0,), tensors[0].dtype)
        plan, is_final = self._unfused_plan(), True
        if isinstance(kind, _Kind):
            kernel = self._linked(kind)
            if kernel is None:
                is_final = linked.has_failed(kind.config.kernel, kind.source.text)
            else:
                plan = self._fused_plan(kind, kernel, expression, device)
                if kind.main is None:
                    row = ((kind.problem.n,), TORCH_DTYPES[kind.problem.out_dtype])
        elif device.kind == "cuda" and kind not in self._said:
            self._said.add(kind)
            _LOG.info("an epilogue of %s runs after its kernel: %s", self.plans.spec.name, kind)
        outputs.append(native_call.dense(*row))
        return plan, is_final and native_call.is_kept(), tensors[0].device, tuple(outputs)

    def _kind(
        self,
        tensors: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        expression: Expression,
        shape: tuple[int, ...],
        device: Device,
    ) -> _Kind | str:
        """What the fused call runs, or why it cannot be fused."""
        if device.kind != "cuda":
            return f"{device} has no open kernels"
        *objects, backend, config = self.objects
        if backend not in (None, SM90):
            return f"backend={backend!r} was requested"
        operation = self.plans.operation
        problem = problem_of(self.plans, tensors, objects)
        if isinstance(problem, str):
            return problem
        if (problem.m, problem.n) != (math.prod(shape[:-1]), shape[-1]):
            return "it is a batch"
        main = main_output(expression, TORCH_DTYPES[problem.out_dtype])
        has_pairs = [tensor.data_ptr() % 16 == 0 for tensor in inputs]
        try:
            decision = operation.decide(
                problem, device, backend=SM90, config=config, lists_refusals=False, only_open=True
            )
            text = source.write(expression, main=main, has_pairs=has_pairs)
        except UnsupportedError as error:
            return str(error)
        return _Kind(problem, decision.config, text, main)

    def _linked(self, kind: _Kind, *, must_be: bool = True) -> Any | None:
        """The native kernel; None if it is not linked yet, or cannot be.

        Raises:
          TuningMissError: it is not linked yet, `must_be`, and tuning is "error_on_miss".
        """
        kernel, text = kind.config.kernel, kind.source.text
        mode = policy.current_mode()
        if mode == "on_miss" and not policy.is_capturing():
            try:
                return linked.now(kernel, text)
            except (LinkError, UnsupportedError):
                return linked.soon(kernel, text)  # logged once
        found = linked.soon(kernel, text)
        if found is None and must_be and mode == "error_on_miss" and not linked.has_failed(kernel, text):
            raise TuningMissError(
                f"an epilogue of {self.plans.spec.name} must be linked into {kernel} before the call, because tuning "
                "is 'error_on_miss', and it is not; call it once inside sw.tuning(\"on_miss\")"
            )
        return found

    def _fused_plan(self, kind: _Kind, kernel: Any, expression: Expression, device: Device) -> Plan:
        spec = self.plans.spec
        first_out = self._num_tensors + self._num_inputs
        row = first_out + self._num_outputs
        names = list(spec.inputs)
        stored = row if kind.main is None else first_out + kind.main
        positions = [stored if name == "out" else names.index(name) for name in spec.plan_order]
        positions += [self._num_tensors + position for _, position in kind.source.inputs]
        positions += [first_out + position for _, position in kind.source.outputs]
        plan = self._native_plan(kind, kernel, expression, device)

        def run(*tensors: torch.Tensor | None) -> None:
            plan(*[tensors[position] for position in positions])

        run.native_launch = [(plan.native_launch, positions, -1)]  # type: ignore[attr-defined]
        return run

    def _native_plan(self, kind: _Kind, kernel: Any, expression: Expression, device: Device) -> Any:
        """The plan of the linked kernel: it takes the tensors of the op's plan, then the inputs and the outputs that
        the epilogue itself loads and stores."""
        minima = []
        for index, (_, position) in enumerate(kind.source.outputs, start=len(kind.source.inputs)):
            output = expression.outputs[position]
            if output.kind == "row_max":
                minima.append((index, torch.Size(output.shape).numel()))
        backend: Any = self.plans.operation.backends[SM90]
        launch = backend.launch(
            kind.problem,
            kind.config,
            device,
            kernel,
            epilogue=kind.source.parameters,
            pointers=[offset for offset, _ in (*kind.source.inputs, *kind.source.outputs)],
            minima=minima,
            discards_out=kind.main is None,
        )
        assert device.ordinal is not None  # a GPU of this machine has one
        return native.plan(launch, device.ordinal)

    def _unfused_plan(self) -> Plan:
        num_tensors = self._num_tensors + self._num_inputs

        def results(*tensors: Any) -> Any:
            return self._slow(*tensors)

        def run(*tensors: Any) -> None:
            found = results(*tensors[:num_tensors])
            outs = tensors[num_tensors : num_tensors + self._num_outputs]
            for out, result in zip(outs, found if self._num_outputs > 1 else (found,)):
                out.copy_(result)

        return torch_plan(run, native_call.Direct(results, range(num_tensors)))


def _unfused(
    plans: OpPlans,
    run: Callable[..., torch.Tensor],
    function: Epilogue,
    tensors: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    objects: Sequence[Any],
) -> Any:
    """The op by its own kernel, and the function after it."""
    spec = plans.spec
    shape, dtype = plans.checks.result(*tensors, None, *objects[:-2])
    of_elements = frames_of(tuple(shape))
    acc = run(*_with_float32(tensors, plans), None, *_wide(spec, objects)).float()
    returned = function(acc, *inputs)
    is_tuple = isinstance(returned, (tuple, list))
    results: list[torch.Tensor] = []
    for result in returned if is_tuple else (returned,):
        if tuple(result.shape) not in of_elements:  # the maximum of each row
            result = result.float()
        elif result.dtype == torch.float32:
            result = result.to(dtype)
        # A fused call gives each result memory of its own.
        results.append(result.clone() if _shares_memory(result, (*inputs, *results)) else result)
    return tuple(results) if is_tuple else results[0]


def _shares_memory(result: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether one of the others has the same memory; in a trace, whether it is one of them."""
    if any(result is other for other in others):
        return True
    if _is_compiling() or tensor_checks.is_traced((result, *others)):
        return False
    address = result.untyped_storage().data_ptr()
    return any(address == other.untyped_storage().data_ptr() for other in others)


def _with_float32(tensors: Sequence[Any], plans: OpPlans) -> list[Any]:
    """The op's tensors, with a bias for a float32 result."""
    is_bias = [name == "bias" for name in plans.spec.inputs]
    return [tensor.float() if bias and tensor is not None else tensor for tensor, bias in zip(tensors, is_bias)]


def _wide(spec: Any, objects: Sequence[Any]) -> list[Any]:
    """The op's other arguments with a float32 result, which grouped_mm does not have."""
    wide = list(objects)
    if spec.name != "grouped_mm":
        wide[place_of_out_dtype(spec)] = torch.float32
        wide[-1] = None  # a config is of a kernel with 16 bits
    return wide


def prepare(op: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Calls an op with an epilogue, and waits until the epilogue is linked, so that later calls are fused.

    What was linked is kept on the disk: on a machine with the same GPU, a new process links nothing.

    Args:
      op: `sw.matmul`, `sw.scaled_mm` or `sw.grouped_mm`.
      arguments, options: of the call, with epilogue= and inputs=. The shapes choose the kernel.

    Raises:
      What the op raises.
    """
    op(*arguments, **options)
    linked.wait()
