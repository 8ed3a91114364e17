"""Into how many shares the k of a tile may be split: which splits run, and which are worth timing.

A split-k kernel (cc/gemm/persistent_mm_sm90.h) has no split of its own: one cubin runs with each. Free of
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoneware.kernels.manifest import KernelRecord

SCHEDULE = "splitk"

PERSISTENT_SCHEDULE = "persistent"
"""Schedule of the kernels of the same source that do not split."""

_LEAST_STEPS = 2
"""Tiles of k that a block should have: with one, loads and MMAs would not overlap."""

_MAX_BLOCKS_PER_SM = 2
"""So many blocks fit an SM where a kernel's stages leave room (64x16x256 with 5 of them); of the others
one does, and of those that share columns always. Where there are more, k is better not split: blocks that
have all of it go from tile to tile without a pause."""

_MAX_COUNTED_BLOCKS = 512
"""Blocks of d that may have their k shared by clusters: each has a counter (kCountersPerLaunch of
cc/driver/counters.h)."""

_MAX_WORKSPACE_BYTES = 64 << 20
"""The most bytes of the partial sums of clusters that share k: about what L2 holds (60 MiB on an H200)."""

_GRID_SPLITS_TO_TIME = 2
"""Beside no split: a kernel runs with up to 16."""


def is_split_k(kernel: KernelRecord) -> bool:
    return kernel.config.get("schedule") == SCHEDULE


def is_splitk_sm90(kernel: KernelRecord) -> bool:
    """Whether a kernel is of persistent_mm_sm90.h, split or not: those compute one product at a time."""
    return kernel.config.get("schedule") in (SCHEDULE, PERSISTENT_SCHEDULE)


def blocks_along_k(kernel: KernelRecord, splits: int) -> int:
    """How many blocks of a cluster share the k of a tile: all that do, unless whole clusters share it."""
    return 1 if _shares_grid(kernel) else splits


def why_not(kernel: KernelRecord, m: int, n: int, k: int, splits: int) -> str | None:
    """None if the kernel runs with `splits` splits at this problem; otherwise the reason."""
    if splits == 1:
        return None
    if not is_split_k(kernel):
        return f"kernel {kernel.id!r} cannot split k, and splits={splits}; use splits=1"
    runs = [number for number in _runs(kernel) if number <= -(-k // kernel.config["tile"][2])]
    if splits > runs[-1]:
        return f"splits={splits} must be at most {runs[-1]} for kernel {kernel.id!r} at k={k}; use splits={runs[-1]}"
    if splits not in runs:
        nearest = max(number for number in runs if number < splits)
        all_runs = ", ".join(map(str, runs))
        return f"splits={splits} must be one of {all_runs} for kernel {kernel.id!r} at k={k}; use splits={nearest}"
    if _shares_grid(kernel):
        blocks = _blocks(kernel, m, n)
        if blocks > _MAX_COUNTED_BLOCKS:
            return (
                f"kernel {kernel.id!r} must have at most {_MAX_COUNTED_BLOCKS} tiles to split k, but has {blocks} at "
                f"m={m}, n={n}; use splits=1"
            )
        if (num_bytes := _workspace_bytes(kernel, blocks, splits)) > _MAX_WORKSPACE_BYTES:
            return (
                f"splits={splits} of kernel {kernel.id!r} must have at most {_MAX_WORKSPACE_BYTES} bytes of partial "
                f"sums, but has {num_bytes} at m={m}, n={n}; use fewer splits"
            )
    return None


def _runs(kernel: KernelRecord) -> Sequence[int]:
    """The splits that a kernel runs with, from 1 up: powers of two if blocks share warps; if they share columns, every
    number whose partial sums fit in shared memory; if clusters share the grid, every number up to 16."""
    return kernel.config["splits"]


def _shares_columns(kernel: KernelRecord) -> bool:
    return kernel.config.get("shares") == "columns"


def _shares_grid(kernel: KernelRecord) -> bool:
    return kernel.config.get("shares") == "grid"


def _blocks(kernel: KernelRecord, m: int, n: int) -> int:
    """Tiles of a problem, in whole clusters."""
    rows, columns, _ = kernel.config["tile"]
    along_rows, along_columns, _ = kernel.config["cluster"]
    num_rows, num_columns = (n, m) if kernel.config.get("swap_ab") else (m, n)
    clusters = -(-num_rows // (rows * along_rows)) * -(-num_columns // (columns * along_columns))
    return int(clusters * along_rows * along_columns)


def _workspace_bytes(kernel: KernelRecord, blocks: int, splits: int) -> int:
    rows, columns, _ = kernel.config["tile"]
    return int(blocks * splits * rows * columns * 4)


def splits_to_time(kernel: KernelRecord, m: int, n: int, k: int, num_sms: int) -> list[int]:
    """The splits that may be the fastest on a device of `num_sms` SMs; [1] if the kernel has none.

    Fewer than the SMs are worth it only where more are not possible; more than fit them are not. One
    is always among them: it is all that batch-invariant results may take.
    """
    if not is_split_k(kernel):
        return [1]
    tiles = _blocks(kernel, m, n)
    num_steps = -(-k // kernel.config["tile"][2])
    runs = [splits for splits in _runs(kernel) if splits <= max(num_steps // _LEAST_STEPS, 1)]
    if _shares_grid(kernel):
        # Clusters of four and eight do not find room on all SMs (docs/design/clusters_sm90.md).
        cluster_blocks = kernel.config["cluster"][0] * kernel.config["cluster"][1]
        runs = [
            splits for splits in runs if _workspace_bytes(kernel, tiles, splits) <= _MAX_WORKSPACE_BYTES or splits == 1
        ]
        at_once = num_sms if cluster_blocks <= 2 else num_sms - num_sms // 11
        return _grid_splits_to_time(runs, tiles, num_steps, at_once)
    at_once = num_sms * (1 if _shares_columns(kernel) else _MAX_BLOCKS_PER_SM)
    worth = [
        splits
        for splits in runs
        if splits == 1 or (tiles * splits <= at_once and (splits == runs[-1] or tiles * splits * 2 > num_sms // 2))
    ]
    return worth


def _grid_splits_to_time(runs: Sequence[int], tiles: int, num_steps: int, at_once: int) -> list[int]:
    """1, and the two splits that should be the fastest, if they shorten what the last block waits for.

    In steps of a tile's k, a wave takes five more than its blocks have, and each share adds half of one: the last
    block reads its sums again.
    """

    def half_steps(splits: int) -> int:
        waves = -(-tiles * splits // at_once)
        return waves * 2 * (-(-num_steps // splits) + 5) + (splits if splits > 1 else 0)

    if tiles > _MAX_COUNTED_BLOCKS:
        return [1]
    faster = [splits for splits in runs if half_steps(splits) < half_steps(1)]
    return sorted({1, *sorted(faster, key=half_steps)[:_GRID_SPLITS_TO_TIME]})
