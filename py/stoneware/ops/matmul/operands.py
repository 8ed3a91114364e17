"""Operands of matmul for measuring, and its float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stoneware.measuring import operands
from stoneware.measuring.operands import Device, Operands
from stoneware.ops.matmul.problem import Problem
from stoneware.runtime.dtypes import TORCH_DTYPES


def make(problem: Problem, device: Device, guarded: bool) -> Operands:
    """See `measuring.operands.make`; of a batch the tensors are [batch, m, k] and so on."""
    m, n, k = problem.m, problem.n, problem.k
    dtype, out_dtype = TORCH_DTYPES[problem.a_dtype], TORCH_DTYPES[problem.out_dtype]
    batch: tuple[int, ...] = ()
    stride_a: tuple[int, ...] = ()
    stride_b: tuple[int, ...] = ()
    if problem.batch == 1:
        out_base, out = operands.poisoned_output(problem, out_dtype, device, guarded)
    else:
        if guarded:
            raise ValueError(
                f"guarded={guarded} must be False for batch={problem.batch}; check one product with a guard"
            )
        batch = (problem.batch,)
        stride_a, stride_b = (problem.batch_stride_a,), (problem.batch_stride_b,)
        out_base, out = operands.poisoned((*batch, m, n), (problem.batch_stride_d, problem.ldd, 1), out_dtype, device)
    layout_a, layout_b = tuple(problem.layout)
    a = operands.matrices((*batch, m, k), (*stride_a, problem.lda), layout_a == "n", dtype, device)
    b = operands.matrices((*batch, k, n), (*stride_b, problem.ldb), layout_b == "n", dtype, device)
    bias = operands.bias(problem, out_dtype, device) if problem.has_bias else None
    return Operands(problem=problem, out_base=out_base, tensors={"a": a, "b": b, "bias": bias, "out": out})


def reference(tensors: Operands) -> torch.Tensor:
    """See `measuring.operands.reference`."""
    result = torch.empty(tensors.out.shape, dtype=torch.float32, device=tensors.a.device)
    products = (result, tensors.a, tensors.b)
    for d, a, b in zip(*products) if result.dim() == 3 else (products,):
        operands.multiply(d, a, b, bias=tensors.bias)
    return result


def problem_of_kernel(config: Mapping[str, Any], rows: Sequence[int], n: int, k: int, *, is_plain: bool) -> Problem:
    """A problem of a kernel's dtypes and kind, for checks of the kernel itself; see
    tools/gpu_check/launch_every_kernel.py."""
    [m] = rows
    layout = config["layout"]
    return Problem.dense(
        # A column-major a is moved in units of 16 bytes along m.
        m=m if layout[0] == "n" else -(-m // 8) * 8,
        n=n,
        k=k,
        dtype=config["a"],
        out_dtype=config["out"],
        layout=layout,
        has_bias=not is_plain,
    )
