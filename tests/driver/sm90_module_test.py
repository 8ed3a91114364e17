"""stoneware.ops._sm90: the arguments that CUTLASS gives the driver."""

from __future__ import annotations

from typing import Any

import pytest

_WIDE = "scaled_mm_sm90_e4m3_e4m3_bf16_128x192x128_2x1x1_pingpong"
_SPLIT_K = "scaled_mm_sm90_e4m3_e4m3_bf16_64x64x256_1x1x1_splitk1x6_swap"
_SPLIT_K_TWO_GROUPS = "scaled_mm_sm90_e4m3_e4m3_bf16_128x64x128_1x1x1_splitk2x8_swap"
_SHARES_COLUMNS = "scaled_mm_sm90_e4m3_e4m3_bf16_64x104x128_1x1x1_splitk1x10_swap_columns"
_SHARES_COLUMNS_EIGHT_WAYS = "scaled_mm_sm90_e4m3_e4m3_bf16_64x64x128_1x1x1_splitk1x12_swap_columns8"
_ONE_BOX = "scaled_mm_sm90_e4m3_e4m3_fp16_192x176x128_1x1x1_persistent3x4_swap"
_PERSISTENT = "scaled_mm_sm90_e4m3_e4m3_bf16_128x224x128_1x1x1_persistent2x4"

# Values of the enums in cuda.h.
_UINT8, _UINT16, _FLOAT32, _BFLOAT16 = "0", "1", "7", "9"
_SWIZZLE_64B, _SWIZZLE_128B = "2", "3"
_L2_128B = "2"

# A problem whose rows are longer than their contents, as those of a sliced view are.
_PROBLEM = (
    "tensors=['a', 'b', 'out', 'scale_a', 'scale_b', 'bias'], m=100, n=512, k=1024, lda=2048, ldb=4096, ldd=640, "
    "scale_a='row', scale_b='tensor', device=0, num_sms=132"
)
_A, _B, _D, _SCALE_A, _SCALE_B, _STREAM = (i << 20 for i in (1, 2, 3, 4, 5, 6))

_PRELUDE = f"""
from stoneware.ops import _sm90 as module
entries = {{entry["id"]: entry for entry in module.kernels()}}
def plan(kernel):
    fake.set_parameter_bytes([entries[kernel]["params_bytes"]])
    return module.Plan(kernel, {_PROBLEM})
stream, tensors = {_STREAM}, [{_A}, {_B}, {_D}, {_SCALE_A}, {_SCALE_B}, 0]
"""


def _tensor_map(kind: str, address: int, dims: str, strides: str, box: str, swizzle: str) -> Any:
    return {
        "type": kind,
        "rank": "3",
        "address": str(address),
        "dims": dims,
        "strides": strides,
        "box": box,
        "element_strides": "1,1,1",
        "interleave": "0",
        "swizzle": swizzle,
        "l2_promotion": _L2_128B,
        "fill": "0",
        "context": "1",
    }


# Tensor maps have the innermost extent first, strides in bytes, and a batch of one of stride 0.
_TENSOR_MAPS = [
    # Two blocks of the cluster share b's tile: each loads half of its 192 columns.
    _tensor_map(_UINT8, _A, "1024,100,1", "2048,0", "128,128,1", _SWIZZLE_128B),
    _tensor_map(_UINT8, _B, "1024,512,1", "4096,0", "128,96,1", _SWIZZLE_128B),
    _tensor_map(_BFLOAT16, _D, "512,100,1", "1280,0", "32,64,1", _SWIZZLE_64B),
]


def test_tensor_maps_have_the_tensors_extents_and_strides(run_with_fake: Any) -> None:
    tensor_maps = run_with_fake(f"""{_PRELUDE}
plan("{_WIDE}")(stream, tensors)
report(fake.calls("cuTensorMapEncodeTiled"))
    """)
    assert tensor_maps == _TENSOR_MAPS


