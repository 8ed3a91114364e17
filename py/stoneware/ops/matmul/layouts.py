"""The problem of arguments of any rank: a, b and out as they lie in memory, as a batch of products
whose matrices have one contiguous dimension each and one stride from a product to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from stoneware.ops.matmul.problem import Problem
from stoneware.runtime.fast_dataclass import dataclass


def broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Leading dimensions that two batches have together, by the rule of torch.broadcast_shapes, which
    is not asked: its first call imports some 490 modules (torch 2.13), and on an H200's machine a
    process's first matmul took 1.9 s with it and 8 ms without.

    Raises:
      ValueError: two extents differ and neither is 1.
    """
    if len(first) < len(second):
        first, second = second, first
    shape = list(first)
    for position, extent in enumerate(second, start=len(first) - len(second)):
        if shape[position] == 1:
            shape[position] = extent
        elif extent not in (1, shape[position]):
            raise ValueError(f"leading dimensions {list(first)} and {list(second)} must be equal or 1; expand one")
    return tuple(shape)


def result_shape(a_shape: Sequence[int], b_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a @ b as torch.matmul has it, of shapes that fit (see `checks.result`)."""
    batch = broadcast(a_shape[:-2], b_shape[:-2])
    return (*batch, *a_shape[-2:-1], *(b_shape[-1:] if len(b_shape) > 1 else ()))


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """An operand or d as a batch of matrices; the sizes and strides of the batch are outside in."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    num_rows: int
    num_columns: int
    row_stride: int
    column_stride: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], batch: Sequence[int]) -> Matrices:
        """Of two dimensions or more, the leading ones broadcast to `batch`, without those of size
        one."""
        leading = len(shape) - 2
        own = [0] * (len(batch) - leading) + [
            0 if size == 1 else stride for size, stride in zip(shape[:leading], strides)
        ]
        kept = [idx for idx, size in enumerate(batch) if size != 1]
        return cls(
            sizes=tuple(batch[idx] for idx in kept),
            strides=tuple(own[idx] for idx in kept),
            num_rows=shape[-2],
            num_columns=shape[-1],
            row_stride=strides[-2],
            column_stride=strides[-1],
        )

    @property
    def transposed(self) -> Matrices:
        return replace(
            self,
            num_rows=self.num_columns,
            num_columns=self.num_rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
        )

    def layout(self, preference: str) -> str | None:
        """ "n" for row-major, "t" for column-major, the first of `preference` if it is both; None if
        neither. The stride of a dimension of size one is arbitrary."""
        is_layout = {
            "n": (self.num_columns == 1 or self.column_stride == 1)
            and (self.num_rows == 1 or self.row_stride >= self.num_columns),
            "t": (self.num_rows == 1 or self.row_stride == 1)
            and (self.num_columns == 1 or self.column_stride >= self.num_rows),
        }
        return next((layout for layout in preference if is_layout[layout]), None)

    def leading_dimension(self, layout: str) -> int:
        """The stride of the outer dimension; if that has size one, a dense matrix's."""
        if layout == "n":
            return self.row_stride if self.num_rows > 1 else self.num_columns
        return self.column_stride if self.num_columns > 1 else self.num_rows

    @property
    def is_shared(self) -> bool:
        """Whether the innermost dimension of the batch has one matrix."""
        return self.strides[-1] == 0

    @property
    def with_rows_folded(self) -> Matrices | None:
        """The innermost dimension of the batch as further rows, if one stride goes through both."""
        if self.num_rows > 1 and self.strides[-1] != self.num_rows * self.row_stride:
            return None
        return replace(
            self,
            sizes=self.sizes[:-1],
            strides=self.strides[:-1],
            num_rows=self.sizes[-1] * self.num_rows,
            row_stride=self.row_stride if self.num_rows > 1 else self.strides[-1],
        )

    @property
    def with_columns_folded(self) -> Matrices | None:
        folded = self.transposed.with_rows_folded
        return None if folded is None else folded.transposed

    @property
    def without_shared(self) -> Matrices:
        return replace(self, sizes=self.sizes[:-1], strides=self.strides[:-1])

    @property
    def has_one_stride(self) -> bool:
        """Whether one stride goes through the whole batch."""
        return all(outer == size * inner for outer, inner, size in zip(self.strides, self.strides[1:], self.sizes[1:]))

    @property
    def batch_stride(self) -> int:
        return self.strides[-1] if self.strides else 0


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Arguments as a problem's.

    Attributes:
      left, right, d: its operands and result.
      is_transposed: whether it is out^T = b^T @ a^T.
      copies: what must be made dense, with the layout that its matrices then have: "a" or "b", an
        operand; "a of the batch" or "b of the batch", an operand for every product; "out", which
        is computed apart.
    """

    left: Matrices
    right: Matrices
    d: Matrices
    is_transposed: bool
    copies: Mapping[str, str]

    def problem(self, **fields: Any) -> Problem:
        a_layout, b_layout = self.left.layout("nt"), self.right.layout("tn")
        assert a_layout is not None and b_layout is not None  # `arrangement` copies what has none
        return Problem(
            m=self.left.num_rows,
            n=self.right.num_columns,
            k=self.left.num_columns,
            layout=a_layout + b_layout,
            lda=self.left.leading_dimension(a_layout),
            ldb=self.right.leading_dimension(b_layout),
            ldd=self.d.leading_dimension("n"),
            batch=math.prod(self.left.sizes),
            batch_stride_a=self.left.batch_stride,
            batch_stride_b=self.right.batch_stride,
            batch_stride_d=self.d.batch_stride,
            **fields,
        )


def arrangement(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], *, has_bias: bool
) -> Arrangement:
    """Finds the problem of arguments that fit, with as few copies as it can.

    A vector b is taken as the row of the transposed product: matrices times a vector are then what
    a row times a weight is, a small m, for which there are kernels.
    """
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    copies: dict[str, str] = {}
    places: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        "a": (tuple(a.shape), a.stride()),
        "b": (tuple(b.shape), b.stride()),
        "out": (shape, _dense_strides(shape) if out is None else out.stride()),
    }
    is_transposed = b.ndim == 1 and a.ndim > 1
    while True:
        matrices = _as_matrices(places, batch)
        for name, preference in (("a", "nt"), ("b", "tn")):
            if matrices[name].layout(preference) is None:
                copies[name] = "n"
                places[name] = _dense(places[name][0])
                matrices = _as_matrices(places, batch)
        names = ("b", "a", "out") if is_transposed else ("a", "b", "out")
        left, right, d = (matrices[name] for name in names)
        if is_transposed:
            left, right, d = left.transposed, right.transposed, d.transposed
        left, right, d = _folded(left, right, d, has_bias)
        strided = [name for name, one in zip(names, (left, right, d)) if not one.has_one_stride]
        if not strided:
            return Arrangement(left=left, right=right, d=d, is_transposed=is_transposed, copies=copies)
        for name in strided:
            copies.pop(name, None)
            if name == "out":
                copies[name], places[name] = "n", _dense(shape)
                continue
            layout = matrices[name].layout("nt" if name == "a" else "tn")
            assert layout is not None  # copied above if it had none
            copies[f"{name} of the batch"] = layout
            places[name] = _dense((*batch, *places[name][0][-2:]), layout)


def _as_matrices(
    places: Mapping[str, tuple[Sequence[int], Sequence[int]]], batch: Sequence[int]
) -> dict[str, Matrices]:
    """a as [.., 1 or m, k], b as [.., k, n or 1], out as [.., 1 or m, n or 1]."""
    (a_shape, a_strides), (b_shape, b_strides) = places["a"], places["b"]
    out_shape, out_strides = places["out"]
    if len(b_shape) == 1:
        out_shape, out_strides = (*out_shape, 1), (*out_strides, 1)
        b_shape, b_strides = (*b_shape, 1), (*b_strides, b_shape[0])
    if len(a_shape) == 1:
        out_shape = (*out_shape[:-1], 1, out_shape[-1])
        out_strides = (*out_strides[:-1], out_shape[-1], out_strides[-1])
        a_shape, a_strides = (1, *a_shape), (a_shape[0], *a_strides)
    return {
        "a": Matrices.of(a_shape, a_strides, batch),
        "b": Matrices.of(b_shape, b_strides, batch),
        "out": Matrices.of(out_shape, out_strides, batch),
    }


def _folded(left: Matrices, right: Matrices, d: Matrices, has_bias: bool) -> tuple[Matrices, Matrices, Matrices]:
    """A batch that shares an operand as fewer and larger products, as far as strides allow: its
    rows are m of one product if b is shared, its columns n if a is, unless each product adds the
    same bias to them."""
    while left.sizes:
        product = None
        if right.is_shared:
            product = _product(left.with_rows_folded, right.without_shared, d.with_rows_folded)
        if product is None and left.is_shared and not has_bias:
            product = _product(left.without_shared, right.with_columns_folded, d.with_columns_folded)
        if product is None:
            break
        left, right, d = product
    return left, right, d


def _product(
    left: Matrices | None, right: Matrices | None, d: Matrices | None
) -> tuple[Matrices, Matrices, Matrices] | None:
    """The three, if none is missing and each has a layout that a problem takes."""
    if left is None or right is None or d is None:
        return None
    has_layouts = left.layout("nt") and right.layout("tn") and d.layout("n")
    return (left, right, d) if has_layouts else None


def _dense(shape: Sequence[int], layout: str = "n") -> tuple[Sequence[int], Sequence[int]]:
    if layout == "n":
        return shape, _dense_strides(shape)
    strides = _dense_strides((*shape[:-2], shape[-1], shape[-2]))
    return shape, (*strides[:-2], strides[-1], strides[-2])


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[idx + 1 :]) for idx in range(len(shape)))
