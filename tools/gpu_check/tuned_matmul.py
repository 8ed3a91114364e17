"""A Triton matmul with 12 configs, for the tests and the benchmark of sw.autotune.

    c[m, n] = sum over k of a[m, k] * b[k, n]

a, b: fp16 with any strides; c: fp16; fp32 accumulator. Each program computes one BM x BN tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

KEY = ["M", "N", "K"]

CONFIGS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=num_warps, num_stages=num_stages)
    for bm, bn, bk, num_warps, num_stages in (
        (64, 64, 32, 4, 3),
        (32, 32, 32, 2, 3),
        (32, 64, 32, 2, 3),
        (64, 32, 32, 2, 3),
        (64, 128, 32, 4, 3),
        (128, 64, 32, 4, 3),
        (128, 128, 32, 4, 3),
        (128, 128, 64, 8, 3),
        (64, 256, 32, 4, 3),
        (256, 64, 32, 4, 3),
        (128, 256, 32, 8, 3),
        (256, 128, 32, 8, 3),
    )
]


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    a_stride_m,
    a_stride_k,
    b_stride_k,
    b_stride_n,
    c_stride_m,
    c_stride_n,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    num_tiles_n = tl.cdiv(N, BN)
    rows = tl.program_id(0) // num_tiles_n * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % num_tiles_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a = a_ptr + rows[:, None] * a_stride_m + depth[None, :] * a_stride_k
    b = b_ptr + depth[:, None] * b_stride_k + columns[None, :] * b_stride_n
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inside = depth < K - start
        a_tile = tl.load(a, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        b_tile = tl.load(b, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total)
        a += BK * a_stride_k
        b += BK * b_stride_k
    c = c_ptr + rows[:, None] * c_stride_m + columns[None, :] * c_stride_n
    tl.store(c, total.to(tl.float16), mask=(rows < M)[:, None] & (columns < N)[None, :])


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["M"] // meta["BM"]) * -(-meta["N"] // meta["BN"]),)


def arguments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of the kernel for c = a @ b."""
    (m, k), n = a.shape, b.shape[1]
    return a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random a and b, and a poisoned c, on the current GPU."""
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    return a, b, torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)


def error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    """||c - a @ b|| / ||a @ b|| in float64; rounding to fp16 alone gives some 3e-4."""
    wanted = a.double() @ b.double()
    return float((c.double() - wanted).norm() / wanted.norm())
