"""What grouped_mm asks of its arguments, and the plan for arguments that pass."""

from __future__ import annotations

import torch

from stoneware.kernels.config import Config
from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.ops.dispatch import Operation
from stoneware.ops.grouped_mm.problem import IN_DTYPES, OUT_DTYPES, Problem
from stoneware.ops.grouped_mm.spec import SPEC


def checked_plan(
    operation: Operation,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: str | None,
    config: Config | None,
) -> Plan:
    """Checks the arguments, and makes the plan for every call with arguments of this kind."""
    tensors = tensor_checks.check_tensors(SPEC, a, b, offs, scale_a, scale_b, out)
    operation.check_argument(backend, config)
    tensor_checks.check_rank("a", a, 2, "flatten leading dimensions with a.flatten(0, -2)")
    tensor_checks.check_rank("b", b, 3, "pass the weights [groups, n, k] as weights.mT")
    tensor_checks.check_rank("offs", offs, 1, "pass the end row of each group")
    (m, k), (num_groups, b_k, n) = a.shape, b.shape
    if b_k != k:
        raise ValueError(
            f"a.shape={list(a.shape)} and b.shape={list(b.shape)} must agree in k, {k} is not "
            f"{b_k}; pass weights [groups, n, k] as weights.mT"
        )
    if offs.shape[0] != num_groups:
        raise ValueError(
            f"offs.shape={list(offs.shape)} must be [groups]=[{num_groups}], as "
            f"b.shape={list(b.shape)} has; pass the end row of each group, also of empty ones"
        )
    if offs.dtype != torch.int32:
        raise TypeError(f"offs.dtype={offs.dtype} must be torch.int32; cast it with offs.to(torch.int32)")
    dtype = tensor_checks.check_dtype("a", a, IN_DTYPES, "quantise it to float8_e4m3fn, or cast it with a.bfloat16()")
    tensor_checks.check_dtype("b", b, (dtype,), f"cast it to {a.dtype}")
    _check_scales(dtype, scale_a, scale_b, m, n, num_groups)
    out_name = _out_dtype_name(dtype, out_dtype)
    if out is not None:
        tensor_checks.check_out(
            out,
            m,
            n,
            tensor_checks.TORCH_DTYPES[out_name],
            f"pass an out of {tensor_checks.TORCH_DTYPES[out_name]}, or its dtype as out_dtype",
        )
    device = tensor_checks.check_one_device(tensors)
    if m == 0 or n == 0 or num_groups == 0:
        return tensor_checks.run_nothing
    _check_layouts(a, b)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        num_groups=num_groups,
        a_dtype=dtype,
        b_dtype=dtype,
        out_dtype=out_name,
        # The stride of a dimension of size one is arbitrary.
        lda=a.stride(0) if m > 1 else k,
        ldb=b.stride(2) if n > 1 else k,
        ldd=n if out is None or m == 1 else out.stride(0),
        group_stride_b=b.stride(0) if num_groups > 1 else n * k,
    )
    plan = operation.plan(problem, device, backend=backend, config=config)
    return tensor_checks.with_dense_arguments(
        plan,
        [
            position
            for position, vector in ((3, offs), (4, scale_a), (5, scale_b))
            if vector is not None and not vector.is_contiguous()
        ],
    )


def _check_scales(
    dtype: str, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, m: int, n: int, num_groups: int
) -> None:
    shapes = (("scale_a", scale_a, [m], "[m]"), ("scale_b", scale_b, [num_groups, n], "[groups, n]"))
    for name, scale, shape, letters in shapes:
        if dtype != "e4m3":
            if scale is not None:
                raise ValueError(f"{name} of {dtype} operands must be None; multiply the result by it")
            continue
        if scale is None:
            raise TypeError(f"{name}=None of e4m3 operands must be a torch.Tensor; pass one")
        tensor_checks.check_dtype(name, scale, ("fp32",), f"cast it with {name}.float()")
        if list(scale.shape) != shape:
            raise ValueError(
                f"{name}.shape={list(scale.shape)} must be {letters}={shape}; reshape it with {name}.reshape({shape})"
            )


def _out_dtype_name(dtype: str, out_dtype: torch.dtype | None) -> str:
    if out_dtype is None:
        return "bf16"
    name = tensor_checks.DTYPE_NAMES.get(out_dtype) if isinstance(out_dtype, torch.dtype) else None
    if name not in OUT_DTYPES[dtype]:
        known = " or ".join(str(tensor_checks.TORCH_DTYPES[one]) for one in OUT_DTYPES[dtype])
        raise TypeError(f"out_dtype={out_dtype!r} must be {known}; cast the result")
    return name


def _check_layouts(a: torch.Tensor, b: torch.Tensor) -> None:
    tensor_checks.check_row_major("a", a)
    if b.stride(1) != 1:
        raise ValueError(
            f"b.stride()={b.stride()} must be (group stride, 1, ldb), each group column-major; pass "
            "the transpose of row-major weights [groups, n, k], or copy it with "
            "b.mT.contiguous().mT"
        )
