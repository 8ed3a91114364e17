"""The one table of tolerances: how far a result may be from float64, by output dtype and k."""

from __future__ import annotations

import math

import torch

OUTPUT_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Half a unit in the last place, relative: bf16 keeps 8 significant bits, fp16 11, fp32 24."""

ACCUMULATOR_ROUNDING = 2.0**-24
"""Of one addition in float32. Fast accumulation on a GPU is held to ISSUE_LIMIT
(tools/tune/operands.py)."""

ISSUE_LIMIT = 5e-3
"""What every shape must stay under in any case."""


def tolerance(out_dtype: str, k: int) -> float:
    """The largest relative error allowed: output rounding, and that of a sum of k terms of random
    sign, whose errors add up like sqrt(k)."""
    return min(OUTPUT_ROUNDING[out_dtype] + ACCUMULATOR_ROUNDING * math.sqrt(k), ISSUE_LIMIT)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; NaN in `actual` gives NaN, which is
    below no tolerance."""
    difference = torch.linalg.norm(actual.double() - expected)
    return (difference / torch.linalg.norm(expected)).item()
