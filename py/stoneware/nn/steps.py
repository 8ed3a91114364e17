"""The steps of a layer, listed once. They run as one native call, or each as a call of its op.

    Quantize, ScaledMM, ...   ops: a call computes tensors; `plan` is for native calls
    Step                      an op and the names of its tensors
    Steps                     what a layer computes; `run` calls the ops: for autograd, traces and torch dispatch modes
    native_call               the same as one native call

In a native call the tensors between the steps are allocated with the results and dropped. A host that is busy with the
layers of a small batch saves half of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stoneware.nn.recipes import Cast
from stoneware.ops import native_call as native
from stoneware.ops.matmul import api as matmul_api
from stoneware.ops.native_call import Output, dense
from stoneware.ops.scaled_mm import api as scaled_mm_api
from stoneware.quantizing import api as quantizing
from stoneware.quantizing import fused, kernels
from stoneware.specs.matmul import SPEC as MATMUL
from stoneware.specs.scaled_mm import SPEC as SCALED_MM

Call = Callable[..., Any]

NONE = "none"
"""The name of an input that is absent."""


class Op:
    """What a step computes.

    Attributes:
      order: positions of the step's tensors, inputs then outputs, in the order of the plan's arguments; None: the same.
    """

    order: Sequence[int] | None = None

    def __call__(self, dtype: torch.dtype, *inputs: Any) -> Sequence[torch.Tensor]:
        """The outputs; `dtype` is that of what is multiplied out. Dynamo can trace it."""
        raise NotImplementedError

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        """The plan for inputs like these, and its outputs."""
        raise NotImplementedError

    def arguments(self, *tensors: Any) -> Sequence[Any]:
        """The arguments of a plan that is called, from the step's tensors: matrices of their rows. A kernel reads
        memory, and takes the tensors as they are."""
        return tensors


class Step(NamedTuple):
    """An op, and the names of its tensors. A name that is an input and an output is read by the native call, and
    written by the op."""

    op: Op
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Quantize(Op):
    """`sw.quantize` of x [..., k] as a matrix of its rows.

    Attributes:
      cast: how.
      transpose: of `sw.quantize`.
      shares: whether a step with the transpose shares a reduction with a step without it; see `kernels.plan`.
    """

    cast: Cast
    transpose: bool | str = False
    shares: bool = False

    def __call__(self, dtype: torch.dtype, x: torch.Tensor) -> Sequence[torch.Tensor]:
        cast = self.cast
        return quantizing.quantize(
            rows_of(x), cast.scales, transpose=self.transpose, dtype=cast.dtype, power_of_two=cast.power_of_two
        )

    def plan(self, dtype: torch.dtype, x: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        cast = self.cast
        return quantizing.make_plan(
            rows_of(x), cast.scales, self.transpose, cast.dtype, cast.power_of_two, shares=self.shares
        )

    def arguments(self, x: torch.Tensor, *outputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.reshape(-1, x.shape[-1]), *outputs


def quantize(name: str, cast: Cast, *, transpose: bool | str = False, shares: bool = False) -> Step:
    """The step that quantizes the tensor of this name, into NAME8 and scale_NAME, and NAME_t8 and scale_NAME_t."""
    outputs: tuple[str, ...] = ()
    if transpose is not True:
        outputs += (f"{name}8", f"scale_{name}")
    if transpose is not False:
        outputs += (f"{name}_t8", f"scale_{name}_t")
    elif shares and cast.scales == "row":
        outputs += (f"scale_{name}_t",)
    if kernels.has_partial(cast.scales, transpose, shares):
        outputs += (f"amax_{name}" if shares or transpose is not True else f"amax_{name}_t",)
    return Step(Quantize(cast, transpose, shares), (name,), outputs)


def shared(name: str, cast: Cast) -> str:
    """The name of the reduction that two steps `quantize` share."""
    return f"amax_{name}" if cast.scales == "tensor" else f"scale_{name}_t"


@dataclass(frozen=True)
class ScaledMM(Op):
    """a [..., k] @ b [n, k]^T + bias with scales, as `sw.quantize` returns them for a and for b."""

    use_fast_accum: bool = True
    order = tuple(map(("a", "b", "scale_a", "scale_b", "bias", "out").index, SCALED_MM.plan_order))

    def __call__(self, dtype: torch.dtype, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Any:
        transposed = scale_b.t() if scale_b.ndim == 2 else scale_b
        y = scaled_mm_api.scaled_mm(
            rows_of(a), b.t(), _rows_of_scale(scale_a), transposed, bias, dtype, use_fast_accum=self.use_fast_accum
        )
        return (y,)

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        a, b, _, scale_a, scale_b, bias = self.arguments(*(*inputs, None))
        plan = scaled_mm_api._PLANS.plan(
            a, b, scale_a, scale_b, bias, None, dtype, self.use_fast_accum, None, None
        )  # fmt: skip
        return plan, [dense((a.shape[0], b.shape[1]), dtype)]

    def arguments(self, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any) -> Sequence[Any]:
        return (
            a.reshape(-1, a.shape[-1]),
            b.t(),
            out if out is None else out.reshape(-1, out.shape[-1]),
            _rows_of_scale(scale_a),
            scale_b.t() if scale_b.ndim == 2 else scale_b,
            bias,
        )


def scaled_mm(a: str, b: str, result: str, *, bias: str = NONE, use_fast_accum: bool = True) -> Step:
    """The step that multiplies the quantized a and b of these names."""
    return Step(ScaledMM(use_fast_accum), (f"{a}8", f"{b}8", f"scale_{a}", f"scale_{b}", bias), (result,))


@dataclass(frozen=True)
class Matmul(Op):
    """a [..., m]^T @ b [..., n] of their rows, in 16 bits; the result has the layer's dtype."""

    order = tuple(map(("a", "b", "bias", "out").index, MATMUL.plan_order))

    def __call__(self, dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, bias: None) -> Sequence[torch.Tensor]:
        a, b = (rows_of(tensor if dtype != torch.float32 else tensor.bfloat16()) for tensor in (a, b))
        return (matmul_api.matmul(a.t(), b, out_dtype=dtype),)

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        a, b, *_ = self.arguments(*(*inputs, None))
        plan = matmul_api._PLANS.plan(a, b, None, None, dtype, None, None)
        # Without its native launch, which would read 32 bits.
        called = plan if inputs[0].dtype == a.dtype else lambda *tensors: plan(*tensors)
        return called, [dense((a.shape[0], b.shape[1]), dtype)]

    def arguments(self, a: torch.Tensor, b: torch.Tensor, bias: None, out: Any) -> Sequence[Any]:
        if a.dtype == torch.float32:
            a, b = a.bfloat16(), b.bfloat16()
        return a.reshape(-1, a.shape[-1]).t(), b.reshape(-1, b.shape[-1]), out, bias


