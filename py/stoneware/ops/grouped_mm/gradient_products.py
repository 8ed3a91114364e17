"""The products that gradients of grouped_mm in bf16 are made of, as two operators:

    rows    x[m, p], b[groups, p, q] -> [m, q]              x @ b of each row's group: dgrad
    groups  x[m, p], y[m, q]         -> [groups, p, q]      x^T @ y of each group's rows: wgrad

Each is the other's gradient. Rows after the last offset belong to no group: their gradient is zero. On an
H100 or H200 both run torch._grouped_mm, as the backend "vendor" does, elsewhere plain torch in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoneware.kernels.registry import REFERENCE
from stoneware.ops import registration
from stoneware.ops.product import UNIT_BYTES

if TYPE_CHECKING:
    from stoneware.ops.backward import Gradients, Tensors


def _is_for_torch(x: torch.Tensor, offs: torch.Tensor, backend: str | None) -> bool:
    """Whether torch._grouped_mm computes it, which wants a row and a group."""
    if not x.shape[0] or not offs.shape[0]:
        return False
    return backend != REFERENCE and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def _aligned(matrices: torch.Tensor) -> torch.Tensor:
    """As torch._grouped_mm wants them: what is computed from a user's views may begin at any element."""
    is_aligned = matrices.data_ptr() % UNIT_BYTES == 0 and 1 in matrices.stride()[-2:]
    for stride in matrices.stride():
        is_aligned &= stride == 1 or stride * matrices.element_size() % UNIT_BYTES == 0
    return matrices if is_aligned else matrices.contiguous()


def _groups_of(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(group, its rows)"""
    return enumerate(itertools.starmap(slice, itertools.pairwise([0, *offs.tolist()])))


def _rows(x: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        out = torch._grouped_mm(_aligned(x), _aligned(b), offs=offs)
        after = torch.arange(x.shape[0], device=x.device) >= offs[-1]
        return out.masked_fill_(after[:, None], 0)  # torch leaves them as they were
    out = x.new_zeros(x.shape[0], b.shape[2])
    for group, rows in _groups_of(offs):
        out[rows] = x[rows].float() @ b[group].float()
    return out


def _groups(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        return torch._grouped_mm(_aligned(x).t(), _aligned(y), offs=offs)
    out = x.new_zeros(offs.shape[0], x.shape[1], y.shape[1])
    for group, rows in _groups_of(offs):
        out[group] = x[rows].float().t() @ y[rows].float()
    return out


def _rule_of_rows(needed: Sequence[bool], x: Any, b: Any, offs: Any, backend: str | None) -> tuple[Tensors, Gradients]:
    def gradients(grad: torch.Tensor, *saved: Any) -> Tensors:
        x, b, offs = saved
        return (
            None if b is None else ROWS(row_major(grad), b.mT, offs, backend),
            None if x is None else GROUPS(x, row_major(grad), offs, backend),
        )

    return (x if needed[1] else None, b if needed[0] else None, offs), gradients


def _rule_of_groups(
    needed: Sequence[bool], x: Any, y: Any, offs: Any, backend: str | None
) -> tuple[Tensors, Gradients]:
    def gradients(grad: torch.Tensor, *saved: Any) -> Tensors:
        x, y, offs = saved
        return (
            None if y is None else ROWS(y, grad.mT, offs, backend),
            None if x is None else ROWS(x, grad, offs, backend),
        )

    return (x if needed[1] else None, y if needed[0] else None, offs), gradients


def row_major(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.stride(-1) == 1 else grad.contiguous()


ROWS = registration.define(
    "grouped_mm_rows(Tensor x, Tensor b, Tensor offs, str? backend) -> Tensor",
    ("x", "b", "offs"),
    _rows,
    lambda x, b, offs, backend: x.new_empty(x.shape[0], b.shape[2]),
    rule=_rule_of_rows,
)
GROUPS = registration.define(
    "grouped_mm_groups(Tensor x, Tensor y, Tensor offs, str? backend) -> Tensor",
    ("x", "y", "offs"),
    _groups,
    lambda x, y, offs, backend: x.new_empty(offs.shape[0], x.shape[1], y.shape[1]),
    rule=_rule_of_groups,
)