def test_the_launch_is_the_kernels(run_with_fake: Any) -> None:
    (launch,), entry = run_with_fake(f"""{_PRELUDE}
plan("{_WIDE}")(stream, tensors)
report([fake.calls("cuLaunchKernelEx"), entries["{_WIDE}"]])
    """)
    assert launch["grid"] == "6,1,1"  # m is rounded up to whole clusters of two tiles
    assert launch["cluster"] == "2,1,1"
    assert launch["block"] == "384,1,1"
    assert launch["shared_bytes"] == str(entry["shared_bytes"])
    assert launch["stream"] == str(_STREAM)


@pytest.mark.parametrize(
    ("kernel", "splits", "tile_n", "tile_m", "stored", "grid", "cluster", "threads"),
    [
        (_SPLIT_K, 1, 64, 64, ["64,64"], "16,1,1", "0,0,0", 160),
        (_SPLIT_K, 4, 64, 64, [], "64,1,1", "4,1,1", 160),
        (_SHARES_COLUMNS, 1, 64, 104, ["64,64", "64,40"], "8,1,1", "0,0,0", 160),
        (_SHARES_COLUMNS, 3, 64, 104, ["64,40"], "24,1,1", "3,1,1", 160),
        (_SHARES_COLUMNS, 4, 64, 104, ["64,40"], "32,1,1", "4,1,1", 160),
        (_SHARES_COLUMNS_EIGHT_WAYS, 6, 64, 64, [], "96,1,1", "6,1,1", 160),
        (_SPLIT_K_TWO_GROUPS, 1, 128, 64, ["64,64"], "8,1,1", "0,0,0", 384),
        (_SPLIT_K_TWO_GROUPS, 2, 128, 64, ["64,64"], "16,1,1", "2,1,1", 384),
        (_ONE_BOX, 1, 192, 176, ["64,64", "64,48"], "3,1,1", "0,0,0", 512),
        (_PERSISTENT, 1, 224, 128, ["64,64", "32,64"], "3,1,1", "0,0,0", 384),
    ],
)
def test_a_split_k_launch_has_a_block_for_each_share(
    kernel: str,
    splits: int,
    tile_n: int,
    tile_m: int,
    stored: list[str],
    grid: str,
    cluster: str,
    threads: int,
    run_with_fake: Any,
) -> None:
    maps, (launch,) = run_with_fake(f"""{_PRELUDE}
fake.set_parameter_bytes([entries["{kernel}"]["params_bytes"]])
module.Plan("{kernel}", {_PROBLEM}, splits={splits})(stream, tensors)
report([fake.calls("cuTensorMapEncodeTiled"), fake.calls("cuLaunchKernelEx")])
    """)
    assert [(one["address"], one["dims"], one["strides"], one["box"]) for one in maps] == [
        (str(_B), "1024,512", "4096", f"128,{tile_n}"),
        (str(_A), "1024,100", "2048", f"128,{min(tile_m, 100)}"),
        # What the tile's boxes are stored by, where there is room for some and whole warp groups
        # store them. The last may have fewer rows, or fewer columns, whose rows have 64 bytes.
        *((str(_D), "512,100", "1280", box) for box in stored),
    ]
    swizzles = dict.fromkeys(["64,64", "64,48", "64,40"], _SWIZZLE_128B) | {"32,64": _SWIZZLE_64B}
    assert [one["swizzle"] for one in maps[2:]] == [swizzles[box] for box in stored]
    assert (launch["grid"], launch["cluster"]) == (grid, cluster)
    assert launch["block"] == f"{threads},1,1"


@pytest.mark.parametrize(("num_sms", "grid"), [(16, "16,1,1"), (15, "8,1,1"), (4, "4,1,1")])
def test_blocks_that_share_no_k_do_several_tiles_each_where_there_are_more_than_sms(
    num_sms: int, grid: str, run_with_fake: Any
) -> None:
    # 8 tiles of n times 2 of m; a block takes all the shared memory of an SM.
    problem = _PROBLEM.replace("num_sms=132", f"num_sms={num_sms}")
    (launch,) = run_with_fake(f"""{_PRELUDE}
fake.set_parameter_bytes([entries["{_SPLIT_K}"]["params_bytes"]])
module.Plan("{_SPLIT_K}", {problem})(stream, tensors)
report(fake.calls("cuLaunchKernelEx"))
    """)
    assert launch["grid"] == grid


