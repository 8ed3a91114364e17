"""Backend of scaled_mm's CUTLASS kernels for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoneware.kernels.cutlass_kernels import TILE_SCHEDULED
from stoneware.kernels.manifest import KernelRecord
from stoneware.ops.cutlass_sm90 import CutlassSm90
from stoneware.specs.scaled_mm import SPEC
from stoneware.specs.scaled_mm_problem import Problem


class _CutlassSm90(CutlassSm90):
    def kind(self, problem: Problem) -> str:
        return f" for {problem.scales} scales and {problem.accumulation} accumulation"

    def swizzled(self, kernels: Sequence[KernelRecord]) -> Sequence[KernelRecord]:
        """The first that has CUTLASS's tile scheduler."""
        return [kernel for kernel in kernels if kernel.config["schedule"] in TILE_SCHEDULED][:1]

    def fields(self, problem: Problem) -> dict[str, Any]:
        names = ["scale_a", "scale_b"]
        if problem.has_block_scales:
            names += ["scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b"]
        return {name: getattr(problem, name) for name in names}


BACKEND = _CutlassSm90(SPEC)
