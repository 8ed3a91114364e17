"""scaled_mm_block_config: a kernel of scaled_mm_block_sm90.cuh."""

load(
    ":config_checks.bzl",
    "builder_rules",
    "check_config",
    "check_rules",
    "flag",
    "one_of",
    "positives",
)
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")

_FAMILY = kernel_family(
    name = "scaled_mm_block_sm90",
    template = "ScaledMmBlock",
    device_hdrs = ["config.h", "cutlass_kernel_sm90.cuh", "scaled_mm_block_sm90.cuh"],
    host_hdrs = [
        "config.h",
        "cutlass_host_sm90.h",
        "cutlass_kernel_sm90.cuh",
        "make_kernel_entry.h",
        "scaled_mm_block_sm90.cuh",
        "scaled_mm_block_sm90_host.h",
    ],
)

_SCHEMA = {
    "a": one_of(["e4m3", "e5m2"]),
    "b": one_of(["e4m3", "e5m2"]),
    "cluster": positives(["m", "n", "k"]),
    "out": one_of(["bf16", "fp16", "fp32"]),
    "schedule": one_of(["cooperative", "pingpong"]),
    "swap_ab": flag,
    "tile": positives(["m", "n", "k"]),
}

# Elements of k, and columns of b, that share a block scale.
_SCALE_BLOCK = 128

# Of a block-scaled tile each element has two fp32 accumulators: what the tensor core sums within a
# block of k, and the sum of the blocks. 256x128 cooperative (128) spills.
_MAX_ACCUMULATORS_PER_THREAD = 96

def scaled_mm_block_config(a, b, out, tile, cluster, schedule, swap_ab = False):
    """Describes one scaled_mm kernel with scales 1x128 of a and 128x128 of b for sm_90a.

    Example:

        scaled_mm_block_config(
            a = "e4m3",
            b = "e4m3",
            out = "bf16",
            tile = (128, 128, 128),
            cluster = (1, 2, 1),
            schedule = "cooperative",
        )

    Args:
      a: dtype of the left operand, "e4m3" or "e5m2".
      b: dtype of the right operand, likewise.
      out: dtype of the result, "bf16", "fp16" or "fp32".
      tile: (m, n, 128) elements of the tile a block computes at a time. With swap_ab it is the tile
        of the swapped problem: its m runs along the user's n.
      cluster: (m, n, 1) blocks that share loads.
      schedule: "pingpong" (two warp groups take turns, a tile each) or "cooperative" (two warp
        groups share a tile).
      swap_ab: compute the transposed product, for a small m.

    Returns:
      A struct as kernel_config() gives it.
    """
    values = dict(
        a = a,
        b = b,
        cluster = cluster,
        out = out,
        schedule = schedule,
        swap_ab = swap_ab,
        tile = tile,
    )
    check_config("scaled_mm_block_config", _SCHEMA, values)
    tile_along_n = tile[0] if swap_ab else tile[1]
    rules = [
        (
            tile[2] == _SCALE_BLOCK,
            "tile k must be {}, the elements of k that share a scale".format(_SCALE_BLOCK),
            "it is {}".format(tile[2]),
            "change the tile",
        ),
        (
            tile_along_n % _SCALE_BLOCK == 0 or _SCALE_BLOCK % tile_along_n == 0,
            "the tile must have whole blocks of {} along the user's n, or divide one"
                .format(_SCALE_BLOCK),
            "it has {}".format(tile_along_n),
            "change the tile",
        ),
    ]
    check_rules(
        "scaled_mm_block_config",
        builder_rules(tile, cluster, schedule, _MAX_ACCUMULATORS_PER_THREAD) + rules,
    )
    return kernel_config(
        family = _FAMILY,
        id = join(
            "scaled_mm_block_sm90",
            a,
            b,
            out,
            tile,
            cluster,
            schedule,
            "swap" if swap_ab else "",
        ),
        op = "scaled_mm",
        a = a,
        b = b,
        out = out,
        tile = tile,
        swap_ab = swap_ab,
        constants = {"kClusterM": cluster[0], "kClusterN": cluster[1], "kSchedule": schedule},
        json_fields = {"cluster": cluster, "scales": "block", "schedule": schedule},
    )
