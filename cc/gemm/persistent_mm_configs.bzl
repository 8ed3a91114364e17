"""The kernels for Hopper that are built from PTX, without grouped ones: tiles that fit the problem.

Most lists say by what their tiles were chosen. `gemm_configs.bzl` has all kernels.
"""

load(":persistent_mm_layouts.bzl", "FP32_TILES", "LAYOUT_TILES")
load(":persistent_mm_sm90.bzl", "persistent_mm_config")

# Up to how many blocks or clusters share the k of a tile -> what they share.
_SHARES = {1: "warps", 4: "columns", 8: "columns", 16: "grid"}

# Tiles that fit m above 96: (m, n) of the tile, stages, swap_ab, and what blocks share where some share
# k. Stages are as many as fit, each of 128 bytes of k, and a tile has a warp group for each 64 of its m.
# n is what m, or a half, a third and so on of m, needs. Chosen from all multiples of 8 with operands
# swapped, and of 16 without, each with and without shared k (docs/design/persistent_mm_sm90.md).
_FITTED_FP8 = [
    ((64, 72), 12, True, "warps"),
    ((64, 80), 11, True, "warps"),
    ((64, 88), 11, True, "warps"),
    ((64, 104), 10, True, "columns"),
    ((64, 112), 9, True, "columns"),
    ((64, 120), 9, True, "warps"),
    ((64, 168), 7, True, "warps"),
    ((128, 72), 8, True, "warps"),
    ((128, 80), 7, True, "warps"),
    ((128, 104), 6, True, "warps"),
    ((128, 120), 6, True, "warps"),
    ((128, 136), 5, True, "warps"),
    ((128, 144), 5, True, "warps"),
    ((128, 152), 5, True, "warps"),
    ((128, 168), 4, True, "warps"),
    ((128, 200), 4, True, "warps"),
    ((192, 80), 5, True, "warps"),
    ((192, 88), 5, True, "warps"),
    ((128, 80), 7, False, "warps"),
    ((128, 144), 5, False, "warps"),
    ((128, 160), 5, False, "warps"),
    ((192, 112), 4, False, "warps"),
]

_FITTED_16_BIT = [
    ((64, 72), 12, True, "warps"),
    ((64, 80), 11, True, "warps"),
    ((64, 88), 11, True, "warps"),
    ((64, 104), 10, True, "columns"),
    ((64, 112), 9, True, "columns"),
    ((64, 128), 8, True, "warps"),
    ((64, 144), 7, True, "columns"),
    ((128, 72), 8, True, "warps"),
    ((128, 80), 7, True, "warps"),
    ((128, 88), 7, True, "warps"),
    ((128, 104), 6, True, "warps"),
    ((128, 112), 6, True, "warps"),
    ((128, 120), 6, True, "warps"),
    ((128, 152), 5, True, "warps"),
    ((128, 168), 4, True, "warps"),
    ((192, 80), 5, True, "warps"),
    ((192, 120), 4, True, "warps"),
    ((128, 80), 7, False, "warps"),
    ((128, 112), 6, False, "warps"),
    ((128, 160), 5, False, "warps"),
    ((128, 224), 4, False, "warps"),
    ((192, 144), 4, False, "columns"),
]

# Block scales above some 64 rows: (m, n) of the tile, stages, blocks of a cluster along n, and dtypes of the result; a
# tile has a warp group for each 64 of 128 or 192 rows, and two for 256. Chosen from 64 to 256 rows, widths in steps of
# 16, operands swapped as well, and one or two blocks (docs/design/block_scales_sm90.md).
_BLOCK_SCALES = [
    ((128, 64), 8, 1, ["bf16", "fp16"]),
    ((128, 80), 7, 1, ["bf16"]),
    ((128, 96), 7, 1, ["bf16", "fp16"]),
    ((128, 112), 6, 1, ["bf16"]),
    ((128, 128), 6, 1, ["bf16", "fp16"]),
    ((128, 160), 5, 1, ["bf16"]),
    ((128, 192), 4, 1, ["bf16", "fp16"]),
    ((128, 192), 4, 2, ["bf16"]),
    ((192, 96), 5, 1, ["bf16"]),
    ((192, 112), 5, 1, ["bf16", "fp16"]),
    ((256, 112), 4, 1, ["bf16"]),
    ((256, 128), 3, 1, ["bf16"]),
    ((256, 128), 4, 2, ["bf16", "fp16"]),
]

