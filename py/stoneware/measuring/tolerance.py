"""The one table of tolerances: how far a right result may be from float64, by dtype and k.

The error is relative, in the Frobenius norm. Its parts are independent, so they add in squares: one
rounding of the result, and the sum of k products, whose errors of random sign grow like sqrt(k).
"""

from __future__ import annotations

import math

OUTPUT_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Half a unit in the last place, relative: bf16 keeps 8 significant bits, fp16 11, fp32 24."""

ACCUMULATOR_ROUNDING = {"fp32": 2.0**-24, "truncated": 2.0**-23, "fast": 4e-5}
"""Of one addition. "truncated" is that of Hopper's 16-bit tensor cores, which cut a sum off where
"fp32" rounds it (an H200 showed 8.0e-6 at k = 7167 with a float32 result, 1.6 times the rounded
sum's). "fast" is that of Hopper's fp8 tensor cores, which keep about 14 bits of each
sum (DeepSeek-V3 Technical Report, section 3.3.2): samples in tuning_data/nvidia_h200 show 2.6e-5
times sqrt(k) for k from 1536 to 28672 once the rounding of bf16 is taken off; the rest is room."""

MAX_ERROR, MAX_ERROR_K = 5e-3, 28672
"""What every result must stay under, whatever its dtype, up to this k. Past it the bound grows with
sqrt(k) as the sum's error does: on an H200 fast accumulation makes 5.3e-3 at k = 36864 and 6.5e-3 at
k = 53248, in our kernels and in torch's alike."""

MAX_ELEMENT_ERROR = 0.25
"""Largest error of one element, in units of its row's root mean square. The norm over a large
result would hide a few wrong elements; one that is missing or taken from elsewhere is off by some
1.4 such units, while rounding to bf16 makes 2^-9 of the element itself."""

_EIGHT_BIT_DTYPES = ("e4m3", "e5m2")


def tolerance(out_dtype: str, k: int, *, accumulator: str = "fp32") -> float:
    """The largest relative error allowed, in the Frobenius norm.

    Args:
      out_dtype: a name of OUTPUT_ROUNDING.
      k: how many products a sum has.
      accumulator: a name of ACCUMULATOR_ROUNDING.
    """
    summed = ACCUMULATOR_ROUNDING[accumulator] * math.sqrt(k)
    most = MAX_ERROR * math.sqrt(max(1.0, k / MAX_ERROR_K))
    return min(math.hypot(OUTPUT_ROUNDING[out_dtype], summed), most)


def on_gpu(a_dtype: str, out_dtype: str, k: int) -> float:
    """`tolerance` for operands of this dtype on a GPU, where sums of fp8 products may be fast."""
    accumulator = "fast" if a_dtype in _EIGHT_BIT_DTYPES else "truncated"
    return tolerance(out_dtype, k, accumulator=accumulator)
