"""grouped_mm_config: a kernel of grouped_mm_sm90.cuh."""

load(
    ":config_checks.bzl",
    "MAX_ACCUMULATORS_PER_THREAD",
    "WARP_GROUPS_PER_TILE",
    "check_config",
    "check_rules",
    "flag",
    "one_of",
    "positives",
)
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")

_SHARED_HDRS = ["config.h", "grouped_mm_sm90.h", "grouped_tiles.h"]

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
        "make_kernel_entry.h",
        "tensor_map_type.h",
    ],
)

_OPERAND_BYTES = {"bf16": 2, "e4m3": 1, "fp16": 2}

_SCHEMA = {
    "operand": one_of(sorted(_OPERAND_BYTES)),
    "out": one_of(["bf16", "fp16"]),
    "schedule": one_of(["cooperative", "pingpong"]),
    "swap_ab": flag,
    "tile": positives(["m", "n"]),
}

def grouped_mm_config(operand, out, tile, schedule, swap_ab = False):
    """Describes one grouped_mm kernel for sm_90a.

    Example:

        grouped_mm_config(
            operand = "bf16",
            out = "bf16",
            tile = (128, 128),
            schedule = "pingpong",
        )

    Args:
      operand: dtype of both operands, "e4m3" (with a scale per row), "bf16" or "fp16".
      out: dtype of the result, "bf16" or "fp16".
      tile: (m, n) elements of the output tile. With swap_ab it is the tile of the swapped problem:
        its m runs along the user's n. Along k it has 128 bytes.
      schedule: "pingpong" (two warp groups take turns, a tile each) or "cooperative" (they share).
      swap_ab: compute the transposed product, for few rows a group.

    Returns:
      A struct as kernel_config() gives it.
    """
    function = "grouped_mm_config"
    values = dict(operand = operand, out = out, schedule = schedule, swap_ab = swap_ab, tile = tile)
    check_config(function, _SCHEMA, values)
    rows = 64 * WARP_GROUPS_PER_TILE[schedule]
    columns = 16 if swap_ab else 32
    accumulators = tile[0] * tile[1] // (2 * rows)
    check_rules(function, [
        (
            tile[0] % rows == 0 and tile[0] <= 256,
            "tile m must be a multiple of {} up to 256 with schedule {}".format(rows, schedule),
            "it is {}".format(tile[0]),
            "change the tile or the schedule",
        ),
        (
            tile[1] % columns == 0 and tile[1] <= 256,
            "tile n must be a multiple of {} up to 256".format(columns),
            "it is {}".format(tile[1]),
            "change the tile",
        ),
        (
            accumulators <= MAX_ACCUMULATORS_PER_THREAD,
            "a thread must hold at most {} accumulators (tile m * tile n / threads), or it spills"
                .format(MAX_ACCUMULATORS_PER_THREAD),
            "it is {}".format(accumulators),
            "shrink the tile, or use schedule \"cooperative\"",
        ),
    ])
    tile = (tile[0], tile[1], 128 // _OPERAND_BYTES[operand])
    return kernel_config(
        family = _FAMILY,
        id = join("grouped_mm_sm90", operand, out, tile, schedule, "swap" if swap_ab else ""),
        op = "grouped_mm",
        a = operand,
        b = operand,
        out = out,
        tile = tile,
        swap_ab = swap_ab,
        constants = {"kSchedule": schedule},
        uses_cute = False,
        json_fields = {"layout": "nt", "schedule": schedule},
    )
