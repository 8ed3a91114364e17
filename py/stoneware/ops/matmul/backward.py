"""The gradients of matmul, which are matmuls of transposed views:

    da = dc @ b^T      db = a^T @ dc      dbias = the sum of dc over its rows, in float32

The gradient of a column-major operand is computed transposed, so that the gradient of a weight that
is passed as weight.t() is row-major, as the weight is. The gradient of a weight that a batch
shares is one product over all rows of the batch; those of other operands that are broadcast are
summed over the batch in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stoneware.kernels import needs
from stoneware.kernels.needs import Product
from stoneware.ops.backward import Gradients, Tensors, call_of, needed_products, sum_of_rows
from stoneware.ops.matmul.spec import SPEC


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
    layout = _layout(a, "n") + _layout(b, "t")
    products, is_saved = needed_products(SPEC, needs_input_grad, (a.dtype, b.dtype, out_dtype or a.dtype), layout)
    saved = a if is_saved[0] else None, b if is_saved[1] else None
    shapes = {"da": a.shape, "db": b.shape}
    dtype = a.dtype

    def gradients(dc: torch.Tensor, *saved: torch.Tensor | None) -> Tensors:
        matmul = call_of(SPEC)
        found: dict[str, torch.Tensor] = {}
        operands: dict[str, torch.Tensor] = {}
        if True in is_saved:
            operands = _matrices(dc.to(dtype), *saved, *(len(shape) == 1 for shape in shapes.values()))
        for product in products:
            name = product.result.removesuffix("^T")
            found[name] = (
                sum_of_rows(dc)
                if product.role == needs.DBIAS
                else _gradient(matmul, product, operands, shapes[name], backend)
            )
        return found.get("da"), found.get("db"), found.get("dbias")

    return saved, gradients


def _batch(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...]:
    if left.ndim == right.ndim == 2:  # torch's function takes longer than a call
        return ()
    return tuple(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))


def _layout(tensor: torch.Tensor, of_vector: str) -> str:
    """Of its matrices; those that are neither row-major nor column-major are copied, row-major."""
    if tensor.ndim == 1:
        return of_vector
    return "t" if tensor.stride(-2) == 1 and tensor.stride(-1) != 1 else "n"


def _matrices(
    dc: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, is_a_vector: bool, is_b_vector: bool
) -> dict[str, torch.Tensor]:
    """The operands by name, with the dimension that a vector's product drops. A gradient that is
    expanded is copied here, once, and not by every product."""
    if is_b_vector:
        dc = dc.unsqueeze(-1)
    if is_a_vector:
        dc = dc.unsqueeze(-2)
    operands = {"dc": dc if 1 in dc.stride()[-2:] else dc.contiguous()}
    if a is not None:
        operands["a"] = a[None] if is_a_vector else a
    if b is not None:
        operands["b"] = b[:, None] if is_b_vector else b
    return operands


def _gradient(
    matmul: Callable[..., torch.Tensor],
    product: Product,
    operands: dict[str, torch.Tensor],
    shape: Sequence[int],
    backend: str | None,
) -> torch.Tensor:
    """The gradient of an operand of this shape."""
    left, right = operands[product.left.removesuffix("^T")], operands[product.right.removesuffix("^T")]
    batch = _batch(left, right)
    if batch and product.role == needs.WGRAD and len(shape) <= 2 and left.shape[:-2] == right.shape[:-2]:
        # Both have the rows of the whole batch, so that its sum is that of one product over k.
        left, right, batch = left.flatten(0, -2), right.flatten(0, -2), ()
    kept = tuple(shape[:-2])
    result = matmul(
        left.mT if product.left.endswith("^T") else left,
        right.mT if product.right.endswith("^T") else right,
        None,
        None,
        None if batch == kept else torch.float32,
        backend,
        None,
    )
    if batch != kept:
        result = result.sum_to_size(*kept, *result.shape[-2:]).to(left.dtype)
    if product.result.endswith("^T"):
        result = result.mT
    return result.reshape(shape) if len(shape) == 1 else result
