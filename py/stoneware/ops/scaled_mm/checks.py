"""What scaled_mm asks of its arguments, and the plan for arguments that pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.dispatch import Operation
from stoneware.ops.scaled_mm.problem import (
    IN_DTYPES, K_MULTIPLE, OP, OUT_DTYPES, Problem, check_multiple,
)

POINTER_MULTIPLE = 16
"""Bytes; of a, b and out. TMA descriptors want it (CUDA driver API, cuTensorMapEncodeTiled,
globalAddress)."""


def named(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor | None,
) -> list[tuple[str, torch.Tensor | None]]:
    return [
        ("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias), ("out", out)
    ]


def checked_plan(
    operation: Operation, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
    scale_b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype,
    out: torch.Tensor | None, backend: str | None, config: Config | None,
) -> Callable[..., None]:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = named(a, b, scale_a, scale_b, bias, out)
    tensor_checks.check_tensors(OP, tensors)
    operation.check_argument(backend, config)
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
    plan = operation.plan(problem, device, backend=backend, config=config)
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
