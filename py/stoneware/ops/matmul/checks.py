"""What matmul asks of its arguments, and the plan for arguments that pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.dispatch import Operation
from stoneware.ops.matmul.problem import DTYPES, OP, Problem

ALIGNED_POINTER_MULTIPLE = 16
"""Bytes; below it the AOT kernels, which load 16 bytes at a time, are out."""


def named(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> list[tuple[str, torch.Tensor | None]]:
    return [("a", a), ("b", b), ("bias", bias), ("out", out)]


def checked_plan(
    operation: Operation, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor | None, backend: str | None, config: Config | None,
) -> Callable[..., None]:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = named(a, b, bias, out)
    tensor_checks.check_tensors(OP, tensors)
    operation.check_argument(backend, config)
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
    plan = operation.plan(problem, device, backend=backend, config=config)
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
