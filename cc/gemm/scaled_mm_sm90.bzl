"""scaled_mm_config: a kernel of scaled_mm_sm90.cuh."""

load(
    ":config_checks.bzl",
    "MAX_ACCUMULATORS_PER_THREAD",
    "WARP_GROUPS_PER_TILE",
    "builder_rules",
    "check_config",
    "check_rules",
    "flag",
    "one_of",
    "positives",
)
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")

_FAMILY = kernel_family(
    name = "scaled_mm_sm90",
    template = "ScaledMm",
    device_hdrs = ["config.h", "cutlass_kernel_sm90.cuh", "scaled_mm_sm90.cuh"],
    host_hdrs = [
        "config.h",
        "cutlass_host_sm90.h",
        "cutlass_kernel_sm90.cuh",
        "make_kernel_entry.h",
        "scaled_mm_sm90.cuh",
        "scaled_mm_sm90_host.h",
    ],
)

# "fast" sums by the tensor core alone, in some 14 bits; "slow" with a second set of fp32 registers, to
# which each 128 of k are added.
_SCHEMA = {
    "a": one_of(["e4m3", "e5m2"]),
    "accumulation": one_of(["fast", "slow"]),
    "b": one_of(["e4m3", "e5m2"]),
    "cluster": positives(["m", "n", "k"]),
    "out": one_of(["bf16", "fp16", "fp32"]),
    "schedule": one_of(sorted(WARP_GROUPS_PER_TILE)),
    "swap_ab": flag,
    "tile": positives(["m", "n", "k"]),
}

# Where each has a second register. 128x128 pingpong and 256x128 cooperative (128 each) spill.
_MAX_SLOW_ACCUMULATORS_PER_THREAD = 96

def scaled_mm_config(a, b, out, tile, cluster, schedule, swap_ab = False, accumulation = "fast"):
    """Describes one scaled_mm kernel for sm_90a.

    Example:

        scaled_mm_config(
            a = "e4m3",
            b = "e4m3",
            out = "bf16",
            tile = (128, 128, 128),
            cluster = (2, 1, 1),
            schedule = "pingpong",
        )

    Args:
      a: dtype of the left operand, "e4m3" or "e5m2".
      b: dtype of the right operand, likewise.
      out: dtype of the result, "bf16", "fp16" or "fp32".
      tile: (m, n, k) elements of the tile a block computes at a time. With swap_ab it is the tile
        of the swapped problem: its m runs along the user's n.
      cluster: (m, n, 1) blocks that share loads.
      schedule: "pingpong" (two warp groups take turns, a tile each), "cooperative" (two warp groups
        share a tile) or "warpspecialized" (one warp group).
      swap_ab: compute the transposed product, for a small m.
      accumulation: "fast" or "slow", for training.

    Returns:
      A struct as kernel_config() gives it.
    """
    values = dict(
        a = a,
        accumulation = accumulation,
        b = b,
        cluster = cluster,
        out = out,
        schedule = schedule,
        swap_ab = swap_ab,
        tile = tile,
    )
    check_config("scaled_mm_config", _SCHEMA, values)
    is_fast = accumulation == "fast"
    max_accumulators = MAX_ACCUMULATORS_PER_THREAD if is_fast else _MAX_SLOW_ACCUMULATORS_PER_THREAD
    check_rules("scaled_mm_config", builder_rules(tile, cluster, schedule, max_accumulators) + [(
        tile[2] in [64, 128, 256],
        "tile k must be 64, 128 or 256: whole swizzle atoms of fp8",
        "it is {}".format(tile[2]),
        "change the tile",
    )])
    return kernel_config(
        family = _FAMILY,
        id = join(
            "scaled_mm_sm90",
            a,
            b,
            out,
            tile,
            cluster,
            schedule,
            "" if is_fast else "slow",
            "swap" if swap_ab else "",
        ),
        op = "scaled_mm",
        a = a,
        b = b,
        out = out,
        tile = tile,
        swap_ab = swap_ab,
        constants = {
            "kClusterM": cluster[0],
            "kClusterN": cluster[1],
            "kFastAccumulation": is_fast,
            "kSchedule": schedule,
        },
        json_fields = {"accumulation": accumulation, "cluster": cluster, "schedule": schedule},
    )
