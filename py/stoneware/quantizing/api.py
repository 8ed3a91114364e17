"""quantize: the call, its checks and its plans."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from stoneware.errors import ForwardOnlyError, quoted
from stoneware.ops import native_call, registration, tensor_checks
from stoneware.quantizing import kernels, reference
from stoneware.quantizing.layout import IN_DTYPES, MAX, SCALES, dense_shape
from stoneware.runtime.device import Device
from stoneware.runtime.dtypes import DTYPE_NAMES

_is_compiling = torch.compiler.is_dynamo_compiling


def quantize(
    x: torch.Tensor,
    scales: str = "row",
    *,
    transpose: bool | str = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Quantizes x to fp8: x is nearly x8 * scale, where scale is the largest |x| of a unit over fp8's.

    The results are operands of `sw.scaled_mm`: with x8, scale_x of x [m, k] and w8, scale_w of a weight
    w [n, k], `sw.scaled_mm(x8, w8.t(), scale_x, scale_w.t())` is nearly x @ w.t(). Values are rounded to
    the nearest, ties to even. The same values give the same bits, whatever else is in the batch, and on
    every device.

    A unit of zeros has the scale 1. A unit with an infinity or a NaN has the scale NaN, and NaN for
    every value, so that it is not lost.

    Args:
      x: [..., m, k] bfloat16, float16 or float32; other than [m, k] for "tensor" and "row" alone, and
        then without `transpose`. Rows that are not contiguous are copied first.
      scales: "tensor", one scale; "row", one for each row; "block", one for each 1 x 128 elements;
        "block_2d", one for each 128 x 128, for weights.
      transpose: False gives x in fp8; True x.t(), dense, with the scales of its own rows or runs, as the
        gradients of a linear layer want their operands; "both" gives both, and reads x once where the
        scales allow it.
      dtype: torch.float8_e4m3fn or torch.float8_e5m2.
      power_of_two: whether scales are rounded up to powers of two.

    Returns:
      (x8, scale) of x or of x.t(), or (x8, scale, xt8, scale_t). x8 has x's shape, row-major; scale is
      float32, [1], [..., m, 1], [m, ceil(k / 128)] column-major, or [ceil(m / 128), ceil(k / 128)].

    Raises:
      TypeError: x is not a dense tensor, or has the wrong dtype.
      ValueError: an argument or a shape breaks a rule.
      ForwardOnlyError: a gradient of x, which `sw.nn.Float8Linear` has, or a tangent would be needed.
      BackwardNotBuiltError: the transpose is for gradients, and this installation was built without
        their kernels.
      TableError: a kernel of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # Not in `_check`: the key of True equals that of 1, whose call would use the cached plan.
    if transpose is not True and transpose is not False and transpose != "both":
        _refuse_value("transpose", transpose, (False, True, "both"))
    if power_of_two is not True and power_of_two is not False:
        _refuse_value("power_of_two", power_of_two, (False, True))
    if isinstance(x, torch.Tensor) and x.ndim > 2 and transpose is False and scales in ("row", "tensor"):
        values, scale = quantize(x.flatten(0, -2), scales, dtype=dtype, power_of_two=power_of_two)
        return values.view(x.shape), scale.view(*x.shape[:-1], 1) if scales == "row" else scale
    if _is_compiling():
        return _traced(x, scales, transpose, dtype, power_of_two)
    has_partial = scales == "tensor" or (scales == "row" and transpose is not False)  # as `kernels.has_partial`
    num_results = 4 if transpose == "both" else 2
    call = _call(num_results, has_partial)
    return call(x, *_NONE[: num_results + has_partial], scales, transpose, dtype, power_of_two)


_NONE = (None,) * 5
"""Placeholders of the outputs, which are always allocated."""


@functools.cache
def _call(num_results: int, has_partial: bool) -> Any:
    """The native call with `num_results` results, and memory for partial results if it `has_partial`."""
    num_outputs = num_results + has_partial
    outs = range(1, 1 + num_outputs)

    def make(x: object, *arguments: Any) -> tuple[Any, ...]:
        plan, outputs = make_plan([x], [Quantization(*arguments[num_outputs:])])
        return plan, True, x.device, outputs  # type: ignore[attr-defined]  # it was checked

    def slow(x: object, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return _slow(x, *arguments[num_outputs:])[:num_results]

    fast, _ = native_call.build(
        make,
        slow,
        num_tensors=1 + num_outputs,
        num_objects=4,
        outs=outs,
        optional=outs,
        aligned=[0],
        num_results=num_results,
    )
    return slow if fast is None else fast.call


def quantize_with_amax(
    tensors: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor], dtype: torch.dtype, power_of_two: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Matrices in fp8 with one scale each, [1] float32, for largest |x| that are known: those of whole matrices.

    Args:
      tensors: [m, k], bfloat16, float16 or float32, of one dtype and device, with contiguous rows.
      amaxes: of each [1] float32, without a sign.
      dtype, power_of_two: see `quantize`.
    """
    count = len(tensors)
    results = _call_with_amax(count)(*tensors, *amaxes, *[None] * (2 * count), dtype, power_of_two)
    return [*zip(results[::2], results[1::2])]


