"""The one table of tolerances: how far a correct result may be from float64, by dtype and k.

The error is relative, in the Frobenius norm. Its parts are independent, so they add in squares: one
rounding of the result, and the sum of k products. Errors of random sign grow like sqrt(k); where additions
truncate, all errors have one sign, and they grow like k.
"""

from __future__ import annotations

import math

OUTPUT_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Half a unit in the last place, relative: bf16 keeps 8 significant bits, fp16 11, fp32 24."""

ACCUMULATOR_ROUNDING = {"fp32": 2.0**-24, "truncated": 2.0**-23, "fast": 4e-5}
"""Relative rounding of one addition. "truncated": Hopper's 16-bit tensor cores truncate a sum that "fp32" rounds.
"fast": its fp8 tensor cores keep about 14 bits of each sum (DeepSeek-V3 Technical Report, section
3.3.2). docs/design/measuring.md has the errors that an H200 shows."""

ACCUMULATOR_BIAS = {"truncated": 2.0**-29}
"""Relative error of one addition that is the same in each: what truncating a sum takes from it in the mean."""

MAX_ERROR, MAX_ERROR_K = 5e-3, 16384
"""The largest tolerance of any dtype up to this k. Above it the bound grows with sqrt(k), like the error
of the sum."""

MAX_ELEMENT_ERROR = 0.25
"""Largest error of one element, in units of its row's root mean square. The norm over a large
result would hide a few wrong elements. An element that is missing or misplaced is off by about 1.4 such
units; rounding to bf16 changes an element by 2^-9 of its value."""

_EIGHT_BIT_DTYPES = ("e4m3", "e5m2")


def tolerance(out_dtype: str, k: int, *, accumulator: str = "fp32") -> float:
    """The largest relative error allowed, in the Frobenius norm.

    Args:
      out_dtype: a name in OUTPUT_ROUNDING.
      k: number of products in a sum.
      accumulator: a name in ACCUMULATOR_ROUNDING.
    """
    rounded = ACCUMULATOR_ROUNDING[accumulator] * math.sqrt(k)
    biased = ACCUMULATOR_BIAS.get(accumulator, 0.0) * k
    most = MAX_ERROR * math.sqrt(max(1.0, k / MAX_ERROR_K))
    return min(math.hypot(OUTPUT_ROUNDING[out_dtype], rounded, biased), most)


def on_gpu(a_dtype: str, out_dtype: str, k: int) -> float:
    """`tolerance` for operands of this dtype on a GPU, where sums of fp8 products may be fast."""
    accumulator = "fast" if a_dtype in _EIGHT_BIT_DTYPES else "truncated"
    return tolerance(out_dtype, k, accumulator=accumulator)
