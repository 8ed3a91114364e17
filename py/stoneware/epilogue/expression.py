"""What an epilogue computes: for each output a value per element, as a graph of nodes.

Nodes are equal if they compute the same, so the text that is made of them depends on the computation alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stoneware.errors import UnsupportedError


class Acc(NamedTuple):
    """The sums of a matmul, with its scales and its bias, in float32."""


class Load(NamedTuple):
    """A view of an input.

    Attributes:
      input: its position.
      dtype: of the input.
      row_stride, column_stride: elements from one row of the result to the next, and from one column; 0 where
        the view is broadcast.
      offset: elements from the input's first to the view's.
    """

    input: int
    dtype: torch.dtype
    row_stride: int
    column_stride: int
    offset: int


class Constant(NamedTuple):
    value: float


class Apply(NamedTuple):
    """An operator of `arithmetic.py`.

    Attributes:
      operator: its name.
      arguments: name -> node, in the order of its text.
      dtype: of the result, to which it is rounded.
    """

    operator: str
    arguments: tuple[tuple[str, Any], ...]
    dtype: torch.dtype


class Half(NamedTuple):
    """The columns of a value that are even (`parity` 0) or odd (1)."""

    value: Any
    parity: int


class Element(NamedTuple):
    """An int64 of an input, `offset` elements behind its address."""

    input: int
    offset: int


class Dropout(NamedTuple):
    """The dropout of a value (philox.h).

    Attributes:
      value: the node.
      p: probability that an element is dropped.
      seed, offset: int64 numbers or elements.
      dtype: of the result, to which it is rounded.
    """

    value: Any
    p: float
    seed: int | Element
    offset: int | Element
    dtype: torch.dtype


class Output(NamedTuple):
    """A result of the epilogue.

    Attributes:
      kind: "full" for a value per element of the matmul's result; "half" for one per two columns; "row_max" for
        the maximum of each row of `value`, which `is_half` says the columns of.
      value: the node.
      shape: of the tensor.
      dtype: of the tensor.
      is_half: whether `value` has a value per two columns.
    """

    kind: str
    value: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_half: bool = False


class Expression(NamedTuple):
    """What a function computes.

    Attributes:
      outputs: its results.
      is_tuple: whether it returns several, as a tuple.
    """

    outputs: tuple[Output, ...]
    is_tuple: bool


class UnfusableError(UnsupportedError):
    """An epilogue that is correct but cannot run inside a kernel: it runs after the matmul."""


def load_of(input: int, view: torch.Tensor, frame: tuple[int, ...]) -> Load:
    """The view of an input as the elements of a result of shape `frame` read it, broadcast like in torch.

    Args:
      input: its position.
      view: on the device "meta".
      frame: shape of the result, or of half of its columns.

    Raises:
      UnfusableError: no single stride leads from each row to the next.
    """
    sizes, strides = view.shape, view.stride()
    missing = len(frame) - len(sizes)
    aligned = [(1, 0)] * missing + [(size, stride if size > 1 else 0) for size, stride in zip(sizes, strides)]
    column_stride = aligned[-1][1] if aligned else 0
    row_stride, rows = 0, 1  # of the dimensions so far, from the innermost
    for (_, stride), extent in reversed(list(zip(aligned[:-1], frame[:-1]))):
        if extent == 1:
            continue
        if rows == 1:
            row_stride = stride
        elif stride != rows * row_stride:
            raise UnfusableError(
                f"inputs[{input}] with shape {list(sizes)} and strides {list(strides)} must have one stride over all "
                f"rows of a result of shape {list(frame)}; pass it expanded, or contiguous"
            )
        rows *= extent
    return Load(input, view.dtype, row_stride, column_stride, int(view.storage_offset()))


def loads(expression: Expression) -> list[Load]:
    """Each load, once, in the order of their first use."""
    found: dict[Load, None] = {}
    seen: set[int] = set()

    def visit(node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Load):
            found[node] = None
        elif isinstance(node, Apply):
            for _, argument in node.arguments:
                visit(argument)
        elif isinstance(node, (Half, Dropout)):
            visit(node.value)

    for output in expression.outputs:
        visit(output.value)
    return list(found)