def test_a_warm_split_k_call_encodes_no_tensor_map(run_with_fake: Any) -> None:
    encoded, replaced = run_with_fake(f"""{_PRELUDE}
warm = plan("{_SPLIT_K}")
warm(stream, tensors)
fake.forget_calls()
warm(stream, [tensors[0] + 4096, *tensors[1:]])
report([fake.calls("cuTensorMapEncodeTiled"), fake.calls("cuTensorMapReplaceAddress")])
    """)
    assert encoded == []
    assert [int(call["address"]) for call in replaced] == [_A + 4096]


@pytest.mark.parametrize(
    ("kernel", "splits"),
    [
        (_SPLIT_K, 3),
        (_SPLIT_K, 8),
        (_SHARES_COLUMNS, 5),
        (_SPLIT_K_TWO_GROUPS, 4),
        (_ONE_BOX, 2),
        (_PERSISTENT, 2),
        (_WIDE, 2),
    ],
)
def test_splits_that_a_kernel_cannot_have_are_refused(kernel: str, splits: int, run_with_fake: Any) -> None:
    # The warps of a tile are shared by up to four blocks, of two warp groups by two.
    error = run_with_fake(f"""{_PRELUDE}
report(error_of(module.Plan, "{kernel}", {_PROBLEM}, splits={splits}))
    """)
    assert error["type"] == "ValueError"
    assert f"kernel {kernel} cannot compute" in error["message"]


def test_a_plan_takes_the_splits_that_the_manifest_lists(run_with_fake: Any) -> None:
    listed_and_taken = run_with_fake(f"""{_PRELUDE}
from stoneware.kernels import manifest, split_k
problem = dict(m=512, n=512, k=8192, lda=8192, ldb=8192, ldd=8192, device=0, num_sms=132)
def takes(kernel, splits):
    scales = {{}} if kernel.op == "matmul" else dict(scale_a="row", scale_b="row")
    if kernel.config.get("scales") == "block":
        scales = dict(scale_a="block_1x128", scale_b="block_128x128", ld_scale_a=512, ld_scale_b=4)
    try:
        module.Plan(kernel.id, tensors=["a", "b", "out", *list(scales)[:2], "bias"], splits=splits, **problem, **scales)
    except ValueError:
        return False
    return True
kernels = [kernel for kernel in manifest.packaged().kernels.values() if split_k.is_split_k(kernel)]
report([(kernel.id, kernel.config["splits"], [n for n in range(1, 18) if takes(kernel, n)]) for kernel in kernels])
    """)
    assert any(listed == [1, 2, 3, 4, 5, 8] for _, listed, _ in listed_and_taken)
    assert [(kernel, listed) for kernel, listed, taken in listed_and_taken if listed != taken] == []


