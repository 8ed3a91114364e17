"""The tensors of a call as the matrices of its problem, for backends that take tensors.

Our kernels take addresses, which a view does not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.specs.matmul_problem import Problem

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Sizes = tuple[int, ...]


def make(problem: Problem) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Views]:
    """Returns a function that makes views of (a, b, out).

    For one matmul they are [m, k], [k, n] and [m, n], of a batch [batch, m, k] and so on; the
    tensors may have other dimensions (leading ones that were folded into m, none for a vector), as
    long as the problem's strides hold from their first element. A tensor that is such a view is returned
    itself.
    """
    m, n, k = problem.m, problem.n, problem.k
    batch = () if problem.batch == 1 else (problem.batch,)

    def geometry(rows: int, columns: int, leading: int, layout: str, batch_stride: int) -> tuple[Sizes, Sizes]:
        strides = (leading, 1) if layout == "n" else (1, leading)
        return (*batch, rows, columns), (*(batch_stride for _ in batch), *strides)

    shape_a, strides_a = geometry(m, k, problem.lda, problem.layout[0], problem.batch_stride_a)
    shape_b, strides_b = geometry(k, n, problem.ldb, problem.layout[1], problem.batch_stride_b)
    shape_out, strides_out = geometry(m, n, problem.ldd, "n", problem.batch_stride_d)

    def views(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Views:
        # A comparison takes a sixth of the time of a view.
        if a.shape != shape_a or a.stride() != strides_a:
            a = a.as_strided(shape_a, strides_a)
        if b.shape != shape_b or b.stride() != strides_b:
            b = b.as_strided(shape_b, strides_b)
        if out.shape != shape_out or out.stride() != strides_out:
            out = out.as_strided(shape_out, strides_out)
        return a, b, out

    return views
