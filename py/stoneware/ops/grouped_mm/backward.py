"""The gradients of grouped_mm in bf16, as two operators that are each other's gradients:

    rows    x[m, p], b[groups, p, q] -> [m, q]              x @ b of each row's group: dgrad
    groups  x[m, p], y[m, q]         -> [groups, p, q]      x^T @ y of each group's rows: wgrad

Rows after the last offset belong to no group: their gradient is zero. On an H100 or H200 both run
torch._grouped_mm, as the backend "vendor" does, elsewhere plain torch in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from stoneware.errors import ForwardOnlyError, UnsupportedError
from stoneware.kernels import needs
from stoneware.kernels.registry import REFERENCE, VENDOR
from stoneware.ops import registration
from stoneware.ops.backward import Gradients, Tensors, needed_products
from stoneware.ops.grouped_mm.problem import UNIT_BYTES
from stoneware.ops.grouped_mm.spec import SPEC


def rule(
    needs_input_grad: tuple[bool, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out: None,
    out_dtype: torch.dtype | None,
    backend: str | None,
    config: object,
) -> tuple[Tensors, Gradients]:
    """See `stoneware.ops.backward.Rule`."""
    if scale_a is not None:
        names = list(itertools.compress((one.name for one in SPEC.inputs), needs_input_grad))
        raise ForwardOnlyError(
            f"{SPEC.name} has no backward in fp8, and {', '.join(names)} "
            f"{'requires' if len(names) == 1 else 'require'} a gradient; multiply in bf16, or pass "
            + ", ".join(f"{name}.detach()" for name in names)
        )
    if backend not in (None, VENDOR, REFERENCE):
        raise UnsupportedError(
            f"backend={backend!r} has no kernels for the gradients of {SPEC.name}; use {VENDOR!r}, or omit backend"
        )
    products, is_saved = needed_products(SPEC, needs_input_grad, (torch.bfloat16,) * 3, "nt")

    def gradients(dc: torch.Tensor, *saved: torch.Tensor | None) -> Tensors:
        tensors = {"dc": _row_major(dc), "a": saved[0], "b": saved[1]}
        offs, found = saved[2], {}
        for product in products:
            operator = _ROWS if product.role == needs.DGRAD else _GROUPS
            left, right = (tensors[name.removesuffix("^T")] for name in (product.left, product.right))
            if product.right.endswith("^T"):
                right = right.mT
            result = operator(left, right, offs, backend)
            found[product.result] = result
        transposed = found.get("db^T")
        return found.get("da"), None if transposed is None else transposed.mT

    return (a if is_saved[0] else None, b if is_saved[1] else None, offs), gradients


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


def _ends(offs: torch.Tensor) -> list[int]:
    return [0, *offs.tolist()]


def _rows(x: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        out = torch._grouped_mm(_aligned(x), _aligned(b), offs=offs)
        after = torch.arange(x.shape[0], device=x.device) >= offs[-1]
        return out.masked_fill_(after[:, None], 0)  # torch leaves them as they were
    out = x.new_zeros(x.shape[0], b.shape[2])
    for group, (begin, end) in enumerate(itertools.pairwise(_ends(offs))):
        out[begin:end] = (x[begin:end].float() @ b[group].float()).to(x.dtype)
    return out


def _groups(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor, backend: str | None) -> torch.Tensor:
    if _is_for_torch(x, offs, backend):
        return torch._grouped_mm(_aligned(x).t(), _aligned(y), offs=offs)
    out = x.new_zeros(offs.shape[0], x.shape[1], y.shape[1])
    for group, (begin, end) in enumerate(itertools.pairwise(_ends(offs))):
        out[group] = (x[begin:end].float().t() @ y[begin:end].float()).to(x.dtype)
    return out


def _rule_of_rows(needed: Sequence[bool], x: Any, b: Any, offs: Any, backend: str | None) -> tuple[Tensors, Gradients]:
    def gradients(grad: torch.Tensor, *saved: Any) -> Tensors:
        x, b, offs = saved
        return (
            None if b is None else _ROWS(_row_major(grad), b.mT, offs, backend),
            None if x is None else _GROUPS(x, _row_major(grad), offs, backend),
        )

    return (x if needed[1] else None, b if needed[0] else None, offs), gradients


def _rule_of_groups(
    needed: Sequence[bool], x: Any, y: Any, offs: Any, backend: str | None
) -> tuple[Tensors, Gradients]:
    def gradients(grad: torch.Tensor, *saved: Any) -> Tensors:
        x, y, offs = saved
        return (
            None if y is None else _ROWS(y, grad.mT, offs, backend),
            None if x is None else _ROWS(x, grad, offs, backend),
        )

    return (x if needed[1] else None, y if needed[0] else None, offs), gradients


def _row_major(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.stride(-1) == 1 else grad.contiguous()


_ROWS = registration.register_product(
    "grouped_mm_rows",
    ("x", "b", "offs"),
    _rows,
    lambda x, b, offs, backend: x.new_empty(x.shape[0], b.shape[2]),
    _rule_of_rows,
)
_GROUPS = registration.register_product(
    "grouped_mm_groups",
    ("x", "y", "offs"),
    _groups,
    lambda x, y, offs, backend: x.new_empty(offs.shape[0], x.shape[1], y.shape[1]),
    _rule_of_groups,
)
