"""How far the results of layers may be from float64."""

from __future__ import annotations

import math

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

HALF_STEP = {E5M2: 2**-3, E4M3: 2**-4, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""The largest rounding error of a number in [1, 2)."""

_MEAN_STEP = math.sqrt(
    sum(4.0**e * (math.erf(2.0 ** (e + 1) / math.sqrt(2)) - math.erf(2.0**e / math.sqrt(2))) for e in range(-20, 4))
)
"""The root mean square of 2^floor(log2 |x|), for x of a standard normal distribution: 0.74."""


def tolerance(*dtypes: torch.dtype, num_values: int = 4096) -> float:
    """The largest `error` of a product whose operands and result were rounded once each, to these dtypes.

    Errors are uniform within a step, so their root mean square is half a step / sqrt(3), times the mean step of the
    values. Errors of different operands add in quadrature: 0.038 for two in e4m3. The tolerance adds 5 %, since
    values are not exactly normal, and 6 standard deviations, each less than 1 / sqrt(num_values).

    Args:
      dtypes: of each rounding.
      num_values: of the smallest operand or result that was rounded.
    """
    rounding = math.hypot(*(HALF_STEP[dtype] * _MEAN_STEP / math.sqrt(3) for dtype in dtypes))
    return rounding * (1.05 + 6 / math.sqrt(num_values))


FP8_ERROR = tolerance(E4M3, E4M3)

BF16_ERROR = HALF_STEP[torch.bfloat16]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
