"""The problem of arguments of any rank: a, b and out in their memory layout, as a batch of matmuls
whose matrices have one contiguous dimension each and one stride from a matmul to the next.

Tensors of the same shapes and strides on the device "meta", without memory, describe the layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stoneware.ops.tensor_checks import Copy, dense_like
from stoneware.specs.matmul_problem import Problem


def batch_of(a_shape: Sequence[int], b_shape: Sequence[int]) -> tuple[int, ...]:
    """The broadcast leading dimensions of a and b.

    torch.broadcast_shapes is not used: its first call imports about 490 modules (torch 2.13), and on an
    H200's machine the first matmul of a process took 1.9 s with it and 8 ms without.

    Raises:
      ValueError: two extents differ and neither is 1.
    """
    shorter, longer = sorted((a_shape[:-2], b_shape[:-2]), key=len)
    batch = list(longer)
    for position, extent in enumerate(shorter, start=len(longer) - len(shorter)):
        if extent == batch[position] or extent == 1:  # the first test also holds for a symbol of a trace
            continue
        if batch[position] != 1:
            raise ValueError(
                f"a.shape={list(a_shape)} and b.shape={list(b_shape)} must have leading dimensions "
                f"that broadcast, {list(a_shape[:-2])} and {list(b_shape[:-2])} do not; expand or "
                "reshape one of them"
            )
        batch[position] = extent
    return tuple(batch)


def result_shape(a_shape: Sequence[int], b_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a @ b like in torch.matmul, for shapes that agree in k; raises like `batch_of`."""
    return (*batch_of(a_shape, b_shape), *a_shape[-2:-1], *(b_shape[-1:] if len(b_shape) > 1 else ()))


class Arrangement(NamedTuple):
    """The problem of arguments, and how they become its operands.

    Attributes:
      problem: the problem.
      is_transposed: whether it is out^T = b^T @ a^T.
      copies: tensor -> how it is copied at each call: an operand is made dense, or expanded to the whole
        batch, like in torch.matmul; "out" is computed in a dense tensor, or added to in a dense copy.
    """

    problem: Problem
    is_transposed: bool
    copies: dict[str, Copy]


def arrangement(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], **fields: Any
) -> Arrangement:
    """The problem of valid arguments, with as few copies as possible.

    A vector b becomes a row of the transposed matmul. That has m = 1, for which there are kernels.

    Args:
      a, b, out: the arguments.
      shape: of the result.
      fields: the problem's other fields, without sizes and strides.
    """
    batch = batch_of(a.shape, b.shape)
    copies: dict[str, Copy] = {}
    tensors = {"a": _without_memory(a), "b": _without_memory(b), "out": _without_memory(out, shape)}
    is_transposed = b.ndim == 1 and a.ndim > 1
    while True:
        matrices = _as_matrices(batch, **tensors)
        for name, preference in (("a", "nt"), ("b", "tn")):
            if _layout(matrices[name], preference) is None:
                copies[name] = torch.Tensor.contiguous
                tensors[name] = tensors[name].contiguous()
                matrices = _as_matrices(batch, **tensors)
        names = ("b", "a", "out") if is_transposed else ("a", "b", "out")
        left, right, d = (matrices[name].mT if is_transposed else matrices[name] for name in names)
        left, right, d = _fold_batch(left, right, d, fields["has_bias"])
        irregular = [name for name, matrix in zip(names, (left, right, d)) if not _has_single_stride(matrix)]
        if not irregular:
            return Arrangement(_problem(left, right, d, **fields), is_transposed, copies)
        for name in irregular:
            if name == "out":
                copies[name] = torch.Tensor.contiguous if fields.get("accumulate") else dense_like
            else:
                layout = _layout(matrices[name], "nt" if name == "a" else "tn")
                copies[name] = functools.partial(_dense_batch, batch, layout == "t")
            tensors[name] = copies[name](tensors[name])


def _without_memory(tensor: torch.Tensor | None, shape: Sequence[int] = ()) -> torch.Tensor:
    """The layout of a tensor; without one, that of an out of this shape, which the call allocates."""
    if tensor is None:
        return torch.empty(shape, dtype=torch.uint8, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.uint8, device="meta")


def _dense_batch(batch: tuple[int, ...], is_column_major: bool, matrices: torch.Tensor) -> torch.Tensor:
    matrices = matrices.expand(*batch, *matrices.shape[-2:])
    return matrices.mT.contiguous().mT if is_column_major else matrices.contiguous()


