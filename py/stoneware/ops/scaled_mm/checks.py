"""Checks the arguments of scaled_mm, and makes the plan for those that pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoneware.ops import tensor_checks
from stoneware.ops.backend import Plan
from stoneware.runtime.dtypes import DTYPE_NAMES
from stoneware.specs.problem import PADDING, check_count, unit
from stoneware.specs.scaled_mm import SPEC
from stoneware.specs.scaled_mm_problem import BLOCK, IN_DTYPES, OUT_DTYPES, Problem, num_blocks, padded_num_blocks


def result(a: torch.Tensor, b: torch.Tensor, *others: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """See `OpPlans.checks`."""
    *_, out_dtype, _ = others
    return _shape(a, b), out_dtype


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int]:
    tensor_checks.check_rank("a", a, 2, "flatten leading dimensions with a.flatten(0, -2)")
    tensor_checks.check_rank("b", b, 2, "pass the weight [n, k] as weight.t()")
    tensor_checks.check_k(SPEC.name, a, b)
    return a.shape[0], b.shape[1]


def plan(
    make: Callable[[Problem], Plan],
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Plan:
    """See `OpPlans.checks`."""
    (m, n), k = _shape(a, b), a.shape[1]
    a_dtype = tensor_checks.check_dtype("a", a, IN_DTYPES, "quantize it with sw.quantize(a)")
    b_dtype = tensor_checks.check_dtype("b", b, IN_DTYPES, "quantize the weight [n, k] with sw.quantize(weight)")
    tensor_checks.check_out_dtype(out_dtype, OUT_DTYPES)
    if m and n:  # before the scales, whose shapes depend on k
        check_count("k", k, multiple=unit(a_dtype), remedy=PADDING["k"])
    scale_a_kind, scale_b_kind = _scale_kinds(scale_a, scale_b, m, n, k)
    has_block_scales = scale_a_kind == "block_1x128"
    if m == 1 and scale_b_kind == "row" and tuple(scale_a.shape) == (1, 1):
        scale_a_kind = "row"  # a single row: backends that need two scales of one kind can run it
    if bias is not None:
        tensor_checks.check_bias(bias, n, out_dtype)
    if out is not None:
        tensor_checks.check_out(out, (m, n), out_dtype, OUT_DTYPES)
    if m == 0 or n == 0:
        return tensor_checks.run_nothing
    tensor_checks.check_contiguous_along_k(a, b)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        out_dtype=DTYPE_NAMES[out_dtype],
        scale_a=scale_a_kind,
        scale_b=scale_b_kind,
        has_bias=bias is not None,
        # The stride of a dimension of size one is arbitrary.
        lda=a.stride(0) if m > 1 else k,
        ldb=b.stride(1),
        ldd=n if out is None or m == 1 else out.stride(0),
        use_fast_accum=use_fast_accum,
        **(_block_layouts(scale_a, scale_b, m, k) if has_block_scales else {}),
    )
    # Kernels follow the strides of block scales.
    scales = {} if has_block_scales else {"scale_a": scale_a, "scale_b": scale_b}
    return tensor_checks.with_copies(SPEC, make(problem), tensor_checks.strided(bias=bias, **scales))


def _scale_kinds(scale_a: torch.Tensor, scale_b: torch.Tensor, m: int, n: int, k: int) -> tuple[str, str]:
    """The kinds of both scales, from their shapes.

    If k has a single block, [m, 1] and one element are both kinds at once, with the same result.
    """
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        tensor_checks.check_dtype(name, scale, ("fp32",), f"cast it with {name}.float()")
    a_shape, b_shape = [m, num_blocks(k)], [num_blocks(k), num_blocks(n)]
    padded_b_shape = [padded_num_blocks(k), num_blocks(n)]
    is_a_block = list(scale_a.shape) == a_shape
    is_b_block = list(scale_b.shape) in (b_shape, padded_b_shape)
    b_shapes = list(dict.fromkeys(map(str, (b_shape, padded_b_shape))))
    if is_a_block and is_b_block and (a_shape[1] > 1 or scale_b.numel() > 1):
        return "block_1x128", "block_128x128"
    if is_a_block and a_shape[1] > 1 and list(scale_b.shape) == [a_shape[1], n]:
        return "block_1x128", "block_1x128"
    if is_a_block and a_shape[1] > 1 and scale_a.numel() > 1:
        is_transposed = list(scale_b.shape)[::-1] in (b_shape, padded_b_shape, [a_shape[1], n])
        remedy = f"scale b in blocks of {BLOCK} x {BLOCK}, or of {BLOCK} x 1"
        raise ValueError(
            f"scale_b.shape={list(scale_b.shape)} must be [k/{BLOCK}, n/{BLOCK}]={' or '.join(b_shapes)}, "
            f"rounded up, or [k/{BLOCK}, n]={[a_shape[1], n]}, with scale_a.shape={a_shape}, one scale per "
            f"{BLOCK} elements of a row; {'pass scale_b.t()' if is_transposed else remedy}"
        )
    if is_b_block and scale_b.numel() > 1:
        raise ValueError(
            f"scale_a.shape={list(scale_a.shape)} must be [m, k/{BLOCK}]={a_shape} with "
            f"scale_b.shape={list(scale_b.shape)}, one scale per {BLOCK} x {BLOCK} elements; "
            f"scale a in blocks of 1 x {BLOCK}"
        )
    return (
        _scale_kind("scale_a", scale_a, [m, 1], "[:, None]", a_shape),
        _scale_kind("scale_b", scale_b, [1, n], "[None, :]", b_shape),
    )


def _block_layouts(scale_a: torch.Tensor, scale_b: torch.Tensor, m: int, k: int) -> dict[str, Any]:
    """The strides of block scales in the fields of a Problem; for a dimension of size one, those of torch's layout."""
    b_rows, b_columns = scale_b.shape
    return {
        "scale_a_stride_m": scale_a.stride(0) if m > 1 else 1,
        "ld_scale_a": scale_a.stride(1) if k > BLOCK else m,
        "scale_b_stride_n": scale_b.stride(1) if b_columns > 1 else b_rows,
        "ld_scale_b": scale_b.stride(0) if b_rows > 1 else 1,
        "is_scale_b_padded": b_rows == padded_num_blocks(k),
    }


def _scale_kind(name: str, scale: torch.Tensor, vector_shape: list[int], index: str, block_shape: list[int]) -> str:
    if list(scale.shape) == vector_shape and scale.numel() != 1:
        return "row"
    if scale.numel() == 1 and scale.ndim <= 2:
        return "tensor"
    remedy = f"{name}.t()" if list(scale.shape) == vector_shape[::-1] else f"a flat vector as {name}{index}"
    letters = "[m, 1]" if vector_shape[1] == 1 else "[1, n]"
    raise ValueError(
        f"{name}.shape={list(scale.shape)} must be one element, {letters}={vector_shape}, or "
        f"{block_shape} of block scales; pass {remedy}"
    )
