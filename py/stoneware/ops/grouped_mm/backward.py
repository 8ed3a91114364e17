"""The gradients of grouped_mm in bf16, by the operators of gradient_matmuls.py."""

from __future__ import annotations

import itertools

import torch

from stoneware.errors import UnsupportedError
from stoneware.kernels.config import REFERENCE, VENDOR
from stoneware.ops.backward import Gradients, Tensors, is_saved
from stoneware.ops.grouped_mm import gradient_matmuls
from stoneware.ops.grouped_mm.gradient_matmuls import GROUPS, ROWS
from stoneware.ops.tensor_checks import gradient_error
from stoneware.specs.grouped_mm import SPEC


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
        names = list(itertools.compress(SPEC.inputs, needs_input_grad))
        raise gradient_error(f"{SPEC.name} has no backward in fp8", names, "multiply in bf16")
    if backend not in (None, VENDOR, REFERENCE):
        raise UnsupportedError(
            f"backend={backend!r} has no kernels for the gradients of {SPEC.name}; use {VENDOR!r}, or omit backend"
        )
    is_saved(SPEC, needs_input_grad, (torch.bfloat16,) * 3, "nt")  # refuses what this installation lacks
    return _RULE(needs_input_grad, a, b, offs, backend)


_RULE = gradient_matmuls.rule(
    lambda dc, b, *others: ROWS(dc, b.mT, *others), lambda dc, a, *others: GROUPS(dc, a, *others).mT
)
