"""The steps of a layer, listed once. They run as one native call, or each as a call of its op.

    Quantize, ScaledMM, ...   ops: a call returns tensors; `plan` is for native calls
    Step                      an op and the names of its tensors
    Steps                     the steps of a layer; `run` calls the ops: for autograd, traces and torch dispatch modes
    native_call               the same as one native call

A native call allocates the tensors between the steps together with the results, and drops them. With small batches,
where the host is the limit, this halves the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stoneware.nn.recipes import Cast
from stoneware.ops import native_call as native
from stoneware.ops.backend import is_torch_plan
from stoneware.ops.matmul import api as matmul_api
from stoneware.ops.native_call import Output, dense
from stoneware.ops.scaled_mm import api as scaled_mm_api
from stoneware.quantizing import api as quantizing
from stoneware.quantizing import fused, kernels
from stoneware.quantizing.api import Quantization
from stoneware.specs.matmul import SPEC as MATMUL
from stoneware.specs.scaled_mm import SPEC as SCALED_MM

NONE = "none"
"""The name of a missing input."""


class Op:
    """The operation of a step.

    Attributes:
      order: positions of the step's tensors, inputs then outputs, in the order of the plan's arguments; None: the same.
    """

    order: Sequence[int] | None = None

    def __call__(self, dtype: torch.dtype, *inputs: Any) -> Sequence[torch.Tensor]:
        """The outputs; results of matmuls have this dtype. Dynamo can trace it."""
        raise NotImplementedError

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        """The plan for inputs of this kind, and its outputs; `NoKernel` if the layer must run by its ops."""
        raise NotImplementedError

    def direct(self, dtype: torch.dtype, plan: Any, shape: Sequence[int]) -> Callable[..., Any] | None:
        """What returns the step's output from its inputs with torch's own kernels, if the plan runs these; or None.

        Args:
          dtype: the layer's.
          plan: of the step.
          shape: of the output.
        """
        return None

    def arguments(self, *tensors: Any) -> Sequence[Any]:
        """The arguments of a plan in Python, from the step's tensors: matrices of their rows. A native launch reads
        memory, and takes the tensors themselves."""
        return tensors


class NoKernel(NamedTuple):
    """The plan of an op that has no kernel for inputs of this kind.

    Attributes:
      is_final: whether it has none later either.
    """

    is_final: bool


class Step(NamedTuple):
    """An op, and the names of its tensors. If a name is both input and output, the native call reads it and the op
    writes it."""

    op: Op
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Quantize(Op):
    """`sw.quantize` of matrices: each has the rows of one or of several tensors, in order."""

    items: tuple[Quantization, ...]

    def __call__(self, dtype: torch.dtype, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        results: list[Any] = []
        parts = iter(tensors)
        for item in self.items:
            own = [rows_of(next(parts)) for _ in range(item.num_parts)]
            found = quantizing.quantize(
                own[0] if len(own) == 1 else torch.cat(own),
                item.scales, transpose=item.transpose, dtype=item.dtype, power_of_two=item.power_of_two,
            )  # fmt: skip
            # Partial results are for native calls alone.
            results += [*found, *[None] * (_num_outputs(item) - len(found))]
        return results

    def plan(self, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        return quantizing.make_plan([rows_of(tensor) for tensor in tensors], self.items)

    def arguments(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        num_inputs = sum(item.num_parts for item in self.items)
        return *(rows_of(tensor) for tensor in tensors[:num_inputs]), *tensors[num_inputs:]


def _num_outputs(item: Quantization) -> int:
    return len(item.outputs([1], 1)) + kernels.has_partial(item.scales, item.transpose, item.shares)


def quantize(
    name: str, cast: Cast, *, transpose: bool | str = False, shares: bool = False, parts: Sequence[str] = ()
) -> Step:
    """The step that quantizes the tensor of this name, into NAME8 and scale_NAME, and NAME_t8 and scale_NAME_t.

    Args:
      name: of the tensor.
      cast, transpose: see `sw.quantize`.
      shares: whether a step with the transpose shares a reduction with a step without it; see `kernels.Task`.
      parts: names of the tensors that have its rows, if no tensor has this name itself.
    """
    outputs: tuple[str, ...] = ()
    if transpose is not True:
        outputs += (f"{name}8", f"scale_{name}")
    if transpose is not False:
        outputs += (f"{name}_t8", f"scale_{name}_t")
    elif shares and cast.scales == "row":
        outputs += (f"scale_{name}_t",)
    if kernels.has_partial(cast.scales, transpose, shares):
        outputs += (f"amax_{name}" if shares or transpose is not True else f"amax_{name}_t",)
    inputs = tuple(parts) or (name,)
    item = Quantization(cast.scales, transpose, cast.dtype, cast.power_of_two, shares, len(inputs))
    return Step(Quantize((item,)), inputs, outputs)


def together(*quantized: Step) -> Step:
    """Steps `quantize` as one: their kernels work on several matrices in a launch."""
    items: tuple[Quantization, ...] = ()
    for step in quantized:
        assert isinstance(step.op, Quantize)
        items += step.op.items
    inputs = [name for step in quantized for name in step.inputs]
    outputs = [name for step in quantized for name in step.outputs]
    return Step(Quantize(items), tuple(inputs), tuple(outputs))


def shared(name: str, cast: Cast) -> str:
    """The name of the reduction that two steps `quantize` share."""
    return f"amax_{name}" if cast.scales == "tensor" else f"scale_{name}_t"


@dataclass(frozen=True)
class ScaledMM(Op):
    """a [..., k] @ b [n, k]^T + bias with scales, as `sw.quantize` returns them for a and for b."""

    use_fast_accum: bool = True
    plans = scaled_mm_api._PLANS
    order = tuple(map(("a", "b", "scale_a", "scale_b", "bias", "out").index, SCALED_MM.plan_order))

    def __call__(self, dtype: torch.dtype, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> Any:
        a, b, _, scale_a, scale_b, bias = self.arguments(a, b, scale_a, scale_b, bias, None)
        y = scaled_mm_api.scaled_mm(a, b, scale_a, scale_b, bias, dtype, use_fast_accum=self.use_fast_accum)
        return (y,)

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        tensors, objects = self.call(dtype, *inputs)
        return self.plans.plan(*tensors, None, *objects), [dense((tensors[0].shape[0], tensors[1].shape[1]), dtype)]

    def call(self, dtype: torch.dtype, *inputs: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors of a call of the op, without out, and its other arguments."""
        a, b, _, scale_a, scale_b, bias = self.arguments(*(*inputs, None))
        return (a, b, scale_a, scale_b, bias), (dtype, self.use_fast_accum, None, None)

    def direct(self, dtype: torch.dtype, plan: Any, shape: Sequence[int]) -> Callable[..., Any] | None:
        if not is_torch_plan(plan) or plan.direct is None:
            return None
        function, positions, values = plan.direct
        is_matrix = len(shape) == 2

        def run(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> torch.Tensor:
            arguments = self.arguments(a, b, scale_a, scale_b, bias, None)
            y: torch.Tensor = function(*[arguments[position] for position in positions], *values)
            return y if is_matrix else y.view(shape)

        return run

    def arguments(self, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any) -> Sequence[Any]:
        return (
            a if a.ndim == 2 else a.reshape(-1, a.shape[-1]),
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
    """a @ b of their rows, in 16 bits; the result has the layer's dtype.

    Attributes:
      layout: "t" for each of a and b that is transposed, otherwise "n".
    """

    layout: str
    plans = matmul_api._PLANS
    order = tuple(map(("a", "b", "bias", "out").index, MATMUL.plan_order))

    def __call__(self, dtype: torch.dtype, a: torch.Tensor, b: torch.Tensor, bias: Any) -> Sequence[torch.Tensor]:
        a, b, _, bias = self.arguments(a, b, bias, None)
        return (matmul_api.matmul(a, b, bias, out_dtype=dtype),)

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        (a, b, bias), objects = self.call(dtype, *inputs)
        plan = self.plans.plan(a, b, bias, None, *objects)
        # Not its native launch, which would read 32 bits.
        launch = plan if inputs[0].dtype == a.dtype else lambda *tensors: plan(*tensors)
        return launch, [dense((a.shape[0], b.shape[1]), dtype)]

    def call(self, dtype: torch.dtype, *inputs: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors of a call of the op, without out, and its other arguments."""
        a, b, _, bias = self.arguments(*(*inputs, None))
        return (a, b, bias), (dtype, False, None, None)

    def direct(self, dtype: torch.dtype, plan: Any, shape: Sequence[int]) -> Callable[..., Any] | None:
        return _TORCH_MATMULS[self.layout] if dtype != torch.float32 and is_torch_plan(plan) else None

    def arguments(self, a: torch.Tensor, b: torch.Tensor, bias: Any, out: Any) -> Sequence[Any]:
        if a.dtype == torch.float32:
            a, b = a.bfloat16(), b.bfloat16()
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        is_a_transposed, is_b_transposed = (letter == "t" for letter in self.layout)
        return (
            a.t() if is_a_transposed else a,
            b.t() if is_b_transposed else b,
            out if out is None else out.reshape(-1, out.shape[-1]),
            bias,
        )


def _product(a: torch.Tensor, b: torch.Tensor, bias: None) -> torch.Tensor:
    return torch.matmul(a, b)


def _product_of_rows(a: torch.Tensor, b: torch.Tensor, bias: None) -> torch.Tensor:
    """a [..., m]^T @ b [..., n]."""
    if a.ndim != 2:
        a, b = rows_of(a), rows_of(b)
    return torch.mm(a.t(), b)


_TORCH_MATMULS: dict[str, Callable[..., torch.Tensor]] = {
    "nt": torch.nn.functional.linear,
    "nn": _product,
    "tn": _product_of_rows,
}
"""Layout -> the matmul of (a, b, bias)."""


@dataclass(frozen=True)
class Activated(Op):
    """activation(a @ b + bias) in the matmul's kernel, from its float32 sums; only in native calls.

    Attributes:
      matmul: the op.
      activation: a pointwise function; see `stoneware.ops.fused`.
    """

    matmul: ScaledMM | Matmul
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        return self.matmul.order

    def plan(self, dtype: torch.dtype, *inputs: Any) -> tuple[Any, Sequence[Output]]:
        from stoneware.ops import fused as epilogues

        tensors, objects = self.matmul.call(dtype, *inputs)
        calls = epilogues.calls_of(self.matmul.plans, self.activation, (), tensors, objects)
        plan, is_final = calls.kernel_plan(*tensors)
        return plan or NoKernel(is_final), [dense((tensors[0].shape[0], tensors[1].shape[1]), dtype)]

    def arguments(self, *tensors: Any) -> Sequence[Any]:
        return self.matmul.arguments(*tensors)


@dataclass(frozen=True)
class SiluMul(Op):
    """silu(gate) * up of z [m, 2 k], quantized with the scales of a cast by rows or by blocks; only in native calls."""

    cast: Cast

    def plan(self, dtype: torch.dtype, z: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        m, k = z.shape[0], z.shape[1] // 2
        outputs = Quantization(self.cast.scales, False, self.cast.dtype, self.cast.power_of_two).outputs([m], k)
        plan = fused.silu_mul_plan(z, self.cast.power_of_two, self.cast.scales)
        return NoKernel(is_final=True) if plan is None else plan, outputs


@dataclass(frozen=True)
class SwiGLUGrad(Op):
    """The gradient of z [m, 2 n], and h, from z and dh [m, n], where h = silu(gate) * up; only in native calls.

    Both are quantized with a scale for each row: dz, its transpose, and that of h. With factors [2 n, 1] the first is
    dz times these; the transpose is that of dz.
    """

    cast: Cast

    def plan(
        self, dtype: torch.dtype, z: torch.Tensor, dh: torch.Tensor, factors: torch.Tensor | None = None
    ) -> tuple[Any, Sequence[Output]]:
        m, n = dh.shape
        outputs = []
        for rows, columns in ((m, 2 * n), (2 * n, m), (n, m)):
            outputs += [dense((rows, columns), self.cast.dtype), dense((rows, 1), torch.float32)]
        partials = [dense(shape, torch.int32) for shape in kernels.swiglu_partial_shapes(m, n)]
        return fused.swiglu_grad_plan(z, dh, self.cast.power_of_two, factors), [*outputs, *partials]


@dataclass(frozen=True)
class Activation(Op):
    """silu(gate) * up [..., n], in 16 bits; only in native calls."""

    def plan(self, dtype: torch.dtype, gate: torch.Tensor, up: torch.Tensor) -> tuple[Any, Sequence[Output]]:
        rows = rows_of(gate)
        return fused.activation_plan(rows, rows_of(up)), [dense(rows.shape, dtype)]

    def arguments(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [rows_of(tensor) for tensor in tensors]


@dataclass(frozen=True)
class ActivationGrad(Op):
    """The gradients of gate and up [..., n] in 16 bits, from dh, gate and up; only in native calls."""

    order = (1, 2, 0, 3, 4)

    def plan(
        self, dtype: torch.dtype, dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[Any, Sequence[Output]]:
        rows = rows_of(gate)
        return fused.activation_grad_plan(rows, rows_of(up), rows_of(dh)), [dense(rows.shape, dtype)] * 2

    def arguments(self, dh: torch.Tensor, gate: torch.Tensor, *others: torch.Tensor) -> Sequence[torch.Tensor]:
        up, *outputs = others
        return [rows_of(tensor) for tensor in (gate, up, dh, *outputs)]


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
    """The steps of a layer.

    Attributes:
      inputs: names of the tensors of a call. The first has the layer's dtype.
      results: names of the results.
      steps: the steps, in order.
      rows: results that have the leading dimensions of the first input; the others are matrices.
    """

    inputs: tuple[str, ...]
    results: tuple[str, ...]
    steps: tuple[Step, ...]
    rows: tuple[str, ...] = ()

    def run(self, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
        """The results, with a call of the op for each step."""
        first = tensors[0]
        assert first is not None
        tensor_of: dict[str, Any] = dict(zip(self.inputs, tensors))
        for step in self.steps:
            outputs = step.op(first.dtype, *[tensor_of.get(name) for name in step.inputs])
            tensor_of.update(zip(step.outputs, outputs))
        for name in self.rows:
            tensor_of[name] = tensor_of[name].reshape(*first.shape[:-1], tensor_of[name].shape[-1])
        return [tensor_of[name] for name in self.results]


def native_call(
    steps: Steps,
    slow: Callable[..., Any],
    *,
    optional: Sequence[str] = (),
    check: Callable[..., Any] | None = None,
    is_layer: bool = False,
) -> Callable[..., Any]:
    """call(*inputs) -> the result, or a tuple of several. Steps with a native launch run without Python.

    Args:
      steps: the steps.
      slow: slow(*inputs) -> results, for unusual calls: gradients, traces, torch dispatch modes.
      optional: inputs that may be None.
      check: check(*inputs) raises an error for inputs that do not fit.
      is_layer: see `stoneware.ops.native_call.build`.
    """
    inputs, num_inputs = steps.inputs, len(steps.inputs)
    step_output_names = dict.fromkeys(name for step in steps.steps for name in step.outputs)
    outs = [*steps.results, *(name for name in step_output_names if name not in (*inputs, *steps.results))]
    # NONE comes last; its tensor is always None.
    names = (*inputs, *outs, NONE)
    positions = {name: position for position, name in enumerate(names)}

    def make(*tensors: Any) -> tuple[Any, ...]:
        if check is not None:
            check(*tensors[:num_inputs])
        first = tensors[0]
        tensor_of = dict(zip(names, tensors))
        outputs: dict[str, Output] = {}
        # A view whose rows are not contiguous is copied at each call.
        is_direct = all(
            rows_of(tensor).data_ptr() == tensor.data_ptr()
            for tensor in tensors[:num_inputs]
            if tensor is not None and tensor.numel()
        )
        launches = []
        for step in steps.steps:
            operands = [
                native.empty(outputs[name], first.device) if name in outputs else tensor_of[name]
                for name in step.inputs
            ]
            plan, step_outputs = step.op.plan(first.dtype, *operands)
            if isinstance(plan, NoKernel):
                nothing = [dense((0,), first.dtype)] * len(outs)
                is_kept = plan.is_final and native.is_kept()
                return native.Direct(slow, range(num_inputs)), is_kept, first.device, tuple(nothing)
            for name, output in zip(step.outputs, step_outputs):
                if name not in inputs:
                    shape, _, dtype = output
                    outputs[name] = dense((*first.shape[:-1], shape[-1]), dtype) if name in steps.rows else output
            function = step.op.direct(first.dtype, plan, outputs[step.outputs[0]][0]) if is_direct else None
            launches.append(_launch(step, plan, function, positions, is_direct))
        return _Launches(launches), native.is_kept(), first.device, tuple(outputs[name] for name in outs)

    out_positions = range(num_inputs, num_inputs + len(outs))
    fast, _ = native.build(
        make,
        lambda *tensors: slow(*tensors[:num_inputs]),
        num_tensors=len(names),
        outs=out_positions,
        optional=[*(positions[name] for name in optional), *out_positions, positions[NONE]],
        aligned=[position for position, name in enumerate(inputs) if name not in optional],
        num_results=len(steps.results),
        is_layer=is_layer,
    )
    call: Callable[..., Any] = slow if fast is None else fast.call
    return call


class _Launches(NamedTuple):
    """The plan of several steps; see `_launch`."""

    native_launch: list[tuple[Any, list[int], int]]


def _launch(
    step: Step, plan: Any, function: Callable[..., Any] | None, positions: dict[str, int], is_direct: bool
) -> tuple[Any, list[int], int]:
    """A step of a native call: a capsule or a function, the positions of its tensors, and that of the result that it
    returns, or -1."""
    at = [positions[name] for name in (*step.inputs, *step.outputs)]
    if function is not None and len(step.outputs) == 1:
        return function, at[:-1], at[-1]
    if is_direct and (capsule := getattr(plan, "native_launch", None)) is not None:
        return capsule, at if step.op.order is None else [at[position] for position in step.op.order], -1
    arguments = step.op.arguments
    return lambda *tensors: plan(*arguments(*tensors)), at, -1


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] as a matrix."""
    return x.reshape(-1, x.shape[-1])


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Dense matrices of one dtype as one, row after row. As bytes, because torch.autocast refuses fp8."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _rows_of_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.ndim <= 2 else scale.reshape(-1, scale.shape[-1])