# Clusters, where operands are to be read from L2 less often: for a short n, a long k, or rows that begin within a
# line of L2. Blocks along the tile's m and n load operands for each other, and blocks may share k, where m and n have
# few tiles. By op, (m, n) of the tile, stages, whether operands are swapped, blocks along m and n, and up to how many
# of each share k. docs/design/clusters_sm90.md has how they were chosen.
_CLUSTERS = {
    "matmul": [
        ((64, 64), 12, True, (1, 1), 8),
        ((64, 128), 8, True, (1, 1), 8),
        ((128, 96), 7, False, (1, 1), 8),
        ((128, 96), 7, False, (1, 2), 4),
        ((128, 128), 6, False, (2, 1), 4),
        ((128, 96), 7, False, (1, 4), 1),
        ((192, 96), 5, False, (1, 4), 1),
        ((192, 128), 4, False, (1, 2), 1),
        ((128, 256), 4, False, (2, 1), 1),
        ((128, 160), 4, True, (2, 2), 1),
        ((256, 120), 4, True, (1, 2), 1),
        ((128, 80), 8, True, (1, 2), 4),
        ((64, 96), 10, False, (4, 1), 16),
        ((128, 176), 5, False, (2, 1), 1),
        ((64, 168), 7, True, (4, 1), 1),
        ((64, 104), 10, True, (4, 1), 1),
        ((192, 160), 4, False, (1, 2), 1),
        ((128, 96), 7, False, (2, 4), 1),
        ((192, 96), 5, False, (1, 2), 16),
        ((128, 160), 5, True, (4, 1), 16),
        ((64, 64), 12, False, (1, 4), 16),
        ((64, 192), 6, True, (4, 1), 16),
        ((64, 160), 7, False, (4, 1), 16),
        ((192, 200), 4, True, (2, 1), 1),
        ((64, 80), 12, True, (4, 2), 16),
        ((64, 64), 14, True, (2, 4), 16),
        ((192, 144), 4, False, (1, 2), 16),
        ((256, 160), 4, False, (1, 2), 1),
        ((256, 136), 4, True, (1, 2), 1),
        ((128, 144), 6, False, (4, 2), 16),
        ((64, 96), 10, False, (2, 4), 16),
        ((64, 48), 16, True, (2, 4), 16),
        ((128, 208), 4, False, (2, 1), 16),
        ((64, 64), 14, True, (4, 2), 16),
        ((128, 80), 8, True, (1, 4), 16),
        ((64, 96), 11, True, (4, 2), 16),
        ((192, 176), 4, True, (1, 2), 1),
        ((64, 80), 12, False, (2, 4), 16),
        ((128, 104), 7, True, (1, 2), 16),
    ],
    "scaled_mm": [
        ((64, 64), 12, True, (1, 1), 8),
        ((128, 96), 7, False, (1, 1), 8),
        ((128, 128), 6, False, (1, 1), 8),
        ((192, 128), 4, False, (1, 1), 8),
        ((128, 128), 6, False, (2, 1), 4),
        ((128, 128), 6, False, (1, 2), 1),
        ((192, 96), 5, False, (1, 2), 1),
        ((192, 128), 4, False, (1, 2), 1),
        ((192, 176), 4, False, (1, 2), 1),
        ((256, 128), 4, False, (1, 2), 1),
        ((128, 128), 6, False, (2, 2), 1),
        ((128, 224), 4, False, (2, 1), 1),
        ((256, 112), 4, True, (1, 1), 1),
        ((256, 160), 3, True, (1, 2), 1),
        ((64, 144), 8, True, (4, 1), 1),
        ((128, 240), 4, True, (2, 1), 1),
        ((128, 96), 7, False, (1, 2), 16),
        ((64, 128), 9, True, (4, 1), 16),
        ((64, 96), 10, False, (4, 1), 16),
        ((64, 200), 6, True, (4, 1), 16),
        ((128, 200), 5, True, (2, 1), 16),
        ((128, 176), 5, False, (2, 1), 16),
        ((192, 112), 5, True, (1, 2), 16),
        ((64, 48), 16, True, (2, 4), 16),
        ((128, 208), 4, False, (2, 1), 16),
        ((192, 176), 4, True, (2, 1), 1),
        ((128, 176), 5, True, (4, 1), 16),
        ((64, 168), 7, True, (4, 1), 16),
        ((128, 112), 6, False, (1, 2), 16),
        ((128, 248), 4, True, (2, 1), 1),
        ((64, 72), 13, True, (1, 4), 16),
        ((64, 64), 14, True, (1, 4), 16),
        ((64, 88), 11, True, (4, 2), 16),
        ((64, 56), 15, True, (2, 4), 16),
        ((256, 160), 3, False, (1, 2), 1),
        ((64, 120), 9, True, (2, 1), 16),
    ],
}