@functools.cache
def _call_with_amax(count: int) -> Any:
    """call(*matrices, *largest |x|, *placeholders of the outputs, dtype, power_of_two) -> values and scale of each."""
    num_tensors = 4 * count

    def make(*arguments: Any) -> Any:
        dtype, power_of_two = arguments[num_tensors:]
        matrices, amaxes = [_check(x, "tensor", False, dtype) for x in arguments[:count]], arguments[count : 2 * count]
        device = tensor_checks.check_one_device([("x", tensor) for tensor in (*matrices, *amaxes)])
        quantization = Quantization("tensor", False, dtype, power_of_two)
        plan: Any = functools.partial(_run_with_amax, dtype, power_of_two)
        if all(quantization.has_kernels([x], device) for x in matrices):
            tasks = []
            for position, x in enumerate(matrices):
                first = 2 * (count + position)
                tensors = position, first, first + 1, count + position
                options = "tensor", False, DTYPE_NAMES[dtype], power_of_two, False, True
                tasks.append(kernels.Task([x], *options, tensors))
            plan = kernels.plan(tasks, num_tensors, device)
        outputs = [output for x in matrices for output in quantization.outputs([len(x)], x.shape[1])]
        return plan, True, matrices[0].device, tuple(outputs)

    def slow(*arguments: Any) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.resolve_neg() for tensor in arguments[: 2 * count]]
        plan, _, device, outputs = make(*inputs, *arguments[2 * count :])
        results = tuple(native_call.empty(output, device) for output in outputs)
        plan(*inputs, *results)
        return results

    outs = range(2 * count, num_tensors)
    fast, _ = native_call.build(
        make, slow, num_tensors=num_tensors, num_objects=2, outs=outs, optional=outs, aligned=range(count),
        num_results=2 * count,
    )  # fmt: skip
    return slow if fast is None else fast.call


def _run_with_amax(dtype: torch.dtype, power_of_two: bool, *tensors: torch.Tensor) -> None:
    """The plan where no kernel runs."""
    count = len(tensors) // 4
    for x, amax, x8, scale in zip(tensors, tensors[count:], tensors[2 * count :: 2], tensors[2 * count + 1 :: 2]):
        scale.copy_(reference.scales_of(amax, dtype, power_of_two))
        x8.copy_((x.float() * (1 / scale)).to(dtype))


