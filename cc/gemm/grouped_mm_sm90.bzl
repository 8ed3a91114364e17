"""grouped_mm_config: a kernel of grouped_mm_sm90.cuh, groups of rows with a matrix each."""

load(":config_checks.bzl", "config_function", "field", "one_of", "positives")
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")
load(":tile_rules.bzl", "WARP_GROUPS_PER_TILE", "schedule_field", "swap_ab_field", "tile_rules")

_SHARED_HDRS = ["config.h", "epilogue_sm90.h", "grouped_mm_sm90.h", "grouped_tiles.h"]

_FAMILY = kernel_family(
    name = "grouped_mm_sm90",
    template = "GroupedMm",
    device_hdrs = _SHARED_HDRS + [
        "grouped_mm_sm90.cuh",
        "ptx_sm90.cuh",
        "ring_position_sm90.cuh",
        "transpose_sm90.cuh",
        "wgmma_sm90.cuh",
    ],
    host_hdrs = _SHARED_HDRS + [
        "grouped_mm_sm90_host.h",
        "epilogue_params.h",
        "operand_map.h",
    ],
    is_open = True,
)

_K_BYTES = 128
_OPERAND_BYTES = {"bf16": 2, "e4m3": 1, "fp16": 2}

_FIELDS = {
    "operand": field(
        one_of(*sorted(_OPERAND_BYTES)),
        "the dtype of both operands; \"e4m3\" has a scale per row",
    ),
    "out": field(one_of("bf16", "fp16"), "the dtype of the result"),
    "tile": field(
        positives("m", "n"),
        "(m, n), the elements of the output tile; along k it has {} bytes".format(_K_BYTES),
    ),
    "schedule": schedule_field("cooperative", "pingpong"),
    "swap_ab": swap_ab_field(False),
}

def _rules(config):
    return tile_rules(
        config.tile,
        WARP_GROUPS_PER_TILE[config.schedule],
        "schedule {}".format(repr(config.schedule)),
        n_step = 16 if config.swap_ab else 32,
    )

def _kernel(config):
    operand, schedule = config.operand, config.schedule
    tile = (config.tile[0], config.tile[1], _K_BYTES // _OPERAND_BYTES[operand])
    swap = "swap" if config.swap_ab else ""
    return kernel_config(
        family = _FAMILY,
        id = join("grouped_mm_sm90", operand, config.out, tile, schedule, swap),
        op = "grouped_mm",
        a = operand,
        b = operand,
        out = config.out,
        tile = tile,
        swap_ab = config.swap_ab,
        constants = {"kSchedule": schedule},
        uses_cute = False,
        json_fields = {"layout": "nt", "schedule": schedule, "sum_chunk": 0},
    )

grouped_mm_config = config_function("grouped_mm_config", _FIELDS, _rules, _kernel)
