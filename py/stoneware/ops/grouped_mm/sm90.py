"""Backend of grouped_mm's kernels for Hopper; a launch never synchronizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stoneware.kernels.manifest import KernelRecord
from stoneware.ops.sm90 import Sm90
from stoneware.specs.grouped_mm import SPEC
from stoneware.specs.grouped_mm_problem import Problem

MAX_GROUPS = 1024
"""Size of a block's table of groups in shared memory (kMaxGroups in cc/gemm/grouped_tiles.h)."""

MAX_EXTENT = 2**30 - 1
"""The largest m, n and k: half of an int32, so that the coordinates of any tile that crosses an edge fit. CanImplement
of cc/gemm/persistent_mm_sm90_host.h has the exact rule."""


class _Sm90(Sm90):
    max_extents: ClassVar[Mapping[str, int]] = {"m": MAX_EXTENT, "n": MAX_EXTENT, "k": MAX_EXTENT}

    def kind(self, problem: Problem) -> str:
        return f" for {problem.scales} scales" if problem.scales != "none" else ""

    def refusal(self, problem: Problem, kernels: Sequence[KernelRecord]) -> str | None:
        if problem.num_groups > MAX_GROUPS:
            return f"num_groups={problem.num_groups} must be at most {MAX_GROUPS} for {self.name}; split the groups"
        return None

    def fields(self, problem: Problem) -> dict[str, Any]:
        fields = {"num_groups": problem.num_groups, "batch_stride_b": problem.group_stride_b}
        if not problem.has_block_scales:
            return fields | {
                "scale_a": problem.scales,
                "scale_b": problem.scales,
                "group_stride_scale_b": problem.n if problem.scales == "row" else 0,
            }
        names = ("scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b", "group_stride_scale_b")
        return fields | {
            "scale_a": "block_1x128",
            "scale_b": "block_128x128",
            **{name: getattr(problem, name) for name in names},
        }


BACKEND = _Sm90(SPEC)
