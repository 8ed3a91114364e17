"""matmul: the call, its checks and its plan cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune import tuning
from stoneware.autotune.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.dispatch import Operation
from stoneware.ops.matmul import heuristic, reference, triton_aot, vendor
from stoneware.ops.matmul.problem import DTYPES, OP, Problem
from stoneware.ops.plan_cache import PlanCache
from stoneware.runtime.device import Device

OPERATION = Operation(
    name=OP,
    backends={backend.NAME: backend for backend in (triton_aot, vendor, reference)},
    preferred=heuristic.preferred,
    preferred_reason=heuristic.REASON,
)

ALIGNED_POINTER_MULTIPLE = 16
"""Bytes; below it the AOT kernels, which load 16 bytes at a time, are out."""

_PLANS = PlanCache()
_is_grad_enabled = torch.is_grad_enabled
_tuning_state = tuning.state


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiplies two bf16 or fp16 matrices: a @ b + bias, summed in float32.

    Row-major and column-major operands and their sliced views are computed in place; an operand
    that is neither is copied first.

    Args:
      a: [m, k] bfloat16 or float16.
      b: [k, n] of the same dtype.
      bias: [n] of the same dtype, or None.
      out: [m, n] of the same dtype, row-major; None allocates it. It must not share memory with an
        input; that is not checked, and the result would be undefined.
      backend: run this backend only: "triton_aot", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows.

    Returns:
      out.

    Raises:
      TypeError: an argument is no tensor, or has the wrong dtype.
      ValueError: a shape, stride or device breaks a rule.
      ForwardOnlyError: a gradient would be needed.
      UnsupportedError: nothing that was asked for can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # The fast path: everything that the checks and the plan depend on is the key.
    try:
        a_shape = a.shape
        key = (
            a_shape, a.stride(), a.dtype, a.get_device(),
            b.shape, b.stride(), b.dtype, b.get_device(),
            None if bias is None else (
                bias.shape, bias.is_contiguous(), bias.dtype, bias.get_device()
            ),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            (a.data_ptr() | b.data_ptr() | (0 if out is None else out.data_ptr()))
            % ALIGNED_POINTER_MULTIPLE == 0,
            backend, config, _tuning_state(),
        )
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or without strides, or an unhashable argument; the checks say which.
        plan = key = None
    if plan is None:
        generation = tuning.generation()
        plan = _checked_plan(a, b, bias, out, backend, config)
        if key is not None:
            _PLANS.add(key, plan, generation)
    if _is_grad_enabled() and (
        a.requires_grad or b.requires_grad
        or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
    ):
        tensor_checks.raise_forward_only(OP, _named(a, b, bias, out))
    if out is None:
        out = torch.empty((a_shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    plan(a, b, out, bias)
    return out


def candidates(problem: Problem, device: Device) -> list[Config]:
    """Every config that can run the problem, for tuners; the reference only if nothing else can."""
    return OPERATION.candidates(problem, device)


def make_plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """The plan of one config: run(a, b, out, bias), without any check of them.

    Raises:
      UnsupportedError: the config cannot run the problem on the device.
    """
    return OPERATION.make_plan(problem, config, device)


def _named(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> list[tuple[str, torch.Tensor | None]]:
    return [("a", a), ("b", b), ("bias", bias), ("out", out)]


def _checked_plan(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None,
    backend: str | None, config: Config | None,
) -> Callable[..., None]:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = _named(a, b, bias, out)
    tensor_checks.check_tensors(OP, tensors)
    OPERATION.check_argument(backend, config)
    tensor_checks.check_rank("a", a, 2, "flatten leading dimensions with a.flatten(0, -2)")
    tensor_checks.check_rank("b", b, 2, "multiply batches one by one")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        raise ValueError(
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} must agree in k, {k} is not "
            f"{b.shape[0]}; pass a weight [n, k] as weight.t()"
        )
    dtype = tensor_checks.check_dtype("a", a, DTYPES, "cast it with a.to(torch.bfloat16)")
    tensor_checks.check_dtype("b", b, (dtype,), f"cast it with b.to({a.dtype})")
    if bias is not None:
        tensor_checks.check_bias(bias, n, a.dtype)
    if out is not None:
        tensor_checks.check_out(
            out, m, n, a.dtype,
            "pass an out of the operands' dtype, torch.bfloat16 or torch.float16",
        )
    device = tensor_checks.check_one_device(tensors)
    if m == 0 or n == 0 or k == 0:
        return _run_without_products
    a_layout = _layout(a, "nt")
    b_layout = _layout(b, "tn")
    pointers = [tensor.data_ptr() for tensor in (a, b, out) if tensor is not None]
    problem = Problem(
        m=m, n=n, k=k, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype,
        layout=(a_layout or "n") + (b_layout or "n"), has_bias=bias is not None,
        lda=_outer_stride(a, a_layout), ldb=_outer_stride(b, b_layout),
        ldd=n if out is None or m == 1 else out.stride(0),
        is_aligned=not any(pointer % ALIGNED_POINTER_MULTIPLE for pointer in pointers),
    )
    plan = OPERATION.plan(problem, device, backend=backend, config=config)
    if device.kind == "cpu":
        return tensor_checks.with_device_check(plan, ("a", "b", "out", "bias"))
    return tensor_checks.with_dense_arguments(plan, [
        position for position, is_strided in (
            (0, a_layout is None), (1, b_layout is None),
            (3, bias is not None and not bias.is_contiguous()),
        ) if is_strided
    ])


def _layout(matrix: torch.Tensor, preference: str) -> str | None:
    """"n" for row-major, "t" for column-major, the first of `preference` if it is both; None if
    neither. The stride of a dimension of size one is arbitrary."""
    num_rows, num_columns = matrix.shape
    row_stride, column_stride = matrix.stride()
    is_layout = {
        "n": (num_columns == 1 or column_stride == 1)
        and (num_rows == 1 or row_stride >= num_columns),
        "t": (num_rows == 1 or row_stride == 1)
        and (num_columns == 1 or column_stride >= num_rows),
    }
    return next((layout for layout in preference if is_layout[layout]), None)


def _outer_stride(matrix: torch.Tensor, layout: str | None) -> int:
    """The leading dimension; of a matrix that will be copied, that of the copy."""
    num_rows, num_columns = matrix.shape
    if layout == "n" and num_rows > 1:
        return matrix.stride(0)
    if layout == "t":
        return matrix.stride(1) if num_columns > 1 else num_rows
    return num_columns


def _run_without_products(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """The plan for a sum of no products."""
    out.zero_()
    if bias is not None:
        out += bias