@dataclass(frozen=True)
class Transpose(Op):
    """The transpose of fp8 [n, k], dense, and ones [k, 1], for scales that another operand has."""

    def __call__(self, dtype: torch.dtype, x8: torch.Tensor) -> Sequence[torch.Tensor]:
        return x8.t().contiguous(), torch.ones(x8.shape[1], 1, device=x8.device)

    def plan(self, dtype: torch.dtype, x8: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        n, k = x8.shape
        return fused.transpose_plan(x8), [dense((k, n), x8.dtype), dense((k, 1), torch.float32)]


@dataclass(frozen=True)
class TransposeScales(Op):
    """The transpose of scales of blocks, dense."""

    def __call__(self, dtype: torch.dtype, scale: torch.Tensor) -> Sequence[torch.Tensor]:
        return (scale.t().contiguous(),)

    def plan(self, dtype: torch.dtype, scale: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        def run(scale: torch.Tensor, transposed: torch.Tensor) -> None:
            transposed.copy_(scale.t())

        return run, [dense(scale.t().shape, scale.dtype)]


@dataclass(frozen=True)
class ScaleRows(Op):
    """x [..., k] times factors [k, 1], quantized with a scale for each row."""

    cast: Cast

    def __call__(self, dtype: torch.dtype, x: torch.Tensor, factors: torch.Tensor) -> Sequence[torch.Tensor]:
        # In x's dtype, which has kernels: relative to the largest factor; float16 would overflow otherwise.
        largest = factors.amax(0)
        values, scale = Quantize(self.cast)(dtype, rows_of(x) * (factors / largest).t().to(x.dtype))
        return values, scale * largest

    def plan(self, dtype: torch.dtype, x: torch.Tensor, factors: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        rows = rows_of(x)
        outputs = [dense(rows.shape, self.cast.dtype), dense((rows.shape[0], 1), torch.float32)]
        return fused.scaled_rows_plan(rows, factors, self.cast.power_of_two), outputs

    def arguments(self, x: torch.Tensor, *others: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.reshape(-1, x.shape[-1]), *others


@dataclass(frozen=True)
class SiluMul(Op):
    """silu(gate) * up of z [m, 2 k], quantized with a scale for each row; only in native calls."""

    cast: Cast

    def plan(self, dtype: torch.dtype, z: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        m, k = z.shape[0], z.shape[1] // 2
        outputs = [dense((m, k), self.cast.dtype), dense((m, 1), torch.float32)]
        return fused.silu_mul_plan(z, self.cast.power_of_two), outputs


@dataclass(frozen=True)
class RMSNorm(Op):
    """A norm of x [..., k], and the same quantized with a scale for each row; only in native calls."""

    eps: float
    cast: Cast

    def plan(self, dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        rows = rows_of(x)
        outputs = [dense(rows.shape, dtype), dense(rows.shape, self.cast.dtype), dense((len(rows), 1), torch.float32)]
        return fused.rms_norm_plan(rows, weight, self.eps, self.cast.power_of_two), outputs

    def arguments(self, x: torch.Tensor, weight: torch.Tensor, *outputs: torch.Tensor) -> Sequence[torch.Tensor]:
        y, values, scale = outputs
        return rows_of(x), weight, rows_of(y), rows_of(values), scale


@dataclass(frozen=True)
class Steps:
    """What a layer computes.

    Attributes:
      inputs: names of the tensors of a call. The first has the layer's dtype.
      results: names of what it returns.
      steps: in the order in which they run.
      rows: results that have the leading dimensions of the first input; the others are matrices.
    """

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    steps: tuple[Step, ...]
    rows: tuple[str, ...] = ()

    def run(self, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
        """The results, by calls of the ops."""
        first = tensors[0]
        assert first is not None
        named: dict[str, Any] = dict(zip(self.inputs, tensors))
        for step in self.steps:
            outputs = step.op(first.dtype, *[named.get(name) for name in step.inputs])
            named.update(zip(step.outputs, outputs))
        for name in self.rows:
            named[name] = named[name].reshape(*first.shape[:-1], named[name].shape[-1])
        return [named[name] for name in self.results]


def native_call(steps: Steps, slow: Call, *, optional: Sequence[str] = (), check: Call | None = None) -> Call:
    """call(*inputs) -> the result, or a tuple of several, without Python for the steps that have kernels of ours.

    Args:
      steps: what it computes.
      slow: slow(*inputs) -> results, for calls that are unusual: gradients, traces, torch dispatch modes.
      optional: inputs that may be None.
      check: check(*inputs) raises the errors of inputs that do not fit.
    """
    inputs, num_inputs = steps.inputs, len(steps.inputs)
    written = dict.fromkeys(name for step in steps.steps for name in step.outputs)
    outs = [*steps.results, *(name for name in written if name not in (*inputs, *steps.results))]
    # A name without a tensor comes last, and is always None.
    names = (*inputs, *outs, NONE)
    positions = {name: position for position, name in enumerate(names)}

    def make(*tensors: Any) -> tuple[Any, ...]:
        if check is not None:
            check(*tensors[:num_inputs])
        first = tensors[0]
        named = dict(zip(names, tensors))
        outputs: dict[str, Output] = {}
        # A view whose rows are not one after another is copied at each call.
        is_direct = all(
            rows_of(one).data_ptr() == one.data_ptr() for one in tensors[:num_inputs] if one is not None and one.numel()
        )
        launches = []
        for step in steps.steps:
            operands = [
                native.empty(outputs[name], first.device) if name in outputs else named[name] for name in step.inputs
            ]
            plan, of_step = step.op.plan(first.dtype, *operands)
            outputs.update(item for item in zip(step.outputs, of_step) if item[0] not in inputs)
            launches.append(_launch(step, plan, positions, is_direct))
        for name in steps.rows:
            shape, _, dtype = outputs[name]
            outputs[name] = dense((*first.shape[:-1], shape[-1]), dtype)
        return _Plan(launches), native.is_kept(), first.device, tuple(outputs[name] for name in outs)

    positions_of_outs = range(num_inputs, num_inputs + len(outs))
    fast, _ = native.build(
        make,
        lambda *tensors: slow(*tensors[:num_inputs]),
        num_tensors=len(names),
        outs=positions_of_outs,
        optional=[*(positions[name] for name in optional), *positions_of_outs, positions[NONE]],
        aligned=[position for position, name in enumerate(inputs) if name not in optional],
        num_results=len(steps.results),
    )
    if fast is None:
        return slow
    call, nothing = fast.call, (None,) * (len(outs) + 1)
    return lambda *tensors: call(*tensors, *nothing)


class _Plan(NamedTuple):
    """A plan of several steps: (a capsule or a function, the positions of its tensors) for each."""

    native_launch: list[tuple[Any, list[int]]]


def _launch(step: Step, plan: Any, positions: dict[str, int], is_direct: bool) -> tuple[Any, list[int]]:
    """A step of a native call."""
    at = [positions[name] for name in (*step.inputs, *step.outputs)]
    if is_direct and (capsule := getattr(plan, "native_launch", None)) is not None:
        return capsule, at if step.op.order is None else [at[position] for position in step.op.order]
    arguments = step.op.arguments
    return lambda *tensors: plan(*arguments(*tensors)), at


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _rows_of_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.shape == (1,) else scale.reshape(-1, scale.shape[-1])
