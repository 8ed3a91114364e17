"""stoneware.ops._sm90: what blocks of a cluster load for each other, and how many clusters are launched."""

from __future__ import annotations

from typing import Any

import pytest

_CLUSTERS_OF_FOUR = "scaled_mm_sm90_e4m3_e4m3_bf16_128x128x128_2x2x1_persistent2x6"

# Values of the enums in cuda.h.
_SWIZZLE_64B, _SWIZZLE_128B = "2", "3"

_A, _B, _D, _STREAM = (i << 20 for i in range(1, 5))


def _prelude(kernel: str) -> str:
    return f"""
from stoneware.ops import _sm90 as module
[entry] = [entry for entry in module.kernels() if entry["id"] == "{kernel}"]
fake.set_parameter_bytes([entry["params_bytes"]])
"""


def test_as_many_clusters_are_launched_as_run_at_one_time(run_with_fake: Any) -> None:
    # 256 tiles of a cluster of four, of which 30 fit: nine rounds of at most 29.
    (launch,), queries = run_with_fake(f"""{_prelude(_CLUSTERS_OF_FOUR)}
queries = []
for _ in range(2):
    fake.forget_calls()
    module.Plan("{_CLUSTERS_OF_FOUR}", tensors=["a", "b", "out"], m=4096, n=4096, k=1024, lda=1024, ldb=1024,
                ldd=4096, device=0, num_sms=132)({_STREAM}, [{_A}, {_B}, {_D}])
    queries.append(fake.calls("cuOccupancyMaxActiveClusters"))
report([fake.calls("cuLaunchKernelEx"), queries])
    """)
    assert (launch["grid"], launch["cluster"]) == ("116,1,1", "4,1,1")
    assert [[call["blocks"] for call in calls] for calls in queries] == [["4"], []], "the driver is queried once"


@pytest.mark.parametrize(
    ("kernel", "splits", "box_n", "box_m", "grid", "cluster"),
    [
        # Two tiles of 128 along m and four of 96 along n: a block loads a fourth of its rows of a and
        # half of its columns of b.
        ("matmul_sm90_bf16_bf16_bf16_128x96x64_2x4x1_persistent2x7", 1, 48, 32, "48,1,1", "8,1,1"),
        ("matmul_sm90_bf16_bf16_bf16_128x96x64_1x4x1_persistent2x7", 1, 96, 32, "36,1,1", "4,1,1"),
        # Swapped: 256 of n and 120 of m.
        ("matmul_sm90_bf16_bf16_bf16_256x120x64_1x2x1_persistent2x4_swap", 1, 128, 120, "16,1,1", "2,1,1"),
        # Two tiles along m, each with k in four shares.
        ("matmul_sm90_bf16_bf16_bf16_128x128x64_2x1x1_splitk2x6_columns", 4, 64, 128, "128,1,1", "8,1,1"),
    ],
)
def test_the_blocks_of_a_cluster_load_parts_of_their_operands(
    kernel: str, splits: int, box_n: int, box_m: int, grid: str, cluster: str, run_with_fake: Any
) -> None:
    (b_map, a_map, *_), [launch] = run_with_fake(f"""{_prelude(kernel)}
module.Plan("{kernel}", tensors=["a", "b", "out"], m=300, n=1000, k=512, lda=512, ldb=512, ldd=1000, splits={splits},
            device=0, num_sms=132)({_STREAM}, [{_A}, {_B}, {_D}])
report([fake.calls("cuTensorMapEncodeTiled"), fake.calls("cuLaunchKernelEx")])
    """)
    assert (b_map["dims"], b_map["box"]) == ("512,1000", f"64,{box_n}")
    assert (a_map["dims"], a_map["box"]) == ("512,300", f"64,{box_m}")
    assert (launch["grid"], launch["cluster"]) == (grid, cluster)


@pytest.mark.parametrize(("m", "rows"), [(1, 1), (33, 9), (100, 25), (128, 32), (129, 32)])
def test_the_blocks_of_a_cluster_load_no_more_rows_than_there_are(m: int, rows: int, run_with_fake: Any) -> None:
    kernel = "matmul_sm90_bf16_bf16_bf16_128x96x64_1x4x1_persistent2x7"
    (b_map, a_map, *_) = run_with_fake(f"""{_prelude(kernel)}
module.Plan("{kernel}", tensors=["a", "b", "out"], m={m}, n=1000, k=512, lda=512, ldb=512, ldd=1000, splits=1,
            device=0, num_sms=132)({_STREAM}, [{_A}, {_B}, {_D}])
report(fake.calls("cuTensorMapEncodeTiled"))
    """)
    assert b_map["box"] == "64,96"
    # Each of four blocks loads a part.
    assert (a_map["dims"], a_map["box"]) == (f"512,{m}", f"64,{rows}")


