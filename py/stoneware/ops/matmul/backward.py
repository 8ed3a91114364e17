"""The gradients of matmul, which are matmuls of transposed views:

    da = dc @ b^T      db = a^T @ dc      dbias = the sum of dc over its rows, in float32

The gradient of a column-major operand is computed transposed, so that the gradient of a weight that
is passed as weight.t() is row-major, like the weight. The gradient of a weight that a batch shares is
one matmul over all rows of the batch; those of other broadcast operands are summed over the batch in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoneware.ops.backward import Gradients, Tensors, call_of, is_saved, sum_of_rows
from stoneware.ops.matmul.layouts import batch_of
from stoneware.specs.matmul import SPEC


def rule(
    needs_input_grad: tuple[bool, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: None,
    out_dtype: torch.dtype | None,
    accumulate: bool,
    backend: str | None,
    config: object,
) -> tuple[Tensors, Gradients]:
    """See `stoneware.ops.backward.Rule`."""
    a_layout, b_layout = _layout(a, "n"), _layout(b, "t")
    dtypes = a.dtype, b.dtype, out_dtype or a.dtype
    saves = is_saved(SPEC, needs_input_grad, dtypes, a_layout + b_layout)
    a_shape, b_shape, dtype, has_dbias = a.shape, b.shape, a.dtype, needs_input_grad[2]

    def gradients(dc: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> Tensors:
        da = db = None
        if a is not None or b is not None:
            rows = _rows(dc.to(dtype), len(a_shape) == 1, len(b_shape) == 1)
        if b is not None:
            b = b[:, None] if b.ndim == 1 else b
            factors = (rows, b.mT) if a_layout == "n" else (b, rows.mT)
            da = _gradient(*factors, a_layout, a_shape, backend)
        if a is not None:
            a = a[None] if a.ndim == 1 else a
            if len(b_shape) <= 2 and a.ndim > 2 and a.shape[:-2] == rows.shape[:-2]:
                # Both have the rows of the whole batch, so the sum over the batch is part of one matmul.
                a, rows = a.flatten(0, -2), rows.flatten(0, -2)
            factors = (a.mT, rows) if b_layout == "n" else (rows.mT, a)
            db = _gradient(*factors, b_layout, b_shape, backend)
        return da, db, sum_of_rows(dc) if has_dbias else None

    return (a if saves[0] else None, b if saves[1] else None), gradients


def _layout(tensor: torch.Tensor, vector_layout: str) -> str:
    """The layout of its matrices; those that are neither row-major nor column-major are copied, row-major."""
    if tensor.ndim == 1:
        return vector_layout
    return "t" if tensor.stride(-2) == 1 and tensor.stride(-1) != 1 else "n"


def _rows(dc: torch.Tensor, is_a_vector: bool, is_b_vector: bool) -> torch.Tensor:
    """The gradient of the result, with the dimension that the call dropped for a vector. An expanded one is
    copied here once, not in every matmul."""
    if is_b_vector:
        dc = dc.unsqueeze(-1)
    if is_a_vector:
        dc = dc.unsqueeze(-2)
    return dc if 1 in dc.stride()[-2:] else dc.contiguous()


def _gradient(
    left: torch.Tensor, right: torch.Tensor, layout: str, shape: Sequence[int], backend: str | None
) -> torch.Tensor:
    """left @ right as the gradient of an operand of this layout and shape; for "t" transposed."""
    batch, operand_batch = batch_of(left.shape, right.shape), tuple(shape[:-2])
    out_dtype = None if batch == operand_batch else torch.float32
    result = call_of(SPEC)(left, right, None, None, out_dtype, False, backend, None)
    if batch != operand_batch:
        result = result.sum_to_size(*operand_batch, *result.shape[-2:]).to(left.dtype)
    if layout == "t":
        result = result.mT
    return result.reshape(shape) if len(shape) == 1 else result
