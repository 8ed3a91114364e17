"""Rules of a tile that wgmma computes, and what the families of CUTLASS's builders share."""

load(":config_checks.bzl", "field", "flag", "one_of", "positives")
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")

# Schedule of CUTLASS's builders -> warp groups that share the accumulators of one tile (CUTLASS's
# kernel of that name: gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp). A warp group has 128 threads.
WARP_GROUPS_PER_TILE = {
    "cooperative": 2,
    "pingpong": 1,
    "warpspecialized": 1,
}

# fp32 accumulators a thread may hold and leave room, in the 232 registers that CUTLASS gives a
# multiplying thread, for the rest of the loop and the epilogue. 128x256 pingpong (256) spills.
MAX_ACCUMULATORS_PER_THREAD = 192

SWAP_AB = field(
    flag,
    "whether the transposed product d^T = b^T a^T is computed, for a small m: the tile is that of the " +
    "swapped problem, and its m runs along the caller's n",
    default = False,
)

# Fields of every config of CUTLASS's builders.
BUILDER_FIELDS = {
    "tile": field(
        positives("m", "n", "k"),
        "(m, n, k), the elements of the tile that a block computes at a time",
    ),
    "cluster": field(positives("m", "n", "k"), "(m, n, 1), the blocks that share loads"),
    "schedule": field(
        one_of(*sorted(WARP_GROUPS_PER_TILE)),
        "\"pingpong\" (two warp groups take turns, a tile each), \"cooperative\" (two warp groups " +
        "share a tile) or \"warpspecialized\" (one warp group)",
    ),
    "swap_ab": SWAP_AB,
}

def tile_rules(tile, warp_groups, sharing, max_accumulators, n_step = 16):
    """Rules of m and n of a tile.

    Args:
      tile: (m, n) or (m, n, k).
      warp_groups: that share its accumulators.
      sharing: the argument that says so, in words.
      max_accumulators: that a thread may hold without spills.
      n_step: what n is a multiple of.

    Returns:
      A list of rules.
    """
    rows = 64 * warp_groups
    accumulators = tile[0] * tile[1] // (2 * rows)
    return [
        (
            tile[0] % rows == 0 and tile[0] <= 256,
            "tile m must be a multiple of {} up to 256 with {}: wgmma has 64 rows a warp group"
                .format(rows, sharing),
            "it is {}".format(tile[0]),
            "change the tile, or how many warp groups share it",
        ),
        (
            tile[1] % n_step == 0 and tile[1] <= 256,
            "tile n must be a multiple of {} up to 256, wgmma's widest".format(n_step),
            "it is {}".format(tile[1]),
            "change the tile",
        ),
        (
            accumulators <= max_accumulators,
            "a thread must hold at most {} accumulators with {} (tile m * tile n / threads), or it spills"
                .format(max_accumulators, sharing),
            "it is {}".format(accumulators),
            "shrink the tile, or change how many warp groups share it",
        ),
    ]

def builder_rules(config, max_accumulators = MAX_ACCUMULATORS_PER_THREAD):
    """Rules that every kernel of CUTLASS's builders has to keep.

    Args:
      config: with the values of BUILDER_FIELDS.
      max_accumulators: that a thread may hold without spills.

    Returns:
      A list of rules.
    """
    cluster = config.cluster
    return tile_rules(
        config.tile,
        WARP_GROUPS_PER_TILE[config.schedule],
        "schedule {}".format(repr(config.schedule)),
        max_accumulators,
    ) + [
        (
            cluster[2] == 1 and cluster[0] in [1, 2, 4] and cluster[1] in [1, 2, 4],
            "cluster must be (m, n, 1) with m and n of 1, 2 or 4",
            "it is {}".format(repr(cluster)),
            "change the cluster",
        ),
        (
            cluster[0] * cluster[1] <= 8,
            "a cluster must have at most 8 blocks, the portable size",
            "it is {}".format(repr(cluster)),
            "make it smaller",
        ),
    ]

def builder_family(name, template):
    """The family of <name>.cuh, a kernel of CUTLASS's builders."""
    hdrs = ["config.h", "cutlass_kernel_sm90.cuh", name + ".cuh"]
    return kernel_family(
        name = name,
        template = template,
        device_hdrs = hdrs,
        host_hdrs = hdrs + ["cutlass_host_sm90.h", "make_kernel_entry.h", name + "_host.h"],
    )

def builder_kernel(family, config, words, variant = "", constants = {}, json_fields = {}, **kwargs):
    """One kernel of CUTLASS's builders.

    Args:
      family: of builder_family().
      config: with the values of BUILDER_FIELDS.
      words: of the id, between the family's name and the tile.
      variant: a further word of the id.
      constants: further members of the config's struct.
      json_fields: further ones of the manifest.
      **kwargs: for kernel_config().

    Returns:
      A struct as kernel_config() gives it.
    """
    cluster, schedule = config.cluster, config.schedule
    return kernel_config(
        family = family,
        id = join(
            family.name,
            *(words + [config.tile, cluster, schedule, variant, "swap" if config.swap_ab else ""])
        ),
        tile = config.tile,
        swap_ab = config.swap_ab,
        constants = {"kClusterM": cluster[0], "kClusterN": cluster[1]} | constants | {"kSchedule": schedule},
        json_fields = {"cluster": cluster, "schedule": schedule} | json_fields,
        **kwargs
    )