@pytest.mark.parametrize("size", ["m", "n", "k"])
def test_a_last_tile_whose_end_an_int_does_not_hold_is_refused(size: str, run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
problem = dict({_PROBLEM})
problem.update({size}=2**31 - 16, lda=2**31, ldb=2**31, ldd=2**31)
report(error_of(module.Plan, "{_SPLIT_K}", **problem))
    """)
    assert error["type"] == "ValueError"
    assert f"kernel {_SPLIT_K} cannot compute" in error["message"]


def test_a_warm_call_on_the_same_tensors_only_launches(run_with_fake: Any) -> None:
    names = run_with_fake(f"""{_PRELUDE}
fake.push_new_context(0)
warm = plan("{_WIDE}")
warm(stream, tensors)
fake.forget_calls()
warm(stream, tensors)
report(fake.call_names())
    """)
    assert names == ["cuCtxGetCurrent", "cuCtxGetDevice", "cuLaunchKernelEx"]


def test_a_warm_call_replaces_the_addresses_that_changed_alone(run_with_fake: Any) -> None:
    replaced, encoded, warm, cold, again, first = run_with_fake(f"""{_PRELUDE}
def maps():
    return fake.calls("cuLaunchKernelEx")[-1]["maps"]
warm = plan("{_WIDE}")
warm(stream, tensors)
first = maps()
others = [tensors[0] + 4096, tensors[1], tensors[2] + 8192, *tensors[3:]]
fake.forget_calls()
warm(stream, others)
replaced, encoded = fake.calls("cuTensorMapReplaceAddress"), fake.calls("cuTensorMapEncodeTiled")
moved = maps()
warm(stream, tensors)
again = maps()
plan("{_WIDE}")(stream, others)
report([replaced, encoded, moved, maps(), again, first])
    """)
    assert sorted(int(call["address"]) for call in replaced) == [_A + 4096, _D + 8192]
    assert encoded == []
    assert warm == cold != first
    assert again == first and first.count(":") == 3


def test_an_address_that_the_driver_does_not_replace_is_encoded(run_with_fake: Any) -> None:
    encoded, moved, cold = run_with_fake(f"""{_PRELUDE}
warm = plan("{_WIDE}")
warm(stream, tensors)
others = [tensors[0] + 4096, *tensors[1:]]
fake.forget_calls()
fake.fail("cuTensorMapReplaceAddress", 1)
warm(stream, others)
encoded = len(fake.calls("cuTensorMapEncodeTiled"))
moved = fake.calls("cuLaunchKernelEx")[-1]["maps"]
plan("{_WIDE}")(stream, others)
report([encoded, moved, fake.calls("cuLaunchKernelEx")[-1]["maps"]])
    """)
    assert encoded == 1
    assert moved == cold


def test_threads_that_launch_one_plan_each_launch_their_own_tensors(run_with_fake: Any) -> None:
    launches = run_with_fake(f"""{_PRELUDE}
import threading
shared = plan("{_WIDE}")
shared(stream, tensors)
fake.forget_calls()
def body(i):
    for _ in range(50):
        shared(i, [tensors[0] + 4096 * i, *tensors[1:]])
threads = [threading.Thread(target=body, args=(i,)) for i in range(1, 9)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
report([[launch["stream"], launch["maps"]] for launch in fake.calls("cuLaunchKernelEx")])
    """)
    assert len(launches) == 400
    for stream, maps in launches:
        assert int(maps.split(",")[0].split(":")[0]) == _A + 4096 * int(stream)


def test_plans_of_one_kernel_load_it_once(run_with_fake: Any) -> None:
    names = run_with_fake(f"""{_PRELUDE}
for _ in range(3):
    plan("{_WIDE}")(stream, tensors)
report(fake.call_names())
    """)
    assert names.count("cuLibraryLoadData") == 1
    assert names.count("cuLaunchKernelEx") == 3


_MATMUL_NN = "matmul_sm90_bf16_bf16_nn_64x64x128_1x1x1_warpspecialized_swap"
_MATMUL_TN = "matmul_sm90_bf16_fp32_tn_128x256x64_2x1x1_cooperative"
_MATMUL_TENSORS = ["a", "b", "out"]


@pytest.mark.parametrize(
    ("kernel", "problem", "grid", "cluster", "threads", "tensor_maps"),
    [
        # A block for each tile of n, of m and of the batch, whose three products share b. Both
        # operands are contiguous along what is not k or, with swapped operands, b along n.
        (
            _MATMUL_NN,
            "m=100, n=512, k=1024, lda=2048, ldb=640, ldd=576, batch=3, batch_stride_a=4096000, batch_stride_d=57600",
            "8,2,3",
            "0,0,0",
            256,
            [
                _tensor_map(_UINT16, _B, "512,1024,3", "1280,0", "64,128,1", _SWIZZLE_128B),
                _tensor_map(_UINT16, _A, "1024,100,3", "4096,8192000", "64,64,1", _SWIZZLE_128B),
                _tensor_map(_BFLOAT16, _D, "512,100,3", "1152,115200", "64,32,1", _SWIZZLE_128B),
            ],
        ),
        # m has one tile, rounded up to a cluster of two; n and the batch need four clusters.
        # k is not a multiple of a tile. Two blocks of the cluster share b's tile: each loads half of
        # its 64 rows of k. The cooperative epilogue stores 128 rows at once.
        (
            _MATMUL_TN,
            "m=104, n=512, k=1001, lda=128, ldb=512, ldd=516, batch=2, batch_stride_a=128128, "
            "batch_stride_b=512512, batch_stride_d=53664",
            "2,4,1",
            "2,1,1",
            384,
            [
                _tensor_map(_UINT16, _A, "104,1001,2", "256,256256", "64,64,1", _SWIZZLE_128B),
                _tensor_map(_UINT16, _B, "512,1001,2", "1024,1025024", "64,32,1", _SWIZZLE_128B),
                _tensor_map(_FLOAT32, _D, "512,104,2", "2064,214656", "32,128,1", _SWIZZLE_128B),
            ],
        ),
    ],
)
def test_a_batch_and_its_layout_reach_the_tensor_maps(
    kernel: str, problem: str, grid: str, cluster: str, threads: int, tensor_maps: Any, run_with_fake: Any
) -> None:
    encoded, [launch] = run_with_fake(f"""{_PRELUDE}
fake.set_parameter_bytes([entries["{kernel}"]["params_bytes"]])
module.Plan("{kernel}", tensors={_MATMUL_TENSORS}, {problem}, device=0, num_sms=132)(stream, [{_A}, {_B}, {_D}])
report([fake.calls("cuTensorMapEncodeTiled"), fake.calls("cuLaunchKernelEx")])
    """)
    assert encoded == tensor_maps
    assert (launch["grid"], launch["cluster"]) == (grid, cluster)
    assert launch["block"] == f"{threads},1,1"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("m=100", "m=100 must be a multiple of 8"),
        ("lda=96", "lda=96 must be at least m=104"),
        ("ldb=504", "ldb=504 must be at least n=512"),
        ("batch=0", "batch=0 must be 1 to"),
        ("batch_stride_b=4", "batch_stride_b=4 must be a multiple of 8 elements"),
        ("splits=2", "cannot compute m=104 n=512 k=1001"),
        ("scale_a='row'", "with batch=2, splits=1, scale_a=row and scale_b=none; use another kernel"),
    ],
)
def test_a_layout_has_extents_and_strides_of_its_own(change: str, part: str, run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
problem = dict(tensors={_MATMUL_TENSORS}, m=104, n=512, k=1001, lda=104, ldb=512, ldd=512,
               device=0, num_sms=132, batch=2)
problem.update({change})
report(error_of(module.Plan, "{_MATMUL_TN}", **problem))
    """)
    assert error["type"] == "ValueError"
    assert part in error["message"]


def test_more_products_than_a_grid_holds_are_refused(run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
report(error_of(
    module.Plan, "{_MATMUL_NN}", tensors={_MATMUL_TENSORS}, m=8, n=64, k=64, lda=64, ldb=64, ldd=64,
    device=0, num_sms=132, batch=65536, batch_stride_a=512, batch_stride_d=512,
))
    """)
    assert error["type"] == "ValueError"
    assert "cannot compute m=8 n=64 k=64" in error["message"]


def test_a_refused_tensor_map_is_an_error_and_nothing_is_launched(run_with_fake: Any) -> None:
    error, launches, stack = run_with_fake(f"""{_PRELUDE}
fake.fail("cuTensorMapEncodeTiled", 1)
error = error_of(plan("{_WIDE}"), stream, tensors)
report([error, fake.calls("cuLaunchKernelEx"), fake.context_stack()])
    """)
    assert (error["call"], error["code_name"]) == ("cuTensorMapEncodeTiled", "CUDA_ERROR_INVALID_VALUE")
    assert "extents 1024 100 1, strides 2048 0 bytes and box 128 128 1" in error["message"]
    assert launches == []
    assert stack == ""


def test_a_host_that_disagrees_with_its_cubin_is_refused(run_with_fake: Any) -> None:
    error, launches = run_with_fake(f"""{_PRELUDE}
stale = plan("{_WIDE}")
fake.set_parameter_bytes([1280])
report([error_of(stale, stream, tensors), fake.calls("cuLaunchKernelEx")])
    """)
    assert error["code_name"] == "KERNEL_PARAMETERS_DIFFER"
    assert "1792 bytes on the host and 1280 in the cubin" in error["message"]
    assert launches == []


def test_a_gpu_that_is_no_hopper_is_named(run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
fake.fail("cuLibraryLoadData", 209)
report(error_of(plan("{_WIDE}"), stream, tensors))
    """)
    assert f"loading kernel {_WIDE} on device 0 (compute capability 8.0" in error["message"]


def test_kernels_describe_themselves_without_the_driver(run_with_fake: Any) -> None:
    kernels, names = run_with_fake(f"""{_PRELUDE}
report([module.kernels(), fake.call_names()])
    """)
    assert names == []
    assert {_WIDE, _SPLIT_K} <= {kernel["id"] for kernel in kernels}
    for kernel in kernels:
        assert 0 < kernel["params_bytes"] <= 4096  # what a launch may pass on any driver


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("k=1000", "k=1000 must be a multiple of 16; pad k"),
        ("n=520", "n=520 must be a multiple of 16; pad n"),
        ("m=0", "m=0 must be 1 to 2147483647"),
        ("m=2**31", "m=2147483648 must be 1 to 2147483647"),
        ("lda=1008", "lda=1008 must be at least k=1024"),
        ("ldb=1032", "ldb=1032 must be a multiple of 16 elements"),
        ("ldd=516", "ldd=516 must be a multiple of 8 elements"),
        ("device=-1", "device=-1 must be at least 0"),
        ("num_sms=0", "num_sms=0 must be at least 1"),
        ("max_swizzle=3", "max_swizzle=3 must be 1, 2, 4 or 8"),
        ("raster='diagonal'", "raster must be one of heuristic, along_m, along_n, but is diagonal"),
    ],
)
def test_a_problem_it_cannot_compute_is_refused(change: str, part: str, run_with_fake: Any) -> None:
    error, names = run_with_fake(f"""{_PRELUDE}
problem = dict({_PROBLEM})
problem.update({change})
report([error_of(module.Plan, "{_WIDE}", **problem), fake.call_names()])
    """)
    assert error["type"] == "ValueError"
    assert part in error["message"]
    assert names == []


