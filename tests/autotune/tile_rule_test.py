"""In which order the kernels come where nothing was measured, and which are near enough to m."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.kernels.split_k import splits_to_time, why_not
from stoneware.kernels.tile_rule import (
    by_tile_m,
    fits,
    is_near,
    is_worth_timing,
    overlapping_kernels,
    takes_turns,
    tiling_of,
)
from stoneware.specs.scaled_mm import VENDOR, preferred


def kernel(extent: int, schedule: str) -> KernelRecord:
    return KernelRecord(
        id=f"{schedule}_{extent}",
        op="scaled_mm",
        backend="sm90",
        arch="sm_90a",
        sha256="0" * 64,
        size_bytes=1,
        config={
            "a": "e4m3",
            "b": "e4m3",
            "out": "bf16",
            "tile": [128, extent, 128],
            "cluster": [1, 1, 1],
            "schedule": schedule,
            "swap_ab": True,
        },
    )


KERNELS = [
    *(kernel(extent, "splitk") for extent in (16, 64, 96, 192)),
    *(kernel(extent, "warpspecialized") for extent in (64, 96, 128, 256)),
]


def key_of(m: int) -> Key:
    return Key(
        op="scaled_mm", a_dtype="e4m3", b_dtype="e4m3", out_dtype="bf16", scales="row", layout="nt", n=4096, k=4096, m=m
    )


def order(m: int, kernels: Sequence[KernelRecord] = KERNELS) -> list[str]:
    return [config.kernel for config in by_tile_m(key_of(m), (9, 0), kernels)]


def test_small_m_has_the_smallest_tile_that_covers_it_and_of_equal_ones_that_made_for_it():
    assert order(9)[:3] == ["splitk_16", "splitk_64", "warpspecialized_64"]
    assert order(65)[:3] == ["splitk_96", "warpspecialized_96", "warpspecialized_128"]
    assert order(128)[:3] == ["warpspecialized_128", "splitk_192", "warpspecialized_256"]


@pytest.mark.parametrize(
    "m, first",
    [
        (129, "warpspecialized_256"),
        (192, "warpspecialized_256"),
        (257, "warpspecialized_256"),
        (8192, "warpspecialized_256"),
    ],
)
def test_above_m_128_every_regular_tile_comes_before_one_that_could_split(m, first):
    found = order(m)
    assert found[0] == first
    assert [name.startswith("splitk") for name in found] == [False] * 4 + [True] * 4


def test_wide_tiles_of_the_same_source_come_after_the_regular_ones_too():
    kernels = [kernel(extent, "persistent") for extent in (128, 192)] + KERNELS
    for m in (129, 192, 8192):
        assert [name.partition("_")[0] for name in order(m, kernels)] == (
            ["warpspecialized"] * 4 + ["persistent"] * 2 + ["splitk"] * 4
        )


@pytest.mark.parametrize(
    ("rows", "largest", "n", "least", "most"),
    [
        (16, 192, 8192, 1, 128),
        (32, 192, 8192, 16, 256),
        (64, 192, 8192, 32, 512),
        (96, 192, 8192, 48, 768),
        (128, 192, 8192, 64, 1 << 20),
        (192, 192, 8192, 96, 1 << 20),
        # No other kernel has many more rows: those with block scales.
        (64, 96, 8192, 32, 1 << 20),
        (32, 96, 8192, 16, 256),
        # All tiles run at once: 4 of n, and 33 of m.
        (16, 192, 256, 1, 33 * 16),
        (64, 192, 256, 32, 33 * 64),
    ],
)
def test_a_tile_is_raced_from_half_its_rows_to_eight_times_as_many(rows, largest, n, least, most):
    assert is_near(rows, 64, largest, least, n) and is_near(rows, 64, largest, most, n)
    assert least == 1 or not is_near(rows, 64, largest, least - 1, n)
    assert most == 1 << 20 or not is_near(rows, 64, largest, most + 1, n)


@pytest.mark.parametrize(
    ("kernel", "m", "num_groups", "leaves"),
    [
        ("matmul_sm90_bf16_bf16_bf16_128x128x64_1x1x1_pingpong2x6_swap", 128 * 33, 0, True),
        ("matmul_sm90_bf16_bf16_bf16_128x128x64_1x1x1_pingpong2x6_swap", 128 * 33 + 1, 0, False),
        ("grouped_mm_sm90_bf16_bf16_bf16_128x128x64_1x1x1_pingpong2x5", 128 * 16, 2, True),
        ("grouped_mm_sm90_bf16_bf16_bf16_128x128x64_1x1x1_pingpong2x5", 128 * 17, 2, False),
        ("matmul_sm90_bf16_bf16_bf16_128x128x64_1x1x1_persistent2x6", 128, 0, False),
        ("matmul_sm90_bf16_bf16_nt_128x192x64_2x1x1_pingpong", 128, 0, False),
    ],
)
def test_warp_groups_take_turns_where_more_than_half_of_the_sms_have_a_tile(kernel, m, num_groups, leaves):
    assert is_near(128, 128, 128, m, 256, num_groups, takes_turns(kernel)) is not leaves


def test_a_kernel_whose_warp_groups_take_turns_is_raced_where_they_have_tiles():
    turns = replace(kernel(128, "persistent"), id="scaled_mm_128x128x128_1x1x1_pingpong2x6_swap")
    # 4096 of n have 32 tiles.
    assert [m for m in (128, 256, 257, 1024) if is_worth_timing(turns, key_of(m), 128)] == [257, 1024]
    assert is_worth_timing(kernel(128, "persistent"), key_of(128), 128)


def test_tiles_of_all_groups_run_at_once():
    assert is_near(16, 64, 192, 300, 64, num_groups=2)
    assert not is_near(16, 64, 192, 300, 64, num_groups=8)


@pytest.mark.parametrize(
    ("m", "accumulation", "is_ours_first"),
    [(1, "fast", True), (128, "fast", True), (129, "fast", False), (1, "slow", False)],
)
def test_of_scaled_mm_the_vendor_library_comes_first_above_m_128_and_with_slow_accumulation(
    m: int, accumulation: str, is_ours_first: bool
) -> None:
    kernels = [replace(one, config=one.config | {"accumulation": accumulation}) for one in KERNELS]
    manifest = Manifest(kernels={one.id: one for one in kernels})
    found = preferred(replace(key_of(m), accumulation=accumulation), (9, 0), manifest)
    assert found[0 if not is_ours_first else len(KERNELS)] == VENDOR
    assert len(found) == len(KERNELS) + 1


@pytest.mark.parametrize("most", [2, 4])
def test_a_kernel_splits_k_as_often_as_its_config_says_and_there_are_tiles(most: int) -> None:
    record = kernel(64, "splitk")
    record = replace(record, config=record.config | {"splits": [1, 2, 4][: most // 2 + 1]})
    assert why_not(record, 128, 4096, 4096, most) is None
    assert f"must be at most {most}" in why_not(record, 128, 4096, 4096, 2 * most)
    assert "must be at most 1" in why_not(record, 128, 4096, 128, 2)


def sharing_columns(*, swap_ab: bool) -> KernelRecord:
    """Tile 128x96: of n and m, or with `swap_ab` false of m and n."""
    record = kernel(96, "splitk")
    return replace(record, config=record.config | {"splits": [1, 2, 3, 4], "shares": "columns", "swap_ab": swap_ab})


def test_only_splits_that_run_at_this_k_are_proposed() -> None:
    record = kernel(64, "splitk")
    with_hole = replace(record, config=record.config | {"splits": [1, 2, 3, 4, 5, 8], "shares": "columns"})
    tile_k = record.config["tile"][2]
    assert "must be one of 1, 2, 3, 4, 5, 8 for" in why_not(with_hole, 128, 4096, 8 * tile_k, 7)
    assert why_not(with_hole, 128, 4096, 8 * tile_k, 7).endswith("use splits=5")
    # Blocks share whole tiles of k: with seven, eight blocks cannot.
    assert "splits=7 must be at most 5" in why_not(with_hole, 128, 4096, 7 * tile_k, 7)


def test_only_blocks_that_share_columns_split_k_three_ways() -> None:
    of_warps = replace(kernel(96, "splitk"), config=kernel(96, "splitk").config | {"splits": [1, 2, 4]})
    assert why_not(sharing_columns(swap_ab=True), 128, 4096, 4096, 3) is None
    assert "splits=3 must be one of 1, 2, 4 for kernel" in why_not(of_warps, 128, 4096, 4096, 3)
    assert why_not(of_warps, 128, 4096, 4096, 3).endswith("at k=4096; use splits=2")
    assert splits_to_time(sharing_columns(swap_ab=True), 96, 4096, 4096, 132) == [1, 2, 3, 4]
    assert splits_to_time(of_warps, 96, 4096, 4096, 132) == [1, 2, 4]


def test_clusters_share_k_where_that_fills_the_waves() -> None:
    record = kernel(128, "splitk")
    of_grid = replace(
        record, config=record.config | {"splits": list(range(1, 17)), "shares": "grid", "cluster": [2, 1, 1]}
    )
    # 40 tiles of 128x128: three and six times as many nearly fill one wave and two of 132 SMs.
    assert splits_to_time(of_grid, 256, 19 * 128, 28672, 132) == [1, 3, 6]
    assert splits_to_time(of_grid, 256, 19 * 128, 256, 132) == [1], "a short k is not worth it"
    assert splits_to_time(of_grid, 11 * 128, 12 * 128, 28672, 132) == [1], "132 tiles fill a wave"
    # Each tile has a counter, of which there are 512. Clusters have two along n.
    assert why_not(of_grid, 4096, 16 * 128, 4096, 2) is None
    assert "must have at most 512 tiles to split k, but has 576" in why_not(of_grid, 4096, 17 * 128, 4096, 2)
    assert splits_to_time(of_grid, 4096, 17 * 128, 4096, 132) == [1]
    # Each share of a tile has 64 KiB of partial sums, and all may have 64 MiB.
    assert "must have at most 67108864 bytes of partial sums, but has 100663296" in why_not(
        of_grid, 4096, 16 * 128, 4096, 3
    )


@pytest.mark.parametrize(
    ("swap_ab", "n", "worth"), [(True, 8192, [1, 2]), (False, 4224, [1, 2, 3]), (False, 8448, [1])]
)
def test_no_more_blocks_share_columns_than_there_are_sms(swap_ab: bool, n: int, worth: list[int]) -> None:
    # 64 tiles of 128 of n; 44 and 88 of 96.
    assert splits_to_time(sharing_columns(swap_ab=swap_ab), 96, n, 4096, 132) == worth


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tile": None}, "tile=None of kernel 'damaged' must be three integers >= 1"),
        ({"tile": [16, 64]}, r"tile=\[16, 64\] of kernel"),
        ({"tile": [16, 0, 128]}, r"tile=\[16, 0, 128\] of kernel"),
        ({"tile": [16, 64, "128"]}, "of kernel 'damaged' must be three integers"),
        ({"cluster": [2, 0, 1]}, r"cluster=\[2, 0, 1\] of kernel"),
    ],
)
def test_tile_or_cluster_that_is_none_is_refused_by_the_name_of_the_kernel(config, message):
    good = KERNELS[0]
    damaged = replace(good, id="damaged", config={**good.config, **config})
    with pytest.raises(ValueError, match=message):
        tiling_of(damaged)


@pytest.mark.parametrize(
    "config",
    [{"out": "fp16"}, {"a": "e5m2"}, {"b": "e5m2"}, {"layout": "nn"}, {"accumulation": "slow"}, {"scales": "block"}],
)
def test_kernel_for_another_dtype_layout_accumulation_or_scales_does_not_fit(config):
    good = KERNELS[0]
    assert fits(good, key_of(16), good.compute_capability)
    assert not fits(replace(good, config={**good.config, **config}), key_of(16), (9, 0))
    assert not fits(good, key_of(16), (8, 9))


TURNS = replace(kernel(128, "persistent"), id="scaled_mm_128x128x128_pingpong2x6_swap")


@pytest.mark.parametrize(
    ("change", "is_chosen"),
    [
        ({}, True),
        ({"n": 33 * 128 - 128}, False),
        ({"n": 33 * 128 - 127}, True),
        ({"m": 1023, "n": 132 * 128}, False),
        ({"k": 4096 + 64}, False),
        ({"scales": "block"}, False),
        ({"out_dtype": "fp16"}, False),
    ],
)
def test_large_results_with_aligned_rows_have_kernels_that_overlap_epilogues(change, is_chosen):
    # 16 tiles along m; four for each of 132 SMs are 33 along n.
    key = replace(key_of(2048), **{"n": 33 * 128, **change})
    kernels = [kernel(128, "persistent"), TURNS]
    assert overlapping_kernels(kernels, key, (9, 0), 132) == ([TURNS.id] if is_chosen else [])
    assert overlapping_kernels(kernels, replace(key, n=2 * key.n), (9, 0), 10 * 132) == []
    assert overlapping_kernels(kernels, key, (10, 0), 132) == []