def _as_matrices(
    batch: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> dict[str, torch.Tensor]:
    """a as [.., 1 or m, k], b as [.., k, n or 1], out as [.., 1 or m, n or 1], each over the batch without
    its dimensions of size one."""
    if b.ndim == 1:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
    if a.ndim == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    matrices = {"a": a, "b": b, "out": out}
    if not batch:
        return matrices
    unit_dims = tuple(idx for idx, size in enumerate(batch) if size == 1)
    return {name: matrix.expand(*batch, *matrix.shape[-2:]).squeeze(unit_dims) for name, matrix in matrices.items()}


def _layout(matrices: torch.Tensor, preference: str) -> str | None:
    """ "n" for row-major, "t" for column-major, the first of `preference` if it is both; None if
    neither. The stride of a dimension of size one is arbitrary."""
    *_, rows, columns = matrices.shape
    *_, row_stride, column_stride = matrices.stride()
    is_layout = {
        "n": (columns == 1 or column_stride == 1) and (rows == 1 or row_stride >= columns),
        "t": (rows == 1 or row_stride == 1) and (columns == 1 or column_stride >= rows),
    }
    return next((layout for layout in preference if is_layout[layout]), None)


def _leading_dimension(matrices: torch.Tensor, layout: str) -> int:
    """The stride of the outer dimension; if that has size one, a dense matrix's."""
    outer, inner = (-2, -1) if layout == "n" else (-1, -2)
    return matrices.stride(outer) if matrices.shape[outer] > 1 else matrices.shape[inner]


def _fold_batch(
    left: torch.Tensor, right: torch.Tensor, d: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch that shares an operand as fewer and larger matmuls, as far as strides allow. If b is shared,
    all rows become m of one matmul; if a is shared and bias is None, all columns become n."""
    while left.ndim > 2:
        matmul = None
        if right.stride(-3) == 0:
            matmul = _matmul(_fold_rows(left), right.select(-3, 0), _fold_rows(d))
        if matmul is None and left.stride(-3) == 0 and not has_bias:
            matmul = _matmul(left.select(-3, 0), _fold_columns(right), _fold_columns(d))
        if matmul is None:
            break
        left, right, d = matmul
    return left, right, d


def _matmul(
    left: torch.Tensor | None, right: torch.Tensor | None, d: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The three matrices, if none is None and each has a layout that a problem supports."""
    if left is None or right is None or d is None:
        return None
    has_layouts = _layout(left, "nt") and _layout(right, "tn") and _layout(d, "n")
    return (left, right, d) if has_layouts else None


def _fold_rows(matrices: torch.Tensor) -> torch.Tensor | None:
    """The innermost dimension of the batch as further rows, if a single stride covers both."""
    rows = matrices.shape[-2]
    if rows > 1 and matrices.stride(-3) != rows * matrices.stride(-2):
        return None
    return matrices.flatten(-3, -2)


def _fold_columns(matrices: torch.Tensor) -> torch.Tensor | None:
    columns = _fold_rows(matrices.mT)
    return None if columns is None else columns.mT


def _has_single_stride(matrices: torch.Tensor) -> bool:
    """Whether a single stride covers the whole batch."""
    sizes, strides = matrices.shape[:-2], matrices.stride()[:-2]
    return all(outer == size * inner for outer, inner, size in zip(strides, strides[1:], sizes[1:]))


def _problem(left: torch.Tensor, right: torch.Tensor, d: torch.Tensor, **fields: Any) -> Problem:
    a_layout, b_layout = _layout(left, "nt"), _layout(right, "tn")
    assert a_layout is not None and b_layout is not None  # `arrangement` copies matrices without a layout
    strides: dict[str, Any] = {
        f"batch_stride_{name}": matrix.stride(-3) if matrix.ndim > 2 else 0
        for name, matrix in (("a", left), ("b", right), ("d", d))
    }
    return Problem(
        m=left.shape[-2],
        n=right.shape[-1],
        k=left.shape[-1],
        layout=a_layout + b_layout,
        lda=_leading_dimension(left, a_layout),
        ldb=_leading_dimension(right, b_layout),
        ldd=_leading_dimension(d, "n"),
        batch=math.prod(left.shape[:-2]),
        **strides,
        **fields,
    )
