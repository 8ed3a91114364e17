"""A kernel's tile, and how well it fits m: the one rule by which kernels are ordered without
measuring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoneware.kernels.config import Config
from stoneware.kernels.key import ACCUMULATIONS, ELEMENT_BYTES, LAYOUTS, SCALES, Key
from stoneware.kernels.manifest import KernelRecord
from stoneware.kernels.split_k import is_split_k, is_splitk_sm90
from stoneware.runtime.fast_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A kernel's tile and cluster along the user's m and n, and the tile along k."""

    m: int
    n: int
    k: int
    cluster_m: int
    cluster_n: int


def tiling_of(kernel: KernelRecord) -> Tiling:
    """The tiling of a kernel; one without a cluster has one of a block.

    Raises:
      ValueError: its tile or cluster is invalid.
    """
    tile, cluster = extents(kernel, "tile"), extents(kernel, "cluster", (1, 1, 1))
    m, n = (1, 0) if kernel.config.get("swap_ab") else (0, 1)
    return Tiling(m=tile[m], n=tile[n], k=tile[2], cluster_m=cluster[m], cluster_n=cluster[n])


def extents(kernel: KernelRecord, name: str, default: Any = None) -> tuple[int, int, int]:
    """What a kernel's config says along m, n and k; raises ValueError unless that is three integers >= 1."""
    match kernel.config.get(name, default):
        case [int(m), int(n), int(k)] if min(m, n, k) >= 1:
            return m, n, k
        case value:
            raise ValueError(f"{name}={value!r} of kernel {kernel.id!r} must be three integers >= 1")


_CONFIG_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("a", "b", "out"), (*ELEMENT_BYTES,)),
    "layout": LAYOUTS,
    "scales": tuple(scales for scales in SCALES if "block" in scales),
    "accumulation": ACCUMULATIONS,
}
"""What `fits` compares with a key; the last three may be absent."""


def check_config(kernel: KernelRecord) -> None:
    """Checks the fields of a kernel's config that the look-up reads.

    Raises:
      ValueError: one is absent or invalid.
    """
    for name, values in _CONFIG_VALUES.items():
        value = kernel.config.get(name)
        if value not in values and (name in kernel.config or name in ("a", "b", "out")):
            raise ValueError(
                f"{name}={value!r} in the config of kernel {kernel.id!r} must be one of {', '.join(values)}; set it in "
                "`config` of the kernel's triton_aot"
            )
    try:
        tiling_of(kernel)
    except ValueError as error:
        raise ValueError(f"{error}; set it in `config` of the kernel's triton_aot") from error


def tile_m(kernel: KernelRecord) -> int:
    """Extent of the tile along the user's m; with swapped operands that is the tile's second."""
    return kernel.config["tile"][1 if kernel.config.get("swap_ab") else 0]


def fits(kernel: KernelRecord, key: Key, compute_capability: tuple[int, int]) -> bool:
    """Whether a kernel is built for the key's dtypes, layout, scales and accumulation and for the
    device's arch.

    A kernel whose config names no scales serves every kind but blocks; one that names no
    accumulation is taken to be fast, as Triton's are.
    """
    config = kernel.config
    return (
        # The most selective property first: a look-up checks every kernel.
        config["out"] == key.out_dtype
        and config["a"] == key.a_dtype
        and config.get("scales", "") == (key.scales if "block" in key.scales else "")
        and config["b"] == key.b_dtype
        and config.get("layout", "nt") == key.layout
        and config.get("accumulation", "fast") == key.accumulation
        and kernel.compute_capability == compute_capability
    )


def by_tile_m(key: Key, compute_capability: tuple[int, int], kernels: Iterable[KernelRecord]) -> list[Config]:
    """Configs of the kernels that fit, best first: the smallest tile that covers m, then larger
    ones, then smaller ones from large to small; of equal tiles those of split-k kernels first,
    then by id. Above LARGEST_SPLIT_M those of persistent_mm_sm90.h come after all others, and of
    them last the ones that split k; not with block scales or slow accumulation.

    A tile taller than m wastes tensor-core rows; one that covers m reads the weights once, and
    their bytes are the floor of small m, for which the split-k kernels are made.
    """

    def order(kernel: KernelRecord) -> tuple[bool, bool, bool, int, bool, str]:
        extent = tile_m(kernel)
        splits = is_split_k(kernel)
        is_late = is_splitk_sm90(kernel) and key.m > LARGEST_SPLIT_M and not kernel.config.get("sum_chunk")
        return (
            is_late,
            is_late and splits,
            extent < key.m,
            extent if extent >= key.m else -extent,
            not splits,
            kernel.id,
        )

    fitting = sorted((kernel for kernel in kernels if fits(kernel, key, compute_capability)), key=order)
    return [Config.of_kernel(kernel.backend, kernel.id) for kernel in fitting]


