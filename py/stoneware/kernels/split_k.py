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


def is_split_k(kernel: KernelRecord) -> bool:
    return kernel.config.get("schedule") == SCHEDULE


def is_splitk_sm90(kernel: KernelRecord) -> bool:
    """Whether a kernel is of persistent_mm_sm90.h, split or not: those compute one product at a time."""
    return kernel.config.get("schedule") in (SCHEDULE, PERSISTENT_SCHEDULE)


def why_not(kernel: KernelRecord, k: int, splits: int) -> str | None:
    """None if the kernel runs with `splits` splits at this k; otherwise the reason."""
    if splits == 1:
        return None
    if not is_split_k(kernel):
        return f"kernel {kernel.id!r} cannot split k, and splits={splits}; use splits=1"
    runs = [number for number in _runs(kernel) if number <= -(-k // kernel.config["tile"][2])]
    if splits > runs[-1]:
        return f"splits={splits} must be at most {runs[-1]} for kernel {kernel.id!r} at k={k}"
    if splits not in runs:
        nearest = max(number for number in runs if number < splits)
        all_runs = ", ".join(map(str, runs))
        return f"splits={splits} must be one of {all_runs} for kernel {kernel.id!r} at k={k}; use splits={nearest}"
    return None


def _runs(kernel: KernelRecord) -> Sequence[int]:
    """The splits that a kernel runs with, from 1 up: powers of two if blocks share warps; if they share columns, every
    number whose partial sums fit in shared memory."""
    return kernel.config["splits"]


def _shares_columns(kernel: KernelRecord) -> bool:
    return kernel.config.get("shares") == "columns"


def splits_to_time(kernel: KernelRecord, m: int, n: int, k: int, num_sms: int) -> list[int]:
    """The splits that may be the fastest on a device of `num_sms` SMs; [1] if the kernel has none.

    Fewer than the SMs are worth it only where more are not possible; more than fit them are not. One
    is always among them: it is all that batch-invariant results may take.
    """
    if not is_split_k(kernel):
        return [1]
    rows, columns, tile_k = kernel.config["tile"]
    along_rows, along_columns, _ = kernel.config["cluster"]
    num_rows, num_columns = (n, m) if kernel.config.get("swap_ab") else (m, n)
    clusters = -(-num_rows // (rows * along_rows)) * -(-num_columns // (columns * along_columns))
    tiles = clusters * along_rows * along_columns
    most = -(-k // tile_k) // _LEAST_STEPS
    runs = [splits for splits in _runs(kernel) if splits <= max(most, 1)]
    at_once = num_sms * (1 if _shares_columns(kernel) else _MAX_BLOCKS_PER_SM)
    worth = [
        splits
        for splits in runs
        if splits == 1 or (tiles * splits <= at_once and (splits == runs[-1] or tiles * splits * 2 > num_sms // 2))
    ]
    return worth
