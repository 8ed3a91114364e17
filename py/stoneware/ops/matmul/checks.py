"""What matmul asks of its arguments, and the plan for arguments that pass.

Arguments of any rank become one Problem: a batch of products whose matrices have one contiguous
dimension each and one stride from a product to the next. What that leaves to do at a call is a copy
of an operand that has no such strides, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stoneware.kernels.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.ops.dispatch import Operation
from stoneware.ops.matmul.layouts import arrangement, broadcast, result_shape
from stoneware.ops.matmul.problem import DTYPES, WIDE_DTYPE, is_free_of_overlap
from stoneware.ops.matmul.spec import SPEC
from stoneware.ops.product import UNIT_BYTES


def checked_plan(
    operation: Operation,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
    config: Config | None,
) -> Plan:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = tensor_checks.check_tensors(SPEC, a, b, bias, out)
    operation.check_argument(backend, config)
    shape = _checked_shape(a, b)
    dtype = tensor_checks.check_dtype("a", a, DTYPES, "cast it with a.to(torch.bfloat16)")
    tensor_checks.check_dtype("b", b, (dtype,), f"cast it with b.to({a.dtype})")
    out_dtype = _checked_out_dtype(a.dtype, out_dtype, out)
    if bias is not None:
        if b.ndim == 1:
            raise ValueError("bias must be None with a 1-D b: the result has no n dimension; add it to the result")
        tensor_checks.check_bias(bias, b.shape[-1], out_dtype)
    if out is not None:
        _check_out(out, shape, out_dtype)
    device = tensor_checks.check_one_device(tensors)
    if 0 in (*shape, a.shape[-1]):
        return _run_without_products
    arranged = arrangement(a, b, out, shape, has_bias=bias is not None)
    pointers = [tensor.data_ptr() for tensor in (a, b, out) if tensor is not None]
    problem = arranged.problem(
        a_dtype=dtype,
        b_dtype=dtype,
        out_dtype=tensor_checks.DTYPE_NAMES[out_dtype],
        has_bias=bias is not None,
        is_aligned=not any(pointer % UNIT_BYTES for pointer in pointers),
    )
    plan = operation.plan(problem, device, backend=backend, config=config)
    if arranged.is_transposed:
        plan = _with_swapped_operands(plan)
    copies = arranged.copies
    plan = tensor_checks.with_dense_arguments(
        plan,
        [
            position
            for position, is_strided in (
                (0, "a" in copies),
                (1, "b" in copies),
                (3, bias is not None and not bias.is_contiguous()),
            )
            if is_strided
        ],
    )
    if copies.keys() & {"a of the batch", "b of the batch", "out"}:
        plan = _with_dense_batches(plan, copies, shape)
    return plan


def _checked_shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The result's shape; raises ValueError if a and b cannot be multiplied."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.ndim == 0:
            raise ValueError(f"{name}.shape=[] must have at least 1 dimension; multiply by a number with a * b")
    k, k_of_b = a.shape[-1], b.shape[-2 if b.ndim > 1 else -1]
    if k != k_of_b:
        raise ValueError(
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} must agree in k, {k} is not "
            f"{k_of_b}; pass a weight [n, k] as weight.t()"
        )
    try:
        return result_shape(a.shape, b.shape)
    except ValueError:
        raise ValueError(
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} must have leading dimensions "
            f"that broadcast, {list(a.shape[:-2])} and {list(b.shape[:-2])} do not; expand or "
            "reshape one of them"
        ) from None


def _checked_out_dtype(dtype: torch.dtype, asked: torch.dtype | None, out: torch.Tensor | None) -> torch.dtype:
    """The result's dtype: what was asked for, else out's, else the operands'."""
    allowed = (dtype, tensor_checks.TORCH_DTYPES[WIDE_DTYPE])
    if asked is not None and asked not in allowed:
        raise (TypeError if not isinstance(asked, torch.dtype) else ValueError)(
            f"out_dtype={asked!r} must be {' or '.join(map(str, allowed))}; leave it out for {dtype}, the operands'"
        )
    if asked is None:
        asked = dtype if out is None else out.dtype
    if out is not None and (out.dtype != asked or asked not in allowed):
        rule = (
            str(asked)
            if asked in allowed
            else f"the operands' dtype, {' or '.join(map(str, allowed[:1]))}, or {allowed[1]}"
        )
        raise TypeError(f"out.dtype={out.dtype} must be {rule}; pass an out of that dtype, or leave it out")
    return asked


def _check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(
            f"out.shape={list(out.shape)} must be {list(shape)}; allocate it with torch.empty({list(shape)}, ...)"
        )
    if out.ndim and out.shape[-1] > 1 and out.stride(-1) != 1 and out.numel():
        raise ValueError(f"out.stride()={out.stride()} must end in 1, rows that are contiguous; pass a row-major out")
    if out.numel() and not is_free_of_overlap(out.shape, out.stride()):
        raise ValueError(
            f"out.stride()={out.stride()} must keep all elements of shape {list(shape)} apart, or "
            "they would overwrite one another; pass an out that is not expanded"
        )


def _with_swapped_operands(plan: Plan) -> Plan:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: None) -> None:
        plan(b, a, out, bias)

    return run


def _with_dense_batches(plan: Plan, copies: Mapping[str, str], shape: tuple[int, ...]) -> Plan:
    """Makes a plan take copies where no single stride goes through the batch, as torch.matmul makes
    them too."""
    a_layout, b_layout = copies.get("a of the batch"), copies.get("b of the batch")

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        batch = broadcast(a.shape[:-2], b.shape[:-2])
        if a_layout is not None:
            a = _dense_batch(a, batch, a_layout)
        if b_layout is not None:
            b = _dense_batch(b, batch, b_layout)
        if "out" not in copies:
            plan(a, b, out, bias)
            return
        dense = torch.empty(shape, dtype=out.dtype, device=out.device)
        plan(a, b, dense, bias)
        out.copy_(dense)

    return run


def _dense_batch(matrices: torch.Tensor, batch: Sequence[int], layout: str) -> torch.Tensor:
    matrices = matrices.expand(*batch, *matrices.shape[-2:])
    return matrices.contiguous() if layout == "n" else matrices.mT.contiguous().mT


def _run_without_products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The plan for a sum of no products."""
    out.zero_()
    if bias is not None:
        out += bias