LARGEST_SPLIT_M = 128
"""Up to here a split-k kernel may be the first without a measurement (docs/design/table.md)."""

_SMALL_TILE_M = 16
"""Tiles up to this size are timed for every smaller m as well: m does not determine which one streams
the weights best."""

_LARGE_M = 1024
"""From here on every m has the tiles of this one: with those of 128 and more rows the math is the
limit, whatever m is."""

_OVERLAPPING_TILES = 4
"""Tiles for each SM, from which on most epilogues run while another tile is multiplied."""

_AT_ONCE = 132
"""Tiles that run at once: the SMs of an H100 and H200."""


def is_worth_timing(kernel: KernelRecord, key: Key, largest: int) -> bool:
    """Whether a kernel's tile is near enough to the problem for the kernel to be raced, `largest` being the
    rows of the largest tile among those that could be."""
    tile = tiling_of(kernel)
    return is_near(tile.m, tile.n, largest, key.m, key.n, key.num_groups, takes_turns(kernel.id))


def is_near(
    rows: int, columns: int, largest: int, m: int, n: int, num_groups: int = 0, has_turns: bool = False
) -> bool:
    """Whether a tile may be the fastest at a problem (docs/design/table.md): half of its rows are filled; and m
    has no more than eight of it, or all of them run at once, before k is split, or no tile has many more rows. Where
    warp groups take turns, more than half of the SMs have a tile: else one that shares k, or is smaller, is faster.

    Args:
      rows, columns: of the tile.
      largest: rows of the largest tile that is compared.
      m, n, num_groups: of the problem.
      has_turns: whether warp groups take turns with tiles.
    """
    tiles = _num_tiles(rows, columns, m, n) * max(num_groups, 1)
    return (
        is_half_filled(rows, m)
        and not (has_turns and 2 * tiles <= _AT_ONCE)
        and (min(m, _LARGE_M) <= 8 * rows or 5 * rows >= 3 * largest or tiles <= _AT_ONCE)
    )


def takes_turns(kernel: str) -> bool:
    """Whether a kernel's warp groups take turns: its id says so, and a candidate of a table has nothing else."""
    return "_pingpong2x" in kernel


def overlapping_kernels(
    kernels: Iterable[KernelRecord], key: Key, compute_capability: tuple[int, int], num_sms: int
) -> list[str]:
    """Ids of those kernels that compute a linked epilogue while they multiply (docs/design/open_kernels.md): they fit,
    their warp groups take turns, and each SM has several tiles. None for few rows, or where rows of operands begin
    within a line of L2: other kernels gain more there than an epilogue takes.

    Args:
      kernels: open ones.
      key: of the problem.
      compute_capability, num_sms: of the device.
    """
    rows = (key.k, key.n) if key.layout == "nn" else (key.k,)
    if key.m < _LARGE_M or any(alignment(extent * ELEMENT_BYTES[key.b_dtype]) < LINE_BYTES for extent in rows):
        return []
    return [
        kernel.id
        for kernel in kernels
        if takes_turns(kernel.id)
        and fits(kernel, key, compute_capability)
        and (tile := tiling_of(kernel))
        and _num_tiles(tile.m, tile.n, key.m, key.n) >= _OVERLAPPING_TILES * num_sms
    ]


def _num_tiles(rows: int, columns: int, m: int, n: int) -> int:
    return -(-m // rows) * -(-n // columns)


def is_half_filled(extent: int, m: int) -> bool:
    """Whether at least half of a tile's rows are filled, or there are few."""
    return extent <= _SMALL_TILE_M or extent <= 2 * m


LINE_BYTES = 128


def alignment(row_bytes: int) -> int:
    """The power of two, up to a cache line, that divides the bytes of a row."""
    return min(row_bytes & -row_bytes, LINE_BYTES)
