"""Every kernel for Hopper that is built.

`persistent_mm_configs.bzl` has the list of those that fit their tiles to m, `persistent_mm_pingpong.bzl` of those whose
warp groups take turns.

A config becomes a header with its C++ struct, one cubin, a part of its family's host object, and one
entry of the kernel manifest. To add a kernel, add a config to a list.
"""

load(":cutlass_mm_sm90.bzl", "matmul_config", "scaled_mm_block_config", "scaled_mm_config")
load(":persistent_mm_configs.bzl", "PERSISTENT_MM_SM90")
load(":persistent_mm_pingpong.bzl", "PINGPONG_MM_SM90")
load(":persistent_mm_sm90.bzl", "persistent_mm_config")

# fp8 with tensor or row scales, by CUTLASS, for large m; the rest is PERSISTENT_MM_SM90's.
SCALED_MM_SM90 = [
    scaled_mm_config(
        a = "e4m3",
        b = "e4m3",
        out = "bf16",
        tile = (128, 192, 128),
        cluster = (2, 1, 1),
        schedule = "pingpong",
    ),
]

# fp8 with slow accumulation, by CUTLASS: for results in fp32. The rest is PERSISTENT_MM_SM90's.
SCALED_MM_SLOW_SM90 = [
    scaled_mm_config(
        a = "e4m3",
        b = "e4m3",
        out = "fp32",
        tile = (128, 128, 128),
        cluster = (2, 1, 1),
        schedule = "cooperative",
        accumulation = "slow",
    ),
]

# fp8 with scales 1x128 of a and 128x128 of b, by CUTLASS; the rest is PERSISTENT_MM_SM90's.
SCALED_MM_BLOCK_SM90 = [
    scaled_mm_block_config(
        a = "e4m3",
        b = "e4m3",
        out = "bf16",
        tile = (64, 128, 128),
        cluster = (1, 1, 1),
        schedule = "pingpong",
    ),
]

# Groups of rows, each with a matrix of its own. Rows a group: up to 16, 32, 64 and so on those with swapped operands,
# whose tile's n runs along them; many the rest. Blocks of a cluster along n load a for each other. The first list is
# for row scales and bf16, with tile k in units of 128 bytes.
GROUPED_MM_SM90 = [
    persistent_mm_config(
        op = "grouped_mm",
        dtype = dtype,
        out = "bf16",
        tile = (tile[0], tile[1], tile[2] * (64 if dtype == "bf16" else 128)),
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = swap_ab,
        cluster = (1, along_n, 1),
    )
    for dtype in ["bf16", "e4m3"]
    for tile, stages, warp_groups, swap_ab, along_n in [
        ((64, 16, 2), 4, 1, True, 1),
        ((64, 16, 2), 9, 1, True, 1),
        ((64, 32, 2), 8, 1, True, 1),
        ((64, 64, 2), 6, 1, True, 1),
        ((128, 16, 1), 10, 2, True, 1),
        ((128, 32, 1), 9, 2, True, 1),
        ((128, 64, 1), 8, 2, True, 1),
        ((128, 96, 1), 6, 2, True, 1),
        ((128, 128, 1), 5, 2, True, 1),
        ((64, 128, 1), 3, 1, False, 1),
        ((128, 128, 1), 5, 2, False, 2),
        ((128, 192, 1), 4, 2, False, 1),
        ((128, 192, 1), 4, 2, False, 2),
        ((128, 256, 1), 3, 2, False, 1),
        ((192, 112, 1), 4, 3, False, 1),
        ((192, 128, 1), 4, 3, False, 1),
        ((256, 128, 1), 4, 2, False, 1),
    ]
] + [
    # Block scales.
    persistent_mm_config(
        op = "grouped_mm",
        dtype = "e4m3",
        out = "bf16",
        tile = tile,
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = warp_groups == 1,
        block_scales = True,
    )
    for tile, stages, warp_groups in [
        ((64, 16, 256), 9, 1),
        ((64, 32, 256), 8, 1),
        ((64, 64, 256), 6, 1),
        ((128, 128, 128), 5, 2),
        ((128, 160, 128), 4, 2),
        ((128, 192, 128), 4, 2),
        ((192, 96, 128), 5, 3),
        ((192, 112, 128), 4, 3),
        ((256, 128, 128), 3, 2),
    ]
]

_LARGE = ((128, 256, 64), (2, 1, 1), "cooperative", False)
_MIDDLE = ((128, 128, 64), (2, 1, 1), "pingpong", False)
_WIDE = ((128, 192, 64), (2, 1, 1), "pingpong", False)
_SMALL_M = ((64, 64, 128), (1, 1, 1), "warpspecialized", True)
_SMALL_M_16 = ((64, 16, 128), (1, 1, 1), "warpspecialized", True)

# bf16, by CUTLASS: nt, a linear layer's product; nn, the gradient of its input; tn, that of its weight, which is often
# wanted in fp32. These alone compute batches, so each layout has a tile for large m. The rest, fp16 too, is
# PERSISTENT_MM_SM90's; layout tt has no kernel. Swapped tiles are for small m.
MATMUL_SM90 = [
    matmul_config(
        operand = operand,
        out = out,
        layout = layout,
        tile = tile,
        cluster = cluster,
        schedule = schedule,
        swap_ab = swap_ab,
    )
    for operand, out, layout, kernels in [
        ("bf16", "bf16", "nt", [_WIDE, _SMALL_M, _SMALL_M_16]),
        ("bf16", "bf16", "nn", [_MIDDLE, _SMALL_M]),
        ("bf16", "bf16", "tn", [_WIDE]),
        ("bf16", "fp32", "tn", [_LARGE]),
    ]
    for tile, cluster, schedule, swap_ab in kernels
]

# Everything that is built for sm_90a.
KERNELS_SM90 = (
    SCALED_MM_SM90 + SCALED_MM_SLOW_SM90 + SCALED_MM_BLOCK_SM90 + PERSISTENT_MM_SM90 +
    PINGPONG_MM_SM90 + GROUPED_MM_SM90 + MATMUL_SM90
)