class Quantization(NamedTuple):
    """How a matrix is quantized.

    Attributes:
      scales, transpose, dtype, power_of_two: see `quantize`.
      shares: whether a reduction of the matrix is among the outputs, even if it is an input, or is left to the call
        with the transpose (`kernels.Task`).
      num_parts: how many matrices have its rows, one after the other; several need "row" scales and `shares`.
    """

    scales: str
    transpose: bool | str
    dtype: torch.dtype
    power_of_two: bool
    shares: bool = False
    num_parts: int = 1

    def outputs(self, rows: Sequence[int], k: int) -> list[native_call.Output]:
        """What is written, without partial results."""
        m, scales, dtype = sum(rows), self.scales, self.dtype
        outputs: list[native_call.Output] = []
        if self.transpose is not True:
            outputs += [((m, k), (k or 1, 1), dtype), (*dense_shape(scales, m, k), torch.float32)]
        if self.transpose is not False:
            outputs += [((k, m), (m or 1, 1), dtype)]
        if self.transpose is not False or (self.shares and scales == "row"):
            outputs += [(*dense_shape(scales, k, m), torch.float32)]
        return outputs

    def partial(self, rows: Sequence[int], k: int, device_type: str) -> native_call.Output:
        """Partial results, if `kernels.has_partial`; none where no kernels run."""
        has_some = device_type == "cuda" and sum(rows) > 0 and k > 0
        shape, strides = kernels.partial_shape(rows, k, self.scales) if has_some else ((0,), (1,))
        return shape, strides, torch.int32

    def reduction(self, shape: Sequence[int], device_type: str) -> native_call.Output:
        """What a quantization of x of this shape [m, k] that `shares` hands to that of the transpose."""
        m, k = shape
        if self.scales == "row":
            return *dense_shape(self.scales, k, m), torch.float32
        return self.partial([m], k, device_type)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`reduction` of x [m, k] in plain torch."""
        if self.scales == "row":
            return reference.quantize(x.t(), self.scales, self.dtype, self.power_of_two)[1]
        shape, _, dtype = self.reduction(x.shape, x.device.type)
        return x.float().abs().amax().view(dtype).repeat(shape)

    def has_kernels(self, parts: Sequence[torch.Tensor], device: Device) -> bool:
        if len(parts) > 1:
            return kernels.why_not_joined(parts, device) is None
        (x,) = parts
        is_dense = x.numel() > 0 and (x.stride(1) == 1 or x.shape[1] <= 1)
        transposes = self.transpose is not False
        return is_dense and kernels.why_not(x, self.scales, DTYPE_NAMES[self.dtype], transposes, device) is None

    def run_reference(self, *tensors: torch.Tensor) -> None:
        """The plan where no kernel runs: plain torch."""
        parts, outputs = tensors[: self.num_parts], tensors[self.num_parts :]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        arguments = self.scales, self.dtype, self.power_of_two
        shares_row = self.shares and self.scales == "row"
        results: list[torch.Tensor] = []
        if self.transpose is not True:
            results += reference.quantize(x, *arguments)
        if self.transpose is not False:
            values, scale = reference.quantize(x.t(), *arguments)
            results += [values] if shares_row else [values, scale]
        elif shares_row:
            results += reference.quantize(x.t(), *arguments)[1:]
        for output, result in zip(outputs, results):
            output.copy_(result)


def make_plan(
    tensors: Sequence[object], quantizations: Sequence[Quantization]
) -> tuple[Any, tuple[native_call.Output, ...]]:
    """The plan of a call that quantizes matrices, and what it writes.

    It takes all tensors, then the outputs of each matrix; the last of these are partial results if
    `kernels.has_partial`.

    Args:
      tensors: the parts of each matrix.
      quantizations: of each matrix.
    """
    checked: list[torch.Tensor] = []
    for one in quantizations:
        parts = tensors[len(checked) : len(checked) + one.num_parts]
        checked += [_check(part, one.scales, one.transpose, one.dtype) for part in parts]
    device = tensor_checks.check_one_device([("x", tensor) for tensor in checked])
    outputs: list[native_call.Output] = []
    tasks: list[tuple[Quantization, kernels.Task, bool]] = []
    first = 0
    for one in quantizations:
        own = checked[first : first + one.num_parts]
        rows, k, begin = [len(part) for part in own], own[0].shape[1], len(checked) + len(outputs)
        has_kernels = one.has_kernels(own, device)
        outputs += one.outputs(rows, k)
        if kernels.has_partial(one.scales, one.transpose, one.shares):
            outputs.append(one.partial(rows, k, device.kind))
        positions = [*range(first, first + one.num_parts), *range(begin, len(checked) + len(outputs))]
        options = one.scales, one.transpose, DTYPE_NAMES[one.dtype], one.power_of_two, one.shares, False
        tasks.append((one, kernels.Task(own, *options, positions), has_kernels))
        first += one.num_parts
    if all(has_kernels for *_, has_kernels in tasks):
        return kernels.plan([task for _, task, _ in tasks], len(checked) + len(outputs), device), tuple(outputs)
    plans: list[tuple[Any, Sequence[int]]] = []
    for one, task, has_kernels in tasks:
        count = len(task.tensors)
        plan = kernels.plan([task._replace(tensors=range(count))], count, device) if has_kernels else one.run_reference
        plans.append((plan, task.tensors))

    def run(*tensors: torch.Tensor) -> None:
        for plan, positions in plans:
            plan(*[tensors[position] for position in positions])

    return run, tuple(outputs)


def _slow(
    x: Any, scales: str, transpose: bool | str, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    """A call in Python: for dispatch modes and subclasses of torch.Tensor, and to refuse gradients."""
    tensor = _check(x, scales, transpose, dtype)
    _refuse_gradient(tensor)
    if tensor_checks.is_traced([tensor]):
        return _traced(tensor, scales, transpose, dtype, power_of_two)
    tensor = tensor.resolve_neg()
    plan, outputs = make_plan([tensor], [Quantization(scales, transpose, dtype, power_of_two)])
    results = tuple(native_call.empty(output, tensor.device) for output in outputs)
    plan(tensor, *results)
    return results


def _refuse_gradient(x: torch.Tensor) -> None:
    tensor_checks.refuse_tangents("quantize", [("x", x)])
    if torch.is_grad_enabled() and x.requires_grad:
        raise ForwardOnlyError(
            "quantize has no backward, and x requires a gradient; use a layer that has one, such as "
            "sw.nn.Float8Linear, call it under torch.no_grad(), or pass x.detach()"
        )


def _check(x: object, scales: str, transpose: bool | str, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"x of quantize must be a torch.Tensor, not {type(x).__name__}; wrap it with torch.as_tensor(...)"
        )
    if scales not in SCALES:
        _refuse_value("scales", scales, SCALES)
    if dtype not in tuple(MAX):  # a tuple, because dtype may not be hashable
        _refuse_value("dtype", dtype, MAX)
    tensor_checks.check_memory("x", x)
    if x.dtype not in IN_DTYPES:
        raise TypeError(
            f"x.dtype={x.dtype} must be {' or '.join(map(str, IN_DTYPES))}; cast it with x.to(torch.bfloat16)"
        )
    if x.ndim != 2:
        _refuse_rank(x, scales, transpose)
    return x


def _refuse_value(name: str, value: object, allowed: Iterable[object]) -> NoReturn:
    raise ValueError(f"{name}={quoted(value)} must be one of {', '.join(map(repr, allowed))}; pass one of these")


def _refuse_rank(x: torch.Tensor, scales: str, transpose: bool | str) -> NoReturn:
    raise ValueError(
        f"x.shape={list(x.shape)} must have 2 dimensions for scales={scales!r} and transpose={transpose!r}; "
        "flatten leading dimensions with x.flatten(0, -2)"
    )


def _define(name: str, num_results: int) -> Any:
    """The operator with `num_results` results, for torch.compile, torch.export and dispatch modes."""
    results = ", ".join(["Tensor"] * num_results)
    # Torch keeps `eager` for ever. With the module itself, and not its globals alone, the interpreter's
    # end clears the module, and with it the native calls.
    api = sys.modules[__name__]

    def eager(x: torch.Tensor, scales: str, transpose: bool, *arguments: Any) -> tuple[torch.Tensor, ...]:
        both: bool | str = "both" if num_results == 4 else transpose
        return api.quantize(x, scales, transpose=both, dtype=arguments[0], power_of_two=arguments[1])

    def fake(
        x: torch.Tensor, scales: str, transpose: bool, dtype: torch.dtype, power_of_two: bool
    ) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        for is_transposed in (False, True) if num_results == 4 else (transpose,):
            m, k = (x.shape[1], x.shape[0]) if is_transposed else (x.shape[0], x.shape[1])
            outputs.append(x.new_empty((m, k), dtype=dtype))
            shape, strides = dense_shape(scales, m, k)
            outputs.append(torch.empty_strided(shape, strides, dtype=torch.float32, device=x.device))
        return tuple(outputs)

    schema = f"{name}(Tensor x, str scales, bool transpose, ScalarType dtype, bool power_of_two) -> ({results})"
    return registration.define(schema, ["x"], eager, fake, refuse=_refuse_gradient)


_OPERATORS = {2: _define("quantize", 2), 4: _define("quantize_both", 4)}


def _traced(
    x: torch.Tensor, scales: str, transpose: bool | str, dtype: torch.dtype, power_of_two: bool
) -> tuple[torch.Tensor, ...]:
    if x.ndim != 2:
        _refuse_rank(x, scales, transpose)
    operator = _OPERATORS[4 if transpose == "both" else 2]
    return operator(x, scales, transpose is True, dtype, power_of_two)
