"""scaled_mm_config: a kernel of scaled_mm_sm90.cuh, fp8 with tensor or row scales.

    scaled_mm_config(
        a = "e4m3",
        b = "e4m3",
        out = "bf16",
        tile = (128, 128, 128),
        cluster = (2, 1, 1),
        schedule = "pingpong",
    )
"""

load(":config_checks.bzl", "config_function", "field", "one_of")
load(
    ":tile_rules.bzl",
    "BUILDER_FIELDS",
    "MAX_ACCUMULATORS_PER_THREAD",
    "builder_family",
    "builder_kernel",
    "builder_rules",
)

_FAMILY = builder_family(name = "scaled_mm_sm90", template = "ScaledMm")

_FIELDS = {
    "a": field(one_of("e4m3", "e5m2"), "the dtype of the left operand"),
    "b": field(one_of("e4m3", "e5m2"), "the dtype of the right operand"),
    "out": field(one_of("bf16", "fp16", "fp32"), "the dtype of the result"),
    "accumulation": field(
        one_of("fast", "slow"),
        "\"fast\", by the tensor core alone, in some 14 bits, or \"slow\", for training, with a second set " +
        "of fp32 registers, to which each 128 of k are added",
        default = "fast",
    ),
} | BUILDER_FIELDS

# Where each has a second register. 128x128 pingpong and 256x128 cooperative (128 each) spill.
_MAX_SLOW_ACCUMULATORS_PER_THREAD = 96

def _rules(config):
    is_fast = config.accumulation == "fast"
    max_accumulators = MAX_ACCUMULATORS_PER_THREAD if is_fast else _MAX_SLOW_ACCUMULATORS_PER_THREAD
    return builder_rules(config, max_accumulators) + [(
        config.tile[2] in [64, 128, 256],
        "tile k must be 64, 128 or 256: whole swizzle atoms of fp8",
        "it is {}".format(config.tile[2]),
        "change the tile",
    )]

def _kernel(config):
    is_fast = config.accumulation == "fast"
    return builder_kernel(
        _FAMILY,
        config,
        words = [config.a, config.b, config.out],
        variant = "" if is_fast else "slow",
        op = "scaled_mm",
        a = config.a,
        b = config.b,
        out = config.out,
        constants = {"kFastAccumulation": is_fast},
        json_fields = {
            "accumulation": config.accumulation,
            "sum_chunk": 128 if config.accumulation == "slow" else 0,
        },
    )

scaled_mm_config = config_function("scaled_mm_config", _FIELDS, _rules, _kernel)
