"""Configs that must be refused: function -> test -> (what differs from a valid config, words of the error)."""

CONFIG_FAILURES = {
    "matmul_config": {
        "layout": (
            {"layout": "xy"},
            ["layout must be one of nt, nn, tn, tt", "\"xy\""],
        ),
        "out": (
            {"out": "fp16"},
            ["out must be the operands' dtype or fp32", "\"fp16\" of \"bf16\""],
        ),
        "tile_k": (
            {"tile": [128, 64, 256]},
            ["tile k must be 64 or 128", "is 256"],
        ),
    },
    "persistent_mm_config": {
        "layout_dtype": (
            {"layout": "nn"},
            ["layout must be \"nt\" except for matmul of bf16", "is \"nn\" for scaled_mm of e4m3", "omit it"],
        ),
        "layout_columns": (
            {
                "dtype": "bf16",
                "layout": "nn",
                "op": "matmul",
                "stages": 5,
                "swap_ab": False,
                "tile": [128, 144, 64],
                "warp_groups": 2,
            },
            ["a multiple of 32 where it runs fastest", "is 144 with layout \"nn\"", "change the tile"],
        ),
        "fp32_dtype": (
            {"out": "fp32", "swap_ab": False},
            ["out must have 16 bits except for matmul of bf16", "fp32 for scaled_mm of e4m3", "change it"],
        ),
        "fp32_swapped_columns": (
            {"dtype": "bf16", "op": "matmul", "out": "fp32", "tile": [64, 72, 64]},
            ["or 16 with swapped operands", "n = 72", "swap_ab = True", "change them"],
        ),
        "fp32_columns": (
            {"dtype": "bf16", "op": "matmul", "out": "fp32", "swap_ab": False, "tile": [64, 48, 64]},
            ["a tile of fp32 must have n in multiples of 32", "n = 48", "swap_ab = False", "change them"],
        ),
        "wide_block_scales": (
            {"block_scales": True, "stages": 2, "swap_ab": False, "tile": [128, 176, 128], "warp_groups": 2},
            ["at most two scales of b, one for 128 columns", "tile n is 176", "take at most 128"],
        ),
        "warp_groups": (
            {"tile": [256, 64, 128], "warp_groups": 4},
            ["warp_groups must be one of 1, 2, 3", "is 4", "pass how many warp groups"],
        ),
        "accumulators": (
            {"stages": 3, "tile": [192, 256, 128], "warp_groups": 3},
            ["at most 100 accumulators with 3 warp groups", "has 128", "change how many warp groups share it"],
        ),
        "block_accumulators": (
            {"block_scales": True, "stages": 3, "tile": [64, 192, 256]},
            ["a thread must hold at most 192 accumulators", "has 288", "shrink the tile"],
        ),
        "block_tile_k": (
            {"block_scales": True, "stages": 3, "tile": [64, 64, 384]},
            ["tile k must be one, two or four blocks of 128", "is 384", "change it"],
        ),
        "block_tile_n": (
            {"block_scales": True, "stages": 3, "tile": [64, 16, 128]},
            ["tile n must be a multiple of 32 with block scales", "is 16", "double its k"],
        ),
        "block_dtype": (
            {"block_scales": True, "dtype": "bf16", "out": "bf16", "tile": [64, 64, 128]},
            ["block scales and slow accumulation must be of fp8", "is \"bf16\"", "change it"],
        ),
        "swap_ab": (
            {"block_scales": True, "swap_ab": False},
            ["must be swapped with one warp group", "swap_ab is False with 1 warp groups", "change one of them"],
        ),
        "slow_swap_ab": (
            {"accumulation": "slow", "tile": [128, 64, 128], "warp_groups": 2},
            ["slow accumulation must have two or three warp groups", "swap_ab = True", "change them"],
        ),
        "tile_n": (
            {"tile": [64, 20, 256]},
            ["tile n must be a multiple of 8 up to 256", "is 20", "change the tile"],
        ),
        "unswapped_tile_n": (
            {"swap_ab": False, "tile": [64, 72, 256]},
            ["tile n must be a multiple of 16 up to 256", "is 72", "change the tile"],
        ),
        "spilled_accumulators": (
            {"stages": 3, "swap_ab": False, "tile": [256, 208, 128], "warp_groups": 2},
            ["at most 192 accumulators with 2 warp groups", "has 208", "shrink the tile"],
        ),
        "shared_memory": (
            {"stages": 8},
            ["at most 232448 bytes of shared memory", "8 stages", "take 276104", "take fewer stages"],
        ),
        "shared_memory_of_scales": (
            {"block_scales": True, "stages": 6, "swap_ab": False, "tile": [128, 144, 128], "warp_groups": 2},
            ["at most 232448 bytes of shared memory", "6 stages", "take 233832", "take fewer stages"],
        ),
        "columns_place": (
            {"shares": "columns", "stages": 2, "tile": [128, 192, 128], "warp_groups": 2},
            ["place for the partial sums of the columns", "add stages", "do not share columns"],
        ),
        "columns_splits": (
            {"max_splits": 2, "shares": "columns"},
            ["blocks that share columns must be up to 4 or 8", "max_splits is 2", "share warps"],
        ),
        "columns_without_splits": (
            {"max_splits": 1, "shares": "columns"},
            ["blocks that share columns must be up to 4 or 8", "max_splits is 1", "share warps"],
        ),
        "columns_block_scales": (
            {"block_scales": True, "shares": "columns", "stages": 5, "tile": [64, 16, 256]},
            ["blocks that share columns must be up to 4 or 8, without block scales", "block_scales True"],
        ),
        "grid_block_scales": (
            {"block_scales": True, "shares": "grid", "stages": 5, "tile": [64, 16, 256]},
            ["clusters that share k must be up to 16, without block scales", "block_scales True", "omit both"],
        ),
        "grid_splits": (
            {"max_splits": 4, "shares": "grid"},
            ["clusters that share k must be up to 16", "max_splits is 4", "omit both"],
        ),
        "tile_m": (
            {"tile": [96, 64, 256]},
            ["tile m must be a multiple of 64 up to 256", "is 96", "change the tile"],
        ),
        "tile_k": (
            {"tile": [64, 64, 64]},
            ["tile k must be whole swizzle atoms of 128 bytes", "is 64 bytes", "change it"],
        ),
        "b_dtype": (
            {"b_dtype": "bf16"},
            [
                "b_dtype must be dtype's, or both fp8",
                "is \"bf16\" with \"e4m3\"",
                "change one of them",
            ],
        ),
        "max_splits": (
            {"max_splits": 4, "tile": [128, 64, 128], "warp_groups": 2},
            ["max_splits must be one of 1, 2 with 2 warp groups", "is 4", "choose one of them"],
        ),
        "unswapped_splits": (
            {"max_splits": 2, "swap_ab": False},
            ["max_splits must be one of 1 with 1 warp groups and swap_ab = False", "is 2"],
        ),
        "turns_of_one": (
            {"schedule": "pingpong"},
            ["pingpong must have two warp groups", "has 1", "omit schedule"],
        ),
        "slow_turns": (
            {
                "accumulation": "slow",
                "schedule": "pingpong",
                "stages": 4,
                "swap_ab": False,
                "tile": [128, 96, 128],
                "warp_groups": 2,
            },
            ["pingpong must have two warp groups, with fast accumulation", "with accumulation \"slow\"", "change them"],
        ),
        "turns_with_splits": (
            {"max_splits": 4, "schedule": "pingpong", "shares": "columns", "tile": [128, 64, 128], "warp_groups": 2},
            ["pingpong must have two warp groups", "max_splits 4", "omit schedule"],
        ),
        "turns_with_the_grid": (
            {"schedule": "pingpong", "shares": "grid", "tile": [128, 64, 128], "warp_groups": 2},
            ["pingpong must have two warp groups", "shares \"grid\"", "change them"],
        ),
        "scaled_turns": (
            {
                "block_scales": True,
                "schedule": "pingpong",
                "stages": 4,
                "swap_ab": False,
                "tile": [128, 96, 128],
                "warp_groups": 2,
            },
            ["pingpong must have two warp groups", "without block scales", "block_scales True"],
        ),
        "straight_turns_of_groups": (
            {
                "op": "grouped_mm",
                "schedule": "pingpong",
                "stages": 4,
                "swap_ab": False,
                "tile": [128, 160, 128],
                "warp_groups": 2,
            },
            ["at most 128 accumulators with pingpong in grouped_mm", "has 160", "swap operands"],
        ),
        "wide_turns": (
            {"schedule": "pingpong", "stages": 3, "tile": [128, 200, 128], "warp_groups": 2},
            ["at most 192 accumulators", "with schedule \"pingpong\"", "has 200", "shrink the tile"],
        ),
        "stages": (
            {"stages": 0},
            ["stages must be one of 1, 2, 3", "is 0"],
        ),
        "unknown_argument": (
            {"stage": 4},
            ["arguments must be among op, dtype", "one is stage", "correct it"],
        ),
        "missing_argument": (
            {"out": None},
            ["out must be given", "pass the dtype of the result"],
        ),
        "op": (
            {"op": "conv"},
            ["op must be one of grouped_mm, matmul, scaled_mm", "is \"conv\""],
        ),
        "multicast_splits": (
            {"cluster": [1, 2, 1]},
            ["blocks that load for each other must share columns", "shares is \"warps\"", "set shares"],
        ),
        "cluster_blocks": (
            {"cluster": [2, 2, 1], "shares": "columns", "stages": 6, "tile": [128, 128, 128], "warp_groups": 2},
            ["a cluster must have at most 8 blocks", "is [2, 2, 1] with 4 along k", "make it smaller"],
        ),
        "cluster_of_groups": (
            {
                "block_scales": True,
                "cluster": [2, 1, 1],
                "max_splits": 1,
                "op": "grouped_mm",
                "stages": 5,
                "swap_ab": False,
                "tile": [128, 128, 128],
                "warp_groups": 2,
            },
            ["a cluster of grouped_mm must have one block along m", "has 2 with swap_ab = False"],
        ),
        "cluster_of_swapped_groups": (
            {"cluster": [1, 2, 1], "max_splits": 1, "op": "grouped_mm", "stages": 5, "tile": [64, 16, 256]},
            ["a cluster of grouped_mm must have one block along m", "has 2 with swap_ab = True"],
        ),
        "cluster_of_one_warp_group": (
            {"block_scales": True, "cluster": [1, 2, 1], "max_splits": 1, "stages": 6, "tile": [64, 64, 128]},
            ["blocks of one warp group must not load for each other with block scales", "take two or three"],
        ),
        "splits_of_groups": (
            {"op": "grouped_mm", "max_splits": 4},
            ["blocks must not share the k of a tile of grouped_mm", "max_splits is 4", "omit both"],
        ),
    },
    "scaled_mm_block_config": {
        "a": (
            {"a": "bogus"},
            ["a must be one of e4m3, e5m2", "\"bogus\""],
        ),
        "cluster": (
            {"cluster": [9, 9, 9]},
            ["cluster must be (m, n, 1)", "[9, 9, 9]"],
        ),
        "out": (
            {"out": "nope"},
            ["out must be one of bf16, fp16, fp32", "\"nope\""],
        ),
        "tile_k": (
            {"tile": [64, 128, 64]},
            ["tile k must be 128", "is 64"],
        ),
        "whole_blocks": (
            {"tile": [64, 96, 128]},
            ["whole blocks of 128 along the caller's n", "has 96"],
        ),
        "accumulators": (
            {"schedule": "cooperative", "tile": [256, 128, 128]},
            ["at most 96 accumulators", "has 128"],
        ),
    },
    "scaled_mm_config": {
        "unknown_operand_dtype": (
            {"a": "fp4"},
            ["a must be one of e4m3, e5m2", "\"fp4\"", "pass the dtype of the left operand"],
        ),
        "unknown_out_dtype": (
            {"out": "fp64"},
            ["out must be one of bf16, fp16, fp32", "\"fp64\"", "pass the dtype of the result"],
        ),
        "unknown_schedule": (
            {"schedule": "stream"},
            ["schedule must be one of cooperative, pingpong, warpspecialized", "\"stream\""],
        ),
        "tile_of_two": (
            {"tile": [128, 128]},
            ["tile must be 3 positive integers", "[128, 128]", "(m, n, k)"],
        ),
        "negative_cluster": (
            {"cluster": [1, -1, 1]},
            ["cluster must be 3 positive integers", "[1, -1, 1]"],
        ),
        "swap_ab": (
            {"swap_ab": 1},
            ["swap_ab must be one of True, False", "is 1"],
        ),
        "tile_m": (
            {"schedule": "cooperative", "tile": [64, 128, 128]},
            ["tile m must be a multiple of 128", "\"cooperative\"", "is 64", "change the tile"],
        ),
        "tile_n": (
            {"tile": [128, 24, 128]},
            ["tile n must be a multiple of 16 up to 256", "is 24", "change the tile"],
        ),
        "tile_k": (
            {"tile": [128, 128, 96]},
            ["tile k must be 64, 128 or 256", "is 96", "change the tile"],
        ),
        "cluster_k": (
            {"cluster": [2, 1, 2]},
            ["cluster must be (m, n, 1)", "[2, 1, 2]", "change the cluster"],
        ),
        "large_cluster": (
            {"cluster": [4, 4, 1]},
            ["a cluster must have at most 8 blocks", "[4, 4, 1]", "make it smaller"],
        ),
        "accumulators": (
            {"tile": [128, 256, 128]},
            ["at most 192 accumulators", "with schedule \"pingpong\"", "has 256", "shrink the tile"],
        ),
        "slow_accumulators": (
            {"accumulation": "slow"},
            ["at most 96 accumulators", "has 128"],
        ),
    },
}
