"""scaled_mm: the call, its checks and its plan cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune import tuning
from stoneware.autotune.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.dispatch import Operation
from stoneware.ops.plan_cache import PlanCache
from stoneware.ops.scaled_mm import cutlass_sm90, heuristic, reference, triton_aot, vendor
from stoneware.ops.scaled_mm.problem import (
    IN_DTYPES, K_MULTIPLE, OP, OUT_DTYPES, Problem, check_multiple,
)
from stoneware.runtime.device import Device

OPERATION = Operation(
    name=OP,
    backends={
        backend.NAME: backend for backend in (cutlass_sm90, triton_aot, vendor, reference)
    },
    preferred=heuristic.preferred,
    preferred_reason=heuristic.REASON,
)

POINTER_MULTIPLE = 16
"""Bytes; of a, b and out. TMA descriptors want it (CUDA driver API, cuTensorMapEncodeTiled,
globalAddress)."""

_PLANS = PlanCache()
_is_grad_enabled = torch.is_grad_enabled
_tuning_state = tuning.state


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiplies two fp8 matrices with scales: scale_a * scale_b * (a @ b) + bias.

    The arguments mean what they mean to torch._scaled_mm; the kind of a scale is told from its
    shape. Sliced views are computed in place, without copies.

    Args:
      a: [m, k] float8_e4m3fn, row-major; m >= 0, k a multiple of 16, a.stride(0) too.
      b: [k, n] float8_e4m3fn, column-major (a row-major weight [n, k], transposed); n a multiple of
        16, b.stride(1) too.
      scale_a: float32; one element, or [m, 1] with one per row of a. Of any strides.
      scale_b: float32; one element, or [1, n] with one per column of b. Of any strides.
      bias: [n] of the out dtype, or None.
      out_dtype: torch.bfloat16 or torch.float16.
      out: [m, n] of the out dtype, row-major, out.stride(0) a multiple of 8; None allocates it. It
        must not share memory with an input; that is not checked, and the result would be undefined.
      backend: run this backend only: "cutlass_sm90", "triton_aot", "vendor" or "reference".
      config: run this config; None takes what `stoneware.explain` shows.

    Returns:
      out.

    Raises:
      TypeError: an argument is no tensor, or has the wrong dtype.
      ValueError: a shape, stride, pointer or device breaks a rule.
      ForwardOnlyError: a gradient would be needed.
      UnsupportedError: nothing that was asked for can run the problem here.
      TuningMissError: the problem was not measured, inside `sw.tuning("error_on_miss")`.
      TableError: the tuning table of this installation is damaged.
      DriverError: the CUDA driver refuses.
    """
    # The fast path: everything that the checks and the plan depend on is the key, so that a hit
    # needs no check but the pointers'. Attributes are read without helpers: a Python call costs as
    # much as three of them.
    try:
        a_shape = a.shape
        key = (
            a_shape, a.stride(), a.dtype, a.get_device(),
            b.shape, b.stride(), b.dtype, b.get_device(),
            scale_a.shape, scale_a.is_contiguous(), scale_a.dtype, scale_a.get_device(),
            scale_b.shape, scale_b.is_contiguous(), scale_b.dtype, scale_b.get_device(),
            None if bias is None else (
                bias.shape, bias.is_contiguous(), bias.dtype, bias.get_device()
            ),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            out_dtype, backend, config, _tuning_state(),
        )
        plan = _PLANS.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or without strides, or an unhashable argument; the checks say which.
        plan = key = None
    if plan is None:
        generation = tuning.generation()
        plan = _checked_plan(a, b, scale_a, scale_b, bias, out_dtype, out, backend, config)
        if key is not None:
            _PLANS.add(key, plan, generation)
    if _is_grad_enabled() and (
        a.requires_grad or b.requires_grad or scale_a.requires_grad or scale_b.requires_grad
        or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
    ):
        tensor_checks.raise_forward_only(OP, _named(a, b, scale_a, scale_b, bias, out))
    if out is None:
        out = torch.empty((a_shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if (a.data_ptr() | b.data_ptr() | out.data_ptr()) % POINTER_MULTIPLE:
        raise tensor_checks.misaligned((("a", a), ("b", b), ("out", out)), POINTER_MULTIPLE)
    plan(a, b, out, scale_a, scale_b, bias)
    return out


def candidates(problem: Problem, device: Device) -> list[Config]:
    """Every config that can run the problem, for tuners; the reference only if nothing else can."""
    return OPERATION.candidates(problem, device)


def make_plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """The plan of one config: run(a, b, out, scale_a, scale_b, bias), without any check of them.

    Raises:
      UnsupportedError: the config cannot run the problem on the device.
    """
    return OPERATION.make_plan(problem, config, device)


def _named(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor | None,
) -> list[tuple[str, torch.Tensor | None]]:
    return [
        ("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias), ("out", out)
    ]


def _checked_plan(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out_dtype: torch.dtype, out: torch.Tensor | None,
    backend: str | None, config: Config | None,
) -> Callable[..., None]:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = _named(a, b, scale_a, scale_b, bias, out)
    tensor_checks.check_tensors(OP, tensors)
    OPERATION.check_argument(backend, config)
    tensor_checks.check_rank("a", a, 2, "flatten leading dimensions with a.flatten(0, -2)")
    tensor_checks.check_rank("b", b, 2, "pass the weight [n, k] as weight.t()")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        raise ValueError(
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} must agree in k, {k} is not "
            f"{b.shape[0]}; pass a weight [n, k] as weight.t()"
        )
    cast = "quantise it to float8_e4m3fn first"
    a_dtype = tensor_checks.check_dtype("a", a, IN_DTYPES, cast)
    b_dtype = tensor_checks.check_dtype("b", b, IN_DTYPES, cast)
    if (
        not isinstance(out_dtype, torch.dtype)
        or tensor_checks.DTYPE_NAMES.get(out_dtype) not in OUT_DTYPES
    ):
        raise TypeError(
            f"out_dtype={out_dtype!r} must be torch.bfloat16 or torch.float16; cast the result"
        )
    scale_a_kind = _scale_kind("scale_a", scale_a, [m, 1], "[:, None]")
    scale_b_kind = _scale_kind("scale_b", scale_b, [1, n], "[None, :]")
    if m == 1 and scale_b_kind == "row" and tuple(scale_a.shape) == (1, 1):
        scale_a_kind = "row"  # of one row; backends that want two scales of one kind take it
    if bias is not None:
        tensor_checks.check_bias(bias, n, out_dtype)
    if out is not None:
        tensor_checks.check_out(
            out, m, n, out_dtype,
            f"pass out_dtype={out.dtype}"
            if tensor_checks.DTYPE_NAMES.get(out.dtype) in OUT_DTYPES
            else "pass an out of torch.bfloat16 or torch.float16, and its dtype as out_dtype",
        )
    device = tensor_checks.check_one_device(tensors)
    check_multiple("k", k, K_MULTIPLE, "pad a and b along k with zeros")
    if m == 0 or n == 0:
        return _run_nothing
    _check_layouts(a, b)
    problem = Problem(
        m=m, n=n, k=k, a_dtype=a_dtype, b_dtype=b_dtype,
        out_dtype=tensor_checks.DTYPE_NAMES[out_dtype],
        scale_a=scale_a_kind, scale_b=scale_b_kind, has_bias=bias is not None,
        # The stride of a dimension of size one is arbitrary.
        lda=a.stride(0) if m > 1 else k,
        ldb=b.stride(1),
        ldd=n if out is None or m == 1 else out.stride(0),
    )
    plan = OPERATION.plan(problem, device, backend=backend, config=config)
    if device.kind == "cpu":
        return tensor_checks.with_device_check(
            plan, ("a", "b", "out", "scale_a", "scale_b", "bias")
        )
    return tensor_checks.with_dense_arguments(plan, [
        position for position, vector in ((3, scale_a), (4, scale_b), (5, bias))
        if vector is not None and not vector.is_contiguous()
    ])


def _scale_kind(name: str, scale: torch.Tensor, vector_shape: list[int], index: str) -> str:
    tensor_checks.check_dtype(name, scale, ("fp32",), f"cast it with {name}.float()")
    if list(scale.shape) == vector_shape and scale.numel() != 1:
        return "row"
    if scale.numel() == 1 and scale.ndim <= 2:
        return "tensor"
    letters = "[m, 1]" if vector_shape[1] == 1 else "[1, n]"
    raise ValueError(
        f"{name}.shape={list(scale.shape)} must be one element or {letters}={vector_shape}; "
        f"pass a flat vector as {name}{index}"
    )


def _check_layouts(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.stride(1) != 1:
        raise ValueError(
            f"a.stride()={a.stride()} must be (lda, 1), row-major; copy it with a.contiguous()"
        )
    if b.stride(0) != 1:
        raise ValueError(
            f"b.stride()={b.stride()} must be (1, ldb), column-major; pass the transpose of a "
            "row-major weight [n, k], or copy it with b.t().contiguous().t()"
        )


def _run_nothing(*tensors: torch.Tensor | None) -> None:
    """The plan for a result without elements."""