def test_an_unknown_kernel_is_refused_with_the_known_ones(run_with_fake: Any) -> None:
    error = run_with_fake(f"""{_PRELUDE}
report(error_of(module.Plan, "nonesuch", {_PROBLEM}))
    """)
    assert error["type"] == "ValueError"
    assert "nonesuch" in error["message"] and _WIDE in error["message"]


@pytest.mark.parametrize(
    ("position", "value", "type_name", "part"),
    [
        (0, _A + 1, "ValueError", "a must be a device address, a multiple of 16"),
        (2, 0, "ValueError", "d must be a device address"),
        (3, _SCALE_A + 2, "ValueError", "scale_a must be a device address, a multiple of 4"),
        (5, 1, "ValueError", "bias must be a device address, a multiple of 2"),
        (1, -16, "TypeError", ""),
        (6, "'stream'", "TypeError", ""),
    ],
)
def test_a_misaligned_or_missing_address_is_refused(
    position: int, value: Any, type_name: str, part: str, run_with_fake: Any
) -> None:
    error, names = run_with_fake(f"""{_PRELUDE}
arguments = [*tensors, stream]
arguments[{position}] = {value}
report([error_of(plan("{_WIDE}"), arguments[-1], arguments[:-1]), fake.call_names()])
    """)
    assert error["type"] == type_name
    assert part in error["message"]
    assert names == []


def test_the_raster_order_reaches_cutlass(run_with_fake: Any) -> None:
    grids = run_with_fake(f"""{_PRELUDE}
problem = dict({_PROBLEM})
problem.update(m=2048, n=4096, ldd=4096)
fake.set_parameter_bytes([entries["{_WIDE}"]["params_bytes"]])
grids = []
for raster in ("along_m", "along_n"):
    module.Plan("{_WIDE}", **problem, raster=raster)(stream, tensors)
    grids.append(fake.calls("cuLaunchKernelEx")[-1]["grid"])
report(grids)
    """)
    # One block per SM; along n, the blocks of a cluster (two in m) come first.
    assert grids == ["132,1,1", "2,66,1"]
