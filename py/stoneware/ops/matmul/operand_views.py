"""The tensors of a call as the matrices of its problem, for backends that take tensors.

Kernels of ours take addresses, which a view does not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.ops.matmul.problem import Problem

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def of(problem: Problem) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Views]:
    """Returns a function that makes views of (a, b, out).

    Of one product they are [m, k], [k, n] and [m, n], of a batch [batch, m, k] and so on; the
    tensors may have other dimensions (leading ones that were folded into m, none for a vector), as
    long as the problem's strides hold from their first element.
    """
    m, n, k = problem.m, problem.n, problem.k
    a_strides = (problem.lda, 1) if problem.layout[0] == "n" else (1, problem.lda)
    b_strides = (problem.ldb, 1) if problem.layout[1] == "n" else (1, problem.ldb)

    def view(tensor: torch.Tensor, shape: tuple[int, int], strides: tuple[int, int], batch_stride: int) -> torch.Tensor:
        if problem.batch == 1:
            return tensor.as_strided(shape, strides)
        return tensor.as_strided((problem.batch, *shape), (batch_stride, *strides))

    def views(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Views:
        if problem.batch == 1 and a.ndim == b.ndim == out.ndim == 2:
            return a, b, out  # nothing was folded
        return (
            view(a, (m, k), a_strides, problem.batch_stride_a),
            view(b, (k, n), b_strides, problem.batch_stride_b),
            view(out, (m, n), (problem.ldd, 1), problem.batch_stride_d),
        )

    return views
