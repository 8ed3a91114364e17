"""matmul_config, scaled_mm_config and scaled_mm_block_config: kernels that CUTLASS's builders make.

Each describes a kernel of the file of its name: matmul_sm90.cuh (bf16 or fp16 in any layout),
scaled_mm_sm90.cuh (fp8 with tensor or row scales) and scaled_mm_block_sm90.cuh (fp8 with scales 1x128
of a and 128x128 of b).
"""

load(":config_checks.bzl", "config_function", "field", "one_of", "positives")
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")
load(
    ":tile_rules.bzl",
    "MAX_ACCUMULATORS_PER_THREAD",
    "SCALE_BLOCK",
    "WARP_GROUPS_PER_TILE",
    "cluster_rules",
    "schedule_field",
    "swap_ab_field",
    "tile_rules",
)

# Accumulators of a thread if each has a second register: what the tensor core sums within 128 of k,
# and the sum of these. 128x128 pingpong and 256x128 cooperative (128 each) spill.
_MAX_DOUBLE_ACCUMULATORS = 96

def _fields(schedules):
    return {
        "tile": field(
            positives("m", "n", "k"),
            "(m, n, k), the elements of the tile that a block computes at a time",
        ),
        "cluster": field(positives("m", "n", "k"), "(m, n, 1), the blocks that share loads"),
        "schedule": schedule_field(*schedules),
        "swap_ab": swap_ab_field(False),
    }

_FP8_FIELDS = {
    "a": field(one_of("e4m3", "e5m2"), "the dtype of the left operand"),
    "b": field(one_of("e4m3", "e5m2"), "the dtype of the right operand"),
    "out": field(one_of("bf16", "fp16", "fp32"), "the dtype of the result"),
}

def _rules(config, max_accumulators = MAX_ACCUMULATORS_PER_THREAD):
    """Rules of every kernel of CUTLASS's builders."""
    schedule = config.schedule
    sharing = "schedule {}".format(repr(schedule))
    return (
        tile_rules(config.tile, WARP_GROUPS_PER_TILE[schedule], sharing, max_accumulators) +
        cluster_rules(config.cluster)
    )

def _family(name, template):
    """The family of <name>.cuh."""
    hdrs = ["config.h", "cutlass_kernel_sm90.cuh", name + ".cuh"]
    return kernel_family(
        name = name,
        template = template,
        device_hdrs = hdrs,
        host_hdrs = hdrs + ["cutlass_host_sm90.h", name + "_host.h"],
    )

def _kernel(family, config, words, variant = "", constants = {}, json_fields = {}, **kwargs):
    """One kernel; its id has `words` before the tile and `variant` after the schedule."""
    cluster, schedule = config.cluster, config.schedule
    swap = "swap" if config.swap_ab else ""
    return kernel_config(
        family = family,
        id = join(family.name, *(words + [config.tile, cluster, schedule, variant, swap])),
        tile = config.tile,
        swap_ab = config.swap_ab,
        constants = {"kClusterM": cluster[0], "kClusterN": cluster[1]} | constants | {"kSchedule": schedule},
        json_fields = {"cluster": cluster, "schedule": schedule} | json_fields,
        **kwargs
    )

_MATMUL = _family("matmul_sm90", "Matmul")

def _matmul_rules(config):
    return _rules(config) + [
        (
            config.out in [config.operand, "fp32"],
            "out must be the operands' dtype or fp32, but is {} of {}; choose one of them"
                .format(repr(config.out), repr(config.operand)),
        ),
        (
            config.tile[2] in [64, 128],
            "tile k must be 64 or 128 (whole swizzle atoms of 16 bits), but is {}; change the tile"
                .format(config.tile[2]),
        ),
    ]

def _matmul_kernel(config):
    return _kernel(
        _MATMUL,
        config,
        words = [config.operand, config.out, config.layout],
        op = "matmul",
        a = config.operand,
        b = config.operand,
        out = config.out,
        layout = config.layout,
        json_fields = {"layout": config.layout, "sum_chunk": 0},
    )

matmul_config = config_function(
    "matmul_config",
    {
        "operand": field(one_of("bf16", "fp16"), "the dtype of a and b"),
        "out": field(
            one_of("bf16", "fp16", "fp32"),
            "the dtype of the result, the operands' or \"fp32\"",
            default = lambda config: config.operand,
        ),
        "layout": field(
            one_of("nt", "nn", "tn", "tt"),
            "that of a and b, \"n\" for row-major and \"t\" for column-major; \"nt\" is a @ weight.t()",
        ),
    } | _fields(sorted(WARP_GROUPS_PER_TILE)),
    _matmul_rules,
    _matmul_kernel,
)

_SCALED_MM = _family("scaled_mm_sm90", "ScaledMm")

def _scaled_mm_rules(config):
    is_fast = config.accumulation == "fast"
    return _rules(config, MAX_ACCUMULATORS_PER_THREAD if is_fast else _MAX_DOUBLE_ACCUMULATORS) + [(
        config.tile[2] in [64, 128, 256],
        "tile k must be 64, 128 or 256 (whole swizzle atoms of fp8), but is {}; change the tile"
            .format(config.tile[2]),
    )]

def _scaled_mm_kernel(config):
    is_fast = config.accumulation == "fast"
    return _kernel(
        _SCALED_MM,
        config,
        words = [config.a, config.b, config.out],
        variant = "" if is_fast else "slow",
        op = "scaled_mm",
        a = config.a,
        b = config.b,
        out = config.out,
        constants = {"kFastAccumulation": is_fast},
        json_fields = {"accumulation": config.accumulation, "sum_chunk": 0 if is_fast else 128},
    )

scaled_mm_config = config_function(
    "scaled_mm_config",
    _FP8_FIELDS | {
        "accumulation": field(
            one_of("fast", "slow"),
            "\"fast\", by the tensor core alone, in some 14 bits, or \"slow\", for training, with a " +
            "second set of fp32 registers, to which each 128 of k are added",
            default = "fast",
        ),
    } | _fields(sorted(WARP_GROUPS_PER_TILE)),
    _scaled_mm_rules,
    _scaled_mm_kernel,
)

_SCALED_MM_BLOCK = _family("scaled_mm_block_sm90", "ScaledMmBlock")

def _scaled_mm_block_rules(config):
    along_n = config.tile[0] if config.swap_ab else config.tile[1]
    return _rules(config, _MAX_DOUBLE_ACCUMULATORS) + [
        (
            config.tile[2] == SCALE_BLOCK,
            "tile k must be {}, the elements of k that share a scale, but is {}; change the tile"
                .format(SCALE_BLOCK, config.tile[2]),
        ),
        (
            along_n % SCALE_BLOCK == 0 or SCALE_BLOCK % along_n == 0,
            ("the tile must have whole blocks of {} along the caller's n, or divide one, but has {}; " +
             "change the tile").format(SCALE_BLOCK, along_n),
        ),
    ]

def _scaled_mm_block_kernel(config):
    return _kernel(
        _SCALED_MM_BLOCK,
        config,
        words = [config.a, config.b, config.out],
        op = "scaled_mm",
        a = config.a,
        b = config.b,
        out = config.out,
        json_fields = {"scales": "block", "sum_chunk": 128},
    )

scaled_mm_block_config = config_function(
    "scaled_mm_block_config",
    _FP8_FIELDS | _fields(["cooperative", "pingpong"]),
    _scaled_mm_block_rules,
    _scaled_mm_block_kernel,
)
