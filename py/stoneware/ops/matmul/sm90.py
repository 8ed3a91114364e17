"""Backend of matmul's kernels for Hopper: layouts nt, nn and tn, batches, and results with 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoneware.kernels import split_k, tile_rule
from stoneware.kernels.launch_description import MAX_GRID_YZ
from stoneware.kernels.manifest import KernelRecord
from stoneware.kernels.sm90_kernels import TILE_SCHEDULED
from stoneware.ops.sm90 import Sm90
from stoneware.specs.matmul import SPEC
from stoneware.specs.matmul_problem import WIDE_DTYPE, Problem
from stoneware.specs.problem import UNIT_BYTES, unit

MAX_TMA_STRIDE = 2**39
"""Elements of 16 bits; cuTensorMapEncodeTiled takes strides below 2**40 bytes."""


class _Sm90(Sm90):
    def kind(self, problem: Problem) -> str:
        return f" of layout {problem.layout}"

    def refusal(self, problem: Problem, kernels: Sequence[KernelRecord]) -> str | None:
        if (reason := self._why_not_tma(problem)) is not None:
            return reason
        if problem.accumulate and problem.out_dtype != WIDE_DTYPE:
            return f"its kernels add to an out of float32, not of {problem.out_dtype}; use another backend"
        if problem.accumulate and problem.batch > 1:
            return f"batch={problem.batch} must be 1 for its kernels that add to out; use another backend"
        if problem.batch > 1 and all(map(split_k.is_splitk_sm90, kernels)):
            return (
                f"batch={problem.batch} must be 1 for this build's kernels {problem.a_dtype}*"
                f"{problem.b_dtype}->{problem.out_dtype} of layout {problem.layout}, which take "
                "one matmul; use another backend"
            )
        if not any(self.fits(problem, kernel) for kernel in kernels):
            return (
                f"batch={problem.batch} and the tiles of m={problem.m}, n={problem.n} must fit a "
                f"kernel's grid, {MAX_GRID_YZ} blocks a side; split the problem"
            )
        return None

    def _why_not_tma(self, problem: Problem) -> str | None:
        """Why TMA cannot load or store the tensors, see UNIT_BYTES; or None."""
        if not problem.is_aligned:
            return f"a, b and out must begin at multiples of {UNIT_BYTES} bytes for {self.name}; copy the views"
        names = ["n"]
        if problem.layout[0] == "t":
            names.append("m")
        if problem.layout != "tn":  # there neither operand is contiguous along k
            names.append("k")
        names += ["lda", "ldb", "ldd", *problem.strides]
        for name in names:
            value = getattr(problem, name)
            multiple = unit(problem.out_dtype if name.endswith("d") else problem.a_dtype)
            if value % multiple:
                return f"{name}={value} must be a multiple of {multiple} for {self.name}; pad the tensors"
            if name not in "mnk" and value >= MAX_TMA_STRIDE:
                return f"{name}={value} must be below {MAX_TMA_STRIDE} for {self.name}; copy the view"
        return None

    def fits(self, problem: Problem, kernel: KernelRecord) -> bool:
        if problem.accumulate and not split_k.is_splitk_sm90(kernel):
            return False
        if kernel.config["schedule"] in TILE_SCHEDULED:
            return True
        if split_k.is_splitk_sm90(kernel):
            return problem.batch == 1
        # The batch and the narrow side of the tiles are along z and y of the grid.
        columns = problem.m if kernel.config["swap_ab"] else problem.n
        num_tiles = -(-columns // kernel.config["tile"][1]) + kernel.config["cluster"][1] - 1
        return num_tiles <= MAX_GRID_YZ and problem.batch <= MAX_GRID_YZ

    def swizzled(self, kernels: Sequence[KernelRecord]) -> Sequence[KernelRecord]:
        """The kernels whose tile is at least as tall as that of the first."""
        heights = [tile_rule.tile_m(kernel) for kernel in kernels]
        return [kernel for kernel, height in zip(kernels, heights) if height >= heights[0]]

    def fields(self, problem: Problem) -> dict[str, Any]:
        names = ("batch", "batch_stride_a", "batch_stride_b", "batch_stride_d")
        return {"accumulate": problem.accumulate, **{name: getattr(problem, name) for name in names}}


BACKEND = _Sm90(SPEC)