# Slow accumulation: (m, n) of the tile, stages, and up to how many share k.
_SLOW = [
    ((128, 128), 5, 1),
    ((128, 160), 4, 1),
    ((128, 192), 4, 1),
    ((256, 112), 3, 1),
    ((128, 128), 5, 16),
]

def _fitted_config(
        op,
        dtype,
        out,
        tile,
        stages,
        swap_ab,
        shares = "warps",
        max_splits = None,
        **fields):
    return persistent_mm_config(
        op = op,
        dtype = dtype,
        out = out,
        tile = tile + ((64 if op == "matmul" else 128),),
        stages = stages,
        warp_groups = 2 if tile[0] == 256 else tile[0] // 64,
        swap_ab = swap_ab,
        shares = shares,
        max_splits = max_splits or (1 if shares == "warps" else None),
        **fields
    )

# Small and middling m: of the tile, n is what m needs; stages for one block an SM or, of the first,
# three and two. Without swapped operands those with 64 rows are for m of 64 and 128, where n / 96 or
# n / 112 makes better use of the SMs than n / 64; the wide ones for m above 64 where the problem has
# as many tiles as there are SMs, or a few times as many, and k is long compared with the tile's epilogue.
PERSISTENT_MM_SM90 = [
    persistent_mm_config(
        op = "scaled_mm",
        dtype = "e4m3",
        out = out,
        tile = tile,
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = swap_ab,
    )
    for out in ["bf16", "fp16"]
    for tile, stages, warp_groups, swap_ab in [
        ((64, 16, 256), 3, 1, True),
        ((64, 16, 256), 5, 1, True),
        ((64, 16, 256), 9, 1, True),
        ((64, 32, 256), 8, 1, True),
        ((64, 64, 256), 6, 1, True),
        ((64, 96, 128), 8, 1, True),
        ((64, 128, 128), 8, 1, True),
        ((128, 64, 128), 8, 2, True),
        ((128, 96, 128), 7, 2, True),
        ((192, 176, 128), 4, 3, True),
        ((64, 96, 256), 5, 1, False),
        ((64, 112, 256), 4, 1, False),
        ((128, 96, 128), 7, 2, False),
        ((128, 112, 128), 6, 2, False),
        ((128, 192, 128), 4, 2, False),
        ((128, 224, 128), 4, 2, False),
        ((128, 256, 128), 4, 2, False),
        ((192, 176, 128), 4, 3, False),
    ]
] + [
    # Gradients, by a weight, with fast accumulation. Above m = 128 torch's own kernels are the faster ones.
    persistent_mm_config(
        op = "scaled_mm",
        dtype = "e5m2",
        b_dtype = "e4m3",
        out = "bf16",
        tile = tile,
        stages = stages,
    )
    for tile, stages in [
        ((64, 64, 256), 6),
        ((64, 128, 128), 8),
    ]
] + [
    # Block scales: up to four blocks of k a stage, as the accumulators allow. Two blocks of the first config fit
    # an SM, for split tiles.
    persistent_mm_config(
        op = "scaled_mm",
        dtype = "e4m3",
        out = out,
        tile = tile,
        stages = stages,
        block_scales = True,
    )
    for tile, stages, outs in [
        ((64, 16, 256), 5, ["bf16", "fp16"]),
        ((64, 16, 512), 5, ["bf16", "fp16"]),
        ((64, 32, 512), 4, ["bf16", "fp16"]),
        ((64, 64, 512), 3, ["bf16", "fp16"]),
        ((64, 96, 256), 5, ["bf16"]),
    ]
    for out in outs
] + [
    persistent_mm_config(
        op = "scaled_mm",
        dtype = "e4m3",
        out = "bf16",
        tile = tile,
        stages = stages,
        block_scales = True,
        max_splits = 1,
    )
    for tile, stages in [
        ((64, 64, 256), 6),
        ((64, 80, 256), 6),
    ]
] + [
    _fitted_config(
        "scaled_mm",
        "e4m3",
        out,
        tile,
        stages,
        swap_ab = False,
        block_scales = True,
        cluster = (1, along_n, 1),
    )
    for tile, stages, along_n, outs in _BLOCK_SCALES
    for out in outs
] + [
    # Gradients, whose sums are long.
    _fitted_config(
        "scaled_mm",
        dtype,
        "bf16",
        tile,
        stages,
        swap_ab = False,
        shares = _SHARES[splits],
        max_splits = splits,
        accumulation = "slow",
        b_dtype = "e4m3",
    )
    for dtype in ["e4m3", "e5m2"]
    for tile, stages, splits in _SLOW
] + [
    persistent_mm_config(
        op = "matmul",
        dtype = dtype,
        out = dtype,
        tile = tile,
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = swap_ab,
    )
    for dtype in ["bf16", "fp16"]
    for tile, stages, warp_groups, swap_ab in [
        ((64, 16, 128), 9, 1, True),
        ((64, 32, 128), 8, 1, True),
        ((64, 64, 128), 6, 1, True),
        ((128, 64, 64), 8, 2, True),
        ((64, 96, 128), 5, 1, False),
        ((64, 112, 128), 4, 1, False),
        ((128, 128, 64), 6, 2, False),
        ((192, 176, 64), 4, 3, False),
    ]
] + [
    # Few tiles and a long k: routers, keys of grouped heads.
    persistent_mm_config(
        op = op,
        dtype = dtype,
        out = "bf16",
        tile = tile,
        stages = stages,
        layout = layout,
        shares = "columns",
        max_splits = 8,
    )
    for op, dtype, layout, tile, stages in [
        ("matmul", "bf16", "nt", (64, 16, 128), 9),
        ("matmul", "bf16", "nt", (64, 32, 128), 8),
        ("matmul", "bf16", "nn", (64, 16, 128), 9),
        ("matmul", "bf16", "nn", (64, 32, 128), 8),
        ("scaled_mm", "e4m3", "nt", (64, 16, 256), 9),
        ("scaled_mm", "e4m3", "nt", (64, 32, 256), 8),
    ]
] + [
    _fitted_config("scaled_mm", "e4m3", out, tile, stages, swap_ab, shares)
    for out in ["bf16", "fp16"]
    for tile, stages, swap_ab, shares in _FITTED_FP8
] + [
    _fitted_config("matmul", dtype, dtype, tile, stages, swap_ab, shares)
    for dtype in ["bf16", "fp16"]
    for tile, stages, swap_ab, shares in _FITTED_16_BIT
] + [
    _fitted_config(
        op,
        dtype,
        "bf16",
        tile,
        stages,
        swap_ab,
        shares = _SHARES[splits],
        max_splits = splits,
        cluster = blocks + (1,),
    )
    for op, dtype in [("matmul", "bf16"), ("scaled_mm", "e4m3")]
    for tile, stages, swap_ab, blocks, splits in _CLUSTERS[op]
] + [
    persistent_mm_config(
        op = "matmul",
        dtype = "bf16",
        out = "bf16",
        layout = "nn",
        tile = tile,
        stages = stages,
    )
    for tile, stages in [
        ((64, 16, 128), 9),
        ((64, 32, 128), 8),
        ((64, 64, 128), 6),
    ]
] + [
    _fitted_config(
        "matmul",
        "bf16",
        "bf16",
        tile,
        stages,
        swap_ab,
        shares = _SHARES[splits],
        max_splits = splits,
        cluster = blocks + (1,),
        layout = layout,
    )
    for layout, tiles in LAYOUT_TILES.items()
    for tile, stages, swap_ab, blocks, splits in tiles
] + [
    _fitted_config(
        "matmul",
        "bf16",
        "fp32",
        tile,
        stages,
        swap_ab,
        shares = _SHARES[splits],
        max_splits = splits,
        cluster = blocks + (1,),
        layout = layout,
    )
    for layout, tiles in FP32_TILES.items()
    for tile, stages, swap_ab, blocks, splits in tiles
]
