"""The kernels for Hopper where two warp groups take turns (docs/design/pingpong_sm90.md).

They serve results of some 6 million elements and more, where each block has several tiles.
"""

load(":persistent_mm_sm90.bzl", "persistent_mm_config")

# By op, dtype, layout and dtype of the result: (m, n) of the tile, stages, whether operands are swapped, and blocks
# along m and n. Chosen from 64 to 256 rows, widths in steps of 8, with operands swapped and not, and clusters of up to
# four blocks.
_TILES = {
    ("matmul", "bf16", "nt", "bf16"): [
        ((128, 128), 6, True, (1, 1)),
        ((128, 144), 5, True, (1, 1)),
        ((128, 160), 5, True, (1, 1)),
        ((128, 192), 5, True, (1, 1)),
        ((128, 192), 5, True, (2, 1)),
        ((192, 96), 5, True, (1, 1)),
        ((192, 112), 5, True, (1, 1)),
        ((192, 128), 5, True, (1, 2)),
        ((128, 176), 5, False, (1, 1)),
    ],
    ("matmul", "bf16", "nn", "bf16"): [
        ((128, 128), 6, True, (1, 1)),
        ((128, 128), 6, True, (2, 2)),
        ((128, 152), 5, True, (1, 1)),
        ((128, 160), 5, True, (2, 1)),
        ((128, 184), 5, True, (2, 1)),
        ((128, 192), 5, True, (1, 1)),
        ((128, 192), 5, True, (4, 1)),
        ((192, 104), 5, True, (1, 1)),
    ],
    ("matmul", "bf16", "tn", "bf16"): [
        ((64, 128), 8, True, (1, 1)),
        ((128, 128), 6, True, (1, 1)),
        ((128, 128), 6, True, (2, 1)),
        ((128, 128), 6, True, (4, 1)),
        ((128, 160), 5, True, (2, 2)),
        ((128, 192), 5, True, (2, 1)),
        ((128, 192), 5, True, (4, 1)),
        ((192, 96), 5, True, (1, 1)),
        ((192, 128), 5, True, (1, 2)),
    ],
    ("matmul", "bf16", "tn", "fp32"): [
        ((128, 128), 6, False, (2, 1)),
        ((128, 192), 5, False, (1, 1)),
        ((192, 128), 5, False, (1, 2)),
    ],
    ("scaled_mm", "e4m3", "nt", "bf16"): [
        ((128, 128), 6, True, (1, 1)),
        ((128, 160), 5, True, (1, 1)),
        ((128, 168), 5, True, (2, 1)),
        ((128, 192), 5, True, (1, 1)),
        ((128, 192), 5, True, (2, 1)),
        ((192, 112), 5, True, (1, 1)),
        ((192, 128), 5, True, (1, 2)),
        ((128, 160), 5, False, (1, 1)),
        ((128, 160), 5, False, (2, 1)),
        ((128, 176), 5, False, (1, 1)),
    ],
    ("grouped_mm", "bf16", "nt", "bf16"): [
        ((128, 96), 6, True, (1, 1)),
        ((128, 160), 5, True, (1, 1)),
        ((128, 192), 4, True, (1, 1)),
        ((64, 256), 4, False, (1, 1)),
        ((128, 128), 5, False, (1, 2)),
    ],
    ("grouped_mm", "e4m3", "nt", "bf16"): [
        ((128, 64), 8, True, (1, 1)),
        ((128, 160), 5, True, (1, 1)),
        ((64, 256), 4, False, (1, 1)),
    ],
}

PINGPONG_MM_SM90 = [
    persistent_mm_config(
        op = op,
        dtype = dtype,
        out = out,
        layout = layout,
        tile = tile + (64 if dtype == "bf16" else 128,),
        stages = stages,
        warp_groups = 2,
        schedule = "pingpong",
        swap_ab = swap_ab,
        cluster = blocks + (1,),
    )
    for (op, dtype, layout, out), tiles in _TILES.items()
    for tile, stages, swap_ab, blocks in tiles
]
