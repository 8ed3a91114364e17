"""scaled_mm_block_config: a kernel of scaled_mm_block_sm90.cuh, with scales 1x128 of a and 128x128 of b.

    scaled_mm_block_config(
        a = "e4m3",
        b = "e4m3",
        out = "bf16",
        tile = (128, 128, 128),
        cluster = (1, 2, 1),
        schedule = "cooperative",
    )
"""

load(":config_checks.bzl", "config_function", "field", "one_of")
load(":tile_rules.bzl", "BUILDER_FIELDS", "builder_family", "builder_kernel", "builder_rules")

_FAMILY = builder_family(name = "scaled_mm_block_sm90", template = "ScaledMmBlock")

_FIELDS = {
    "a": field(one_of("e4m3", "e5m2"), "the dtype of the left operand"),
    "b": field(one_of("e4m3", "e5m2"), "the dtype of the right operand"),
    "out": field(one_of("bf16", "fp16", "fp32"), "the dtype of the result"),
} | BUILDER_FIELDS | {
    "schedule": field(
        one_of("cooperative", "pingpong"),
        "\"pingpong\" (two warp groups take turns, a tile each) or \"cooperative\" (they share a tile)",
    ),
}

# Elements of k, and columns of b, that share a block scale.
_SCALE_BLOCK = 128

# Of a block-scaled tile each element has two fp32 accumulators: what the tensor core sums within a
# block of k, and the sum of the blocks. 256x128 cooperative (128) spills.
_MAX_ACCUMULATORS_PER_THREAD = 96

def _rules(config):
    tile_along_n = config.tile[0] if config.swap_ab else config.tile[1]
    return builder_rules(config, _MAX_ACCUMULATORS_PER_THREAD) + [
        (
            config.tile[2] == _SCALE_BLOCK,
            "tile k must be {}, the elements of k that share a scale".format(_SCALE_BLOCK),
            "it is {}".format(config.tile[2]),
            "change the tile",
        ),
        (
            tile_along_n % _SCALE_BLOCK == 0 or _SCALE_BLOCK % tile_along_n == 0,
            "the tile must have whole blocks of {} along the caller's n, or divide one".format(_SCALE_BLOCK),
            "it has {}".format(tile_along_n),
            "change the tile",
        ),
    ]

def _kernel(config):
    return builder_kernel(
        _FAMILY,
        config,
        words = [config.a, config.b, config.out],
        op = "scaled_mm",
        a = config.a,
        b = config.b,
        out = config.out,
        json_fields = {"scales": "block", "sum_chunk": 128},
    )

scaled_mm_block_config = config_function("scaled_mm_block_config", _FIELDS, _rules, _kernel)
