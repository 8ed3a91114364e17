"""Checks the arguments of grouped_mm, and makes the plan for those that pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.runtime.dtypes import DTYPE_NAMES
from stoneware.specs.grouped_mm import SPEC
from stoneware.specs.grouped_mm_problem import IN_DTYPES, OUT_DTYPES, Problem
from stoneware.specs.scaled_mm_problem import BLOCK, num_blocks


def result(a: torch.Tensor, b: torch.Tensor, *others: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """See `OpPlans.checks`."""
    return _shape(a, b), others[-1] or torch.bfloat16


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    tensor_checks.check_rank("a", a, 2, "flatten leading dimensions with a.flatten(0, -2)")
    tensor_checks.check_rank("b", b, 3, "pass the weights [groups, n, k] as weights.mT")
    tensor_checks.check_k(SPEC.name, a, b)
    return a.shape[0], b.shape[2]


def plan(
    make: Callable[[Problem], Plan],
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Plan:
    """See `OpPlans.checks`."""
    (m, n), (num_groups, k, _) = _shape(a, b), b.shape
    tensor_checks.check_rank("offs", offs, 1, "pass the end row of each group")
    if offs.shape[0] != num_groups:
        raise ValueError(
            f"offs.shape={list(offs.shape)} must be [groups]=[{num_groups}], as "
            f"b.shape={list(b.shape)} has; pass the end row of each group, also of empty ones"
        )
    if offs.dtype != torch.int32:
        raise TypeError(f"offs.dtype={offs.dtype} must be torch.int32; cast it with offs.to(torch.int32)")
    dtype = tensor_checks.check_dtype(
        "a", a, IN_DTYPES, "quantize it with sw.quantize(a), or cast it with a.bfloat16()"
    )
    tensor_checks.check_dtype("b", b, (dtype,), f"cast it to {a.dtype}")
    has_block_scales = _check_scales(dtype, scale_a, scale_b, m, n, k, num_groups)
    out_dtype = tensor_checks.check_out_dtype(torch.bfloat16 if out_dtype is None else out_dtype, OUT_DTYPES[dtype])
    if out is not None:
        tensor_checks.check_out(out, (m, n), out_dtype, OUT_DTYPES[dtype])
    if m == 0 or n == 0 or num_groups == 0:
        return tensor_checks.run_nothing
    tensor_checks.check_contiguous_along_k(a, b)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        num_groups=num_groups,
        a_dtype=dtype,
        b_dtype=dtype,
        out_dtype=DTYPE_NAMES[out_dtype],
        # The stride of a dimension of size one is arbitrary.
        lda=a.stride(0) if m > 1 else k,
        ldb=b.stride(2) if n > 1 else k,
        ldd=n if out is None or m == 1 else out.stride(0),
        group_stride_b=b.stride(0) if num_groups > 1 else n * k,
        **(_block_layouts(scale_a, scale_b) if has_block_scales else {}),
    )
    # Kernels follow the strides of block scales.
    scales = {} if has_block_scales else {"scale_a": scale_a, "scale_b": scale_b}
    return tensor_checks.with_copies(SPEC, make(problem), tensor_checks.strided(offs=offs, **scales))


def _check_scales(
    dtype: str, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, m: int, n: int, k: int, num_groups: int
) -> bool:
    """Raises an error unless the scales fit the operands; returns whether they are block scales, as scale_b says."""
    is_block = scale_b is not None and scale_b.ndim == 3
    rows = [("scale_a", scale_a, [m], "[m]"), ("scale_b", scale_b, [num_groups, n], "[groups, n]")]
    blocks = [
        ("scale_a", scale_a, [m, num_blocks(k)], f"[m, k/{BLOCK}]"),
        ("scale_b", scale_b, [num_groups, num_blocks(k), num_blocks(n)], f"[groups, k/{BLOCK}, n/{BLOCK}]"),
    ]
    shapes, others = (blocks, rows) if is_block else (rows, blocks)
    for name, scale, shape, letters in shapes:
        if dtype != "e4m3":
            if scale is not None:
                raise ValueError(f"{name} of {dtype} operands must be None; multiply the result by it")
            continue
        if scale is None:
            raise TypeError(f"{name}=None of e4m3 operands must be a torch.Tensor; pass one")
        tensor_checks.check_dtype(name, scale, ("fp32",), f"cast it with {name}.float()")
        if list(scale.shape) != shape:
            remedy = f"reshape it with {name}.reshape({shape})"
            if scale.numel() != math.prod(shape):
                pairs = " and ".join(f"{name} {letters}={shape}" for name, _, shape, letters in others)
                remedy = f"scale it so, or pass {pairs}, rounded up"
            raise ValueError(f"{name}.shape={list(scale.shape)} must be {letters}={shape}; {remedy}")
    return is_block


def _block_layouts(scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> dict[str, Any]:
    """The strides of block scales in the fields of a Problem. Those of a dimension of size one are never used."""
    assert scale_a is not None and scale_b is not None  # `_check_scales` refused them
    return {
        "has_block_scales": True,
        "scale_a_stride_m": scale_a.stride(0),
        "ld_scale_a": scale_a.stride(1),
        "group_stride_scale_b": scale_b.stride(0),
        "ld_scale_b": scale_b.stride(1),
        "scale_b_stride_n": scale_b.stride(2),
    }
