"""Named workloads of matmul: the layers of scaled_mm's, in 16 bits."""

from __future__ import annotations

from stoneware.ops.scaled_mm.shapes import M_VALUES, WEIGHTS

__all__ = ["M_VALUES", "WEIGHTS"]