@pytest.mark.parametrize(
    ("kernel", "b_box", "a_box"),
    [
        # Swapped: a has one box, so each of four blocks loads a fourth of its k; each loads its own b.
        ("tn_64x64x64_4x1x1_persistent1x12_swap", ("64,64", _SWIZZLE_128B), ("64,16", _SWIZZLE_128B)),
        # b has five boxes of 32 columns, so four blocks each load a fourth of their k.
        ("tn_128x160x64_4x1x1_persistent2x5", ("32,16", _SWIZZLE_64B), ("64,64", _SWIZZLE_128B)),
    ],
)
def test_blocks_divide_k_where_rows_run_fastest_in_too_few_boxes(
    kernel: str, b_box: tuple[str, str], a_box: tuple[str, str], run_with_fake: Any
) -> None:
    kernel = f"matmul_sm90_bf16_bf16_bf16_{kernel}"
    b_map, a_map, *_ = run_with_fake(f"""{_prelude(kernel)}
module.Plan("{kernel}", tensors=["a", "b", "out"], m=304, n=1000, k=512, lda=304, ldb=1000, ldd=1000,
            device=0, num_sms=132)({_STREAM}, [{_A}, {_B}, {_D}])
report(fake.calls("cuTensorMapEncodeTiled"))
    """)
    assert (b_map["dims"], b_map["box"], b_map["swizzle"]) == ("1000,512", *b_box)
    assert (a_map["dims"], a_map["box"], a_map["swizzle"]) == ("304,512", *a_box)


_OF_GRID = "matmul_sm90_bf16_bf16_bf16_64x96x64_4x1x1_splitk1x10_grid"


def _plan_of_grid(*, splits: int, m: int = 300) -> str:
    return f"""module.Plan("{_OF_GRID}", tensors=["a", "b", "out"], m={m}, n=1000, k=512, lda=512, ldb=512, ldd=1000,
                splits={splits}, device=0, num_sms=132)"""


def test_clusters_that_share_k_have_a_workspace(run_with_fake: Any) -> None:
    num_bytes, launches, error = run_with_fake(f"""{_prelude(_OF_GRID)}
plans = [{_plan_of_grid(splits=3)}, {_plan_of_grid(splits=1)}]
plans[0]({_STREAM}, [{_A}, {_B}, {_D}, {9 << 20}])
plans[1]({_STREAM}, [{_A}, {_B}, {_D}])
report([[plan.workspace_bytes for plan in plans], fake.calls("cuLaunchKernelEx"),
        error_of(plans[0], {_STREAM}, [{_A}, {_B}, {_D}])])
    """)
    # Two clusters along m and eleven along n, each in three shares: 264 blocks with 64x96 sums.
    assert num_bytes == [264 * 64 * 96 * 4, 0]
    assert (launches[0]["grid"], launches[0]["cluster"]) == ("264,1,1", "4,1,1")
    assert (launches[1]["grid"], launches[1]["cluster"]) == ("88,1,1", "4,1,1")
    assert error["type"] == "TypeError"
    assert "the plan takes 4 addresses, but got 3" in error["message"]


@pytest.mark.parametrize(
    ("address", "message"),
    [(0, "workspace must be a device address, a multiple of 16 bytes, but is 0"), (8, "but is 8")],
)
def test_a_workspace_that_is_missing_or_misaligned_is_refused(address: int, message: str, run_with_fake: Any) -> None:
    error, launches = run_with_fake(f"""{_prelude(_OF_GRID)}
plan = {_plan_of_grid(splits=3)}
report([error_of(plan, {_STREAM}, [{_A}, {_B}, {_D}, {address}]), fake.calls("cuLaunchKernelEx")])
    """)
    assert error["type"] == "ValueError"
    assert message in error["message"]
    assert not launches


def test_more_tiles_than_counters_are_not_split(run_with_fake: Any) -> None:
    # 12 clusters of 4 along m and 11 along n: 528 tiles.
    error, unsplit = run_with_fake(f"""{_prelude(_OF_GRID)}
report([error_of(lambda: {_plan_of_grid(splits=2, m=3000)}), error_of(lambda: {_plan_of_grid(splits=1, m=3000)})])
    """)
    assert error["type"] == "ValueError"
    assert f"kernel {_OF_GRID} cannot compute" in error["message"]
    assert unsplit is None
