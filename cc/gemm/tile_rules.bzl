"""What the configs of all families have in common: rules of a tile that wgmma computes, and fields."""

load(":config_checks.bzl", "field", "one_of")

# Schedule -> warp groups that share the accumulators of one tile (CUTLASS's kernel of that name:
# gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp). A warp group has 128 threads.
WARP_GROUPS_PER_TILE = {
    "cooperative": 2,
    "pingpong": 1,
    "warpspecialized": 1,
}

# fp32 accumulators that a thread may hold so that the 232 registers of a multiplying thread have room
# for the rest of the loop and the epilogue. 128x256 pingpong (256) spills.
MAX_ACCUMULATORS_PER_THREAD = 192

# Elements of k, and columns of b, that share a block scale.
SCALE_BLOCK = 128

def schedule_field(*schedules):
    """How warp groups share tiles: one of `schedules`."""
    return field(
        one_of(*schedules),
        "\"pingpong\" (two warp groups take turns, a tile each), \"cooperative\" (two warp groups " +
        "share a tile) or \"warpspecialized\" (one warp group)",
    )

def swap_ab_field(default):
    """Whether operands are swapped."""
    return field(
        one_of(True, False),
        "whether the transposed product d^T = b^T a^T is computed, for a small m: the tile is that of " +
        "the swapped problem, and its m runs along the caller's n",
        default = default,
    )

def tile_rules(tile, warp_groups, sharing, max_accumulators = MAX_ACCUMULATORS_PER_THREAD, n_step = 16):
    """Rules of m and n of a tile.

    Args:
      tile: (m, n, k).
      warp_groups: how many share its accumulators.
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
            ("tile m must be a multiple of {} up to 256 with {} (wgmma has 64 rows a warp group), but is " +
             "{}; change the tile, or how many warp groups share it").format(rows, sharing, tile[0]),
        ),
        (
            tile[1] % n_step == 0 and tile[1] <= 256,
            "tile n must be a multiple of {} up to 256, wgmma's widest, but is {}; change the tile"
                .format(n_step, tile[1]),
        ),
        (
            accumulators <= max_accumulators,
            ("a thread must hold at most {} accumulators with {} (tile m * tile n / threads), or it " +
             "spills, but has {}; shrink the tile, or change how many warp groups share it")
                .format(max_accumulators, sharing, accumulators),
        ),
    ]

def cluster_rules(cluster, splits = 1):
    """Rules of the blocks of a cluster.

    Args:
      cluster: (m, n, 1).
      splits: how many of each share k.

    Returns:
      A list of rules.
    """
    return [
        (
            cluster[2] == 1 and cluster[0] in [1, 2, 4] and cluster[1] in [1, 2, 4],
            "cluster must be (m, n, 1) with m and n of 1, 2 or 4, but is {}; change the cluster"
                .format(repr(cluster)),
        ),
        (
            cluster[0] * cluster[1] * splits <= 8,
            "a cluster must have at most 8 blocks, the portable size, but is {} with {} along k; make it smaller"
                .format(repr(cluster), splits),
        ),
    ]
