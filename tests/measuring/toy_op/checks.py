"""What toy_add asks of its arguments."""

from __future__ import annotations

from stoneware.ops import tensor_checks
from toy_op.spec import Problem


def plan(make, a, b, out):
    tensor_checks.check_rank("a", a, 2, "pass a matrix")
    return make(Problem.dense(m=a.shape[0], n=a.shape[1]))


def result(a, *others):
    return tuple(a.shape), a.dtype
