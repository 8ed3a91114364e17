"""Backend of scaled_mm's Triton kernels: e4m3, with row and tensor scales."""

from __future__ import annotations

from stoneware.ops.scaled_mm.spec import SPEC
from stoneware.ops.triton_aot import TritonAot

BACKEND = TritonAot(SPEC, lambda problem: (int(problem.scale_a == "row"), int(problem.scale_b == "row")))
