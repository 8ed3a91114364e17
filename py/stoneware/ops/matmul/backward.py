"""The gradients of matmul, which are matmuls of transposed views:

    da = dc @ b^T      db = a^T @ dc      dbias = the sum of dc over its rows, in float32

The gradient of a column-major operand is computed transposed, so that the gradient of a weight that
is passed as weight.t() is row-major, as the weight is. The gradient of a weight that a batch
shares is one product over all rows of the batch; those of other operands that are broadcast are
summed over the batch in float32.
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
    backend: str | None,
    config: object,
) -> tuple[Tensors, Gradients]:
    """See `stoneware.ops.backward.Rule`."""
    a_layout, b_layout = _layout(a, "n"), _layout(b, "t")
    dtypes = a.dtype, b.dtype, out_dtype or a.dtype
    kept = is_saved(SPEC, needs_input_grad, dtypes, a_layout + b_layout)
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
                # Both have the rows of the whole batch, so that its sum is that of one product over k.
                a, rows = a.flatten(0, -2), rows.flatten(0, -2)
            factors = (a.mT, rows) if b_layout == "n" else (rows.mT, a)
            db = _gradient(*factors, b_layout, b_shape, backend)
        return da, db, sum_of_rows(dc) if has_dbias else None

    return (a if kept[0] else None, b if kept[1] else None), gradients


def _layout(tensor: torch.Tensor, of_vector: str) -> str:
    """The layout of its matrices; those that are neither row-major nor column-major are copied, row-major."""
    if tensor.ndim == 1:
        return of_vector
    return "t" if tensor.stride(-2) == 1 and tensor.stride(-1) != 1 else "n"


def _rows(dc: torch.Tensor, is_a_vector: bool, is_b_vector: bool) -> torch.Tensor:
    """The gradient of the result with the dimension that a vector's product drops. One that is expanded
    is copied here, once, and not by every product."""
    if is_b_vector:
        dc = dc.unsqueeze(-1)
    if is_a_vector:
        dc = dc.unsqueeze(-2)
    return dc if 1 in dc.stride()[-2:] else dc.contiguous()


def _gradient(
    left: torch.Tensor, right: torch.Tensor, layout: str, shape: Sequence[int], backend: str | None
) -> torch.Tensor:
    """left @ right as the gradient of an operand of this layout and shape; for "t" transposed."""
    batch, kept = batch_of(left.shape, right.shape), tuple(shape[:-2])
    out_dtype = None if batch == kept else torch.float32
    result = call_of(SPEC)(left, right, None, None, out_dtype, backend, None)
    if batch != kept:
        result = result.sum_to_size(*kept, *result.shape[-2:]).to(left.dtype)
    if layout == "t":
        result = result.mT
    return result.reshape(shape) if len(shape) == 1 else result
