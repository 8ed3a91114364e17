"""The kinds of scales, their shapes, and the largest values of fp8."""

from __future__ import annotations

import torch

SCALES = ("tensor", "row", "block", "block_2d")
"""A scale for the matrix, for each row, for 1 x 128 elements of a row, or for 128 x 128."""

BLOCK = 128

MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""OCP 8-bit Floating Point Specification, section 5."""

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dense_shape(scales: str, m: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the scales of [m, k]."""
    if scales == "tensor":
        return (1,), (1,)
    if scales == "row":
        return (m, 1), (1, 1)
    if scales == "block":
        return (m, -(-k // BLOCK)), (1, max(1, m))
    return (-(-m // BLOCK), -(-k // BLOCK)), (max(1, -(-k // BLOCK)), 1)
