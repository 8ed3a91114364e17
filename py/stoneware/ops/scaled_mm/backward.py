"""The gradients of scaled_mm: of its scales and its bias. Its fp8 operands are frozen.

    ab = a @ b                                  dbias = the sum of dc over its rows, in float32
    dscale_a = sums of dc * ab * scale_b        dscale_b = sums of dc * ab * scale_a

`ab` is computed again in float32 from the operands, which the caller holds anyway. The result cannot
replace it: it is rounded, includes the bias, and is zero where a scale is zero. With block scales there
is one matmul for each block of k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from stoneware.ops.backward import Gradients, Tensors, call_of, is_saved, sum_of_rows
from stoneware.ops.tensor_checks import gradient_error
from stoneware.specs.scaled_mm import SPEC
from stoneware.specs.scaled_mm_problem import BLOCK


def rule(
    needs_input_grad: tuple[bool, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out: None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    backend: str | None,
    config: object,
) -> tuple[Tensors, Gradients]:
    """See `stoneware.ops.backward.Rule`."""
    frozen = list(itertools.compress(("a", "b"), needs_input_grad))
    if frozen:
        raise gradient_error(
            f"{SPEC.name} has no gradients of operands in fp8",
            frozen,
            "keep the weight in bf16 and train it with sw.nn.Float8Linear",
        )
    is_block = _is_block(scale_a, scale_b, b.shape[1])
    saves = is_saved(SPEC, needs_input_grad, (a.dtype, b.dtype, out_dtype), "nt")
    shapes, has_dbias = (scale_a.shape, scale_b.shape), needs_input_grad[-1]

    def gradients(dc: torch.Tensor, *saved: torch.Tensor | None) -> Tensors:
        scaled_mm = call_of(SPEC)

        def unscaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            unit_scale = torch.ones((), device=a.device)
            return scaled_mm(a, b, unit_scale, unit_scale, None, None, torch.float32, use_fast_accum, backend, None)

        a, b, scale_a, scale_b = saved
        dscales: Tensors = (None, None)
        if a is not None and b is not None:
            parts = zip(a.split(BLOCK, 1), b.split(BLOCK, 0)) if is_block else [(a, b)]
            dc_ab_parts = (dc.float() * unscaled(*part) for part in parts)
            dscales = (_block_scale_gradients if is_block else _scale_gradients)(dc_ab_parts, scale_a, scale_b, shapes)
        return None, None, *dscales, sum_of_rows(dc) if has_dbias else None

    return tuple(tensor if keep else None for tensor, keep in zip((a, b, scale_a, scale_b), saves)), gradients


def _is_block(scale_a: torch.Tensor, scale_b: torch.Tensor, n: int) -> bool:
    """Whether scales that passed the checks are block scales; a single block counts as a tensor."""
    if scale_a.ndim != 2 or scale_b.ndim != 2:
        return False
    return scale_a.shape[1] > 1 or scale_b.shape[0] > 1 or scale_b.shape[1] not in (1, n)


Shapes = tuple[torch.Size, torch.Size]


def _scale_gradients(
    dc_ab_parts: Iterator[torch.Tensor], scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, shapes: Shapes
) -> Tensors:
    """The gradients of scale_a and scale_b, of these shapes, from dc * ab; each needs the other scale."""
    (dc_ab,) = dc_ab_parts
    return tuple(
        None if other is None else (dc_ab * other).sum_to_size(shape)
        for other, shape in zip((scale_b, scale_a), shapes)
    )


def _block_scale_gradients(
    dc_ab_parts: Iterator[torch.Tensor], scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, shapes: Shapes
) -> Tensors:
    """Like `_scale_gradients`, from dc * ab of each block of k."""
    rows, columns = [], []
    num_rows_b, num_columns_b = shapes[1]
    for block, dc_ab in enumerate(dc_ab_parts):
        n = dc_ab.shape[1]
        is_1d = num_columns_b == n
        if scale_b is not None:
            column_scales = scale_b[block]
            rows.append((dc_ab * (column_scales if is_1d else column_scales.repeat_interleave(BLOCK)[:n])).sum(1))
        if scale_a is not None:
            sums = (dc_ab * scale_a[:, block, None]).sum(0)
            if not is_1d:
                sums = torch.nn.functional.pad(sums, (0, -n % BLOCK)).unflatten(0, (-1, BLOCK)).sum(1)
            columns.append(sums)
    padding = 0, 0, 0, num_rows_b - len(columns)
    return (
        torch.stack(rows, 1) if rows else None,
        torch.nn.functional.pad(torch.stack(columns), padding) if columns else None,
    )
