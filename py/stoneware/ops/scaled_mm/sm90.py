"""Backend of scaled_mm's kernels for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoneware.kernels.manifest import KernelRecord
from stoneware.kernels.sm90_kernels import TILE_SCHEDULED
from stoneware.ops.sm90 import Sm90
from stoneware.specs.scaled_mm import SPEC
from stoneware.specs.scaled_mm_problem import Problem


class _Sm90(Sm90):
    def kind(self, problem: Problem) -> str:
        return f" for {problem.scales} scales and {problem.accumulation} accumulation"

    def swizzled(self, kernels: Sequence[KernelRecord]) -> Sequence[KernelRecord]:
        """The first kernel with CUTLASS's tile scheduler."""
        return [kernel for kernel in kernels if kernel.config["schedule"] in TILE_SCHEDULED][:1]

    def fields(self, problem: Problem) -> dict[str, Any]:
        names = ["scale_a", "scale_b"]
        if problem.has_block_scales:
            names += ["scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b"]
        return {name: getattr(problem, name) for name in names}


BACKEND = _Sm90(SPEC)
