"""matmul_config: a kernel of matmul_sm90.cuh."""

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
    name = "matmul_sm90",
    template = "Matmul",
    device_hdrs = ["config.h", "cutlass_kernel_sm90.cuh", "matmul_sm90.cuh"],
    host_hdrs = [
        "config.h",
        "cutlass_host_sm90.h",
        "cutlass_kernel_sm90.cuh",
        "make_kernel_entry.h",
        "matmul_sm90.cuh",
        "matmul_sm90_host.h",
    ],
)

_SCHEMA = {
    "cluster": positives(["m", "n", "k"]),
    "layout": one_of(["nt", "nn", "tn", "tt"]),
    "operand": one_of(["bf16", "fp16"]),
    "out": one_of(["bf16", "fp16", "fp32"]),
    "schedule": one_of(sorted(WARP_GROUPS_PER_TILE)),
    "swap_ab": flag,
    "tile": positives(["m", "n", "k"]),
}

def matmul_config(operand, layout, tile, cluster, schedule, out = None, swap_ab = False):
    """Describes one matmul kernel for sm_90a.

    Example:

        matmul_config(
            operand = "bf16",
            layout = "nn",
            tile = (128, 256, 64),
            cluster = (2, 1, 1),
            schedule = "cooperative",
        )

    Args:
      operand: dtype of a and b, "bf16" or "fp16".
      layout: of a and b, "n" for row-major and "t" for column-major; "nt" is a @ weight.t().
      tile: (m, n, k) elements of the tile a block computes at a time. With swap_ab it is the tile
        of the swapped problem: its m runs along the caller's n.
      cluster: (m, n, 1) blocks that share loads.
      schedule: "pingpong" (two warp groups take turns, a tile each), "cooperative" (two warp groups
        share a tile) or "warpspecialized" (one warp group).
      out: dtype of the result, the operands' or "fp32"; None is the operands'.
      swap_ab: compute the transposed product, for a small m.

    Returns:
      A struct as kernel_config() gives it.
    """
    out = out or operand
    values = dict(
        cluster = cluster,
        layout = layout,
        operand = operand,
        out = out,
        schedule = schedule,
        swap_ab = swap_ab,
        tile = tile,
    )
    check_config("matmul_config", _SCHEMA, values)
    rules = [
        (
            out in [operand, "fp32"],
            "out must be the operands' dtype or fp32",
            "it is {} of {}".format(repr(out), repr(operand)),
            "choose one of them",
        ),
        (
            tile[2] in [64, 128],
            "tile k must be 64 or 128: whole swizzle atoms of 16 bits",
            "it is {}".format(tile[2]),
            "change the tile",
        ),
    ]
    check_rules(
        "matmul_config",
        builder_rules(tile, cluster, schedule, MAX_ACCUMULATORS_PER_THREAD) + rules,
    )
    return kernel_config(
        family = _FAMILY,
        id = join(
            "matmul_sm90",
            operand,
            out,
            layout,
            tile,
            cluster,
            schedule,
            "swap" if swap_ab else "",
        ),
        op = "matmul",
        a = operand,
        b = operand,
        out = out,
        tile = tile,
        swap_ab = swap_ab,
        a_is_m_major = layout[0] == "t",
        b_is_n_major = layout[1] == "n",
        constants = {"kClusterM": cluster[0], "kClusterN": cluster[1], "kSchedule": schedule},
        json_fields = {"cluster": cluster, "layout": layout, "schedule": schedule},
    )
