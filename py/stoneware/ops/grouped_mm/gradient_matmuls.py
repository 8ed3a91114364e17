"""The matmuls of the gradients of grouped_mm in bf16, as two operators:

    rows    x[m, p], b[groups, p, q] -> [m, q]              x @ b of each row's group: dgrad
    groups  x[m, p], y[m, q]         -> [groups, p, q]      x^T @ y of each group's rows: wgrad

The gradients of each are calls of both. Rows after the last offset belong to no group: their gradient is
zero. On an H100 or H200 both run torch._grouped_mm, like the backend "vendor"; elsewhere plain torch in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stoneware.kernels.config import REFERENCE
from stoneware.ops import registration
from stoneware.ops.backend import without_autocast
from stoneware.specs.problem import UNIT_BYTES

if TYPE_CHECKING:
    from stoneware.ops.backward import Rule, Tensors


def _is_for_torch(x: torch.Tensor, offs: torch.Tensor, backend: str | None) -> bool:
    """Whether torch._grouped_mm computes it, which needs at least one row and one group."""
    if not x.shape[0] or not offs.shape[0]:
        return False
    return backend != REFERENCE and x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def _align(matrices: torch.Tensor) -> torch.Tensor:
    """A copy if torch._grouped_mm refuses the address or the strides, as of a user's view."""
    is_aligned = matrices.data_ptr() % UNIT_BYTES == 0 and 1 in matrices.stride()[-2:]
    for stride in matrices.stride():
        is_aligned &= stride == 1 or stride * matrices.element_size() % UNIT_BYTES == 0
    return matrices if is_aligned else matrices.contiguous()


def _groups_of(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of each group."""
    return enumerate(itertools.starmap(slice, itertools.pairwise([0, *offs.tolist()])))


@without_autocast
def _rows(x: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        out = torch._grouped_mm(_align(x), _align(b), offs=offs)
        after = torch.arange(x.shape[0], device=x.device) >= offs[-1]
        return out.masked_fill_(after[:, None], 0)  # torch leaves them as they were
    out = x.new_zeros(x.shape[0], b.shape[2])
    for group, rows in _groups_of(offs):
        out[rows] = x[rows].float() @ b[group].float()
    return out


@without_autocast
def _groups(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        return torch._grouped_mm(_align(x).t(), _align(y), offs=offs)
    out = x.new_zeros(offs.shape[0], x.shape[1], y.shape[1])
    for group, rows in _groups_of(offs):
        out[group] = x[rows].float().t() @ y[rows].float()
    return out


Gradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str | None], torch.Tensor]


def rule(grad_x: Gradient, grad_y: Gradient) -> Rule:
    """The rule of an operator: its gradients are grad_x(grad, y, offs, backend) and grad_y(grad, x, offs, backend)."""

    def rule(needs_input_grad: Sequence[bool], x: Any, y: Any, offs: torch.Tensor, backend: str | None) -> Any:
        def gradients(grad: torch.Tensor, x: Any, y: Any, offs: torch.Tensor) -> Tensors:
            if grad.ndim == 2 and grad.stride(-1) != 1:  # of rows, which torch._grouped_mm takes row-major
                grad = grad.contiguous()
            return (
                None if y is None else grad_x(grad, y, offs, backend),
                None if x is None else grad_y(grad, x, offs, backend),
            )

        return (x if needs_input_grad[1] else None, y if needs_input_grad[0] else None, offs), gradients

    return rule


ROWS: Callable[..., torch.Tensor] = registration.define(
    "grouped_mm_rows(Tensor x, Tensor b, Tensor offs, str? backend) -> Tensor",
    ("x", "b", "offs"),
    _rows,
    lambda x, b, offs, backend: x.new_empty(x.shape[0], b.shape[2]),
    rule=rule(lambda grad, b, *others: ROWS(grad, b.mT, *others), lambda grad, x, *others: GROUPS(x, grad, *others)),
)
GROUPS: Callable[..., torch.Tensor] = registration.define(
    "grouped_mm_groups(Tensor x, Tensor y, Tensor offs, str? backend) -> Tensor",
    ("x", "y", "offs"),
    _groups,
    lambda x, y, offs, backend: x.new_empty(offs.shape[0], x.shape[1], y.shape[1]),
    rule=rule(lambda grad, y, *others: ROWS(y, grad.mT, *others), lambda grad, x, *others: ROWS(x, grad, *others)),
)
