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
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    a_strides = (problem.lda, 1) if problem.layout[0] == "n" else (1, problem.lda)
    b_strides = (problem.ldb, 1) if problem.layout[1] == "n" else (1, problem.ldb)
    d_strides = (problem.ldd, 1)
    if batch == 1:

        def views(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Views:
            if a.ndim == b.ndim == out.ndim == 2:
                return a, b, out  # nothing was folded
            return (a.as_strided((m, k), a_strides), b.as_strided((k, n), b_strides), out.as_strided((m, n), d_strides))

        return views

    def batched_views(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Views:
        return (
            a.as_strided((batch, m, k), (problem.batch_stride_a, *a_strides)),
            b.as_strided((batch, k, n), (problem.batch_stride_b, *b_strides)),
            out.as_strided((batch, m, n), (problem.batch_stride_d, *d_strides)),
        )

    return batched_views
