"""Checks of a kernel's config: each argument by itself, then rules between them.

A check is a function of a value that returns None, or what is wrong with it as (rule, found, remedy),
where the rule goes on from the argument's name.
"""

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

def refuse(function, rule, found, remedy):
    """Fails: rule, value, remedy, after the function that was called."""
    fail("{}: {}, but {}; {}".format(function, rule, found, remedy))

def one_of(values):
    """A check: one of `values`."""

    def check(value):
        if value in values:
            return None
        return (
            "must be one of " + ", ".join([str(x) for x in values]),
            "it is {}".format(repr(value)),
            "choose one of them",
        )

    return check

def flag(value):
    """A check: True or False."""
    if type(value) == "bool":
        return None
    return ("must be True or False", "it is {}".format(repr(value)), "write one of them")

def positive(value):
    """A check: a positive integer."""
    if type(value) == "int" and value > 0:
        return None
    return ("must be a positive integer", "it is {}".format(repr(value)), "write one")

def positives(words):
    """A check: as many positive integers as `words`."""

    def check(value):
        if type(value) in ["list", "tuple"] and len(value) == len(words) and \
           not [x for x in value if positive(x) != None]:
            return None
        return (
            "must be {} positive integers".format({2: "two", 3: "three"}[len(words)]),
            "it is {}".format(repr(value)),
            "write it as ({})".format(", ".join(words)),
        )

    return check

def check_config(function, schema, values):
    """Fails where a value breaks the check of its name.

    Args:
      function: the function that the error names.
      schema: dict of name to check.
      values: dict of the same names to values.
    """
    for name, check in schema.items():
        wrong = check(values[name])
        if wrong:
            rule, found, remedy = wrong
            refuse(function, "{} {}".format(name, rule), found, remedy)

def check_rules(function, rules):
    """Fails at the first rule that does not hold.

    Args:
      function: the function that the error names.
      rules: list of (whether it holds, rule, what was found, remedy).
    """
    for holds, rule, found, remedy in rules:
        if not holds:
            refuse(function, rule, found, remedy)

def builder_rules(tile, cluster, schedule, max_accumulators):
    """Rules that every kernel of CUTLASS's builders has to keep.

    Args:
      tile: (m, n, k).
      cluster: (m, n, k).
      schedule: of WARP_GROUPS_PER_TILE.
      max_accumulators: that a thread may hold without spills.

    Returns:
      A list for check_rules().
    """
    rows = 64 * WARP_GROUPS_PER_TILE[schedule]
    accumulators = tile[0] * tile[1] // (2 * rows)
    return [
        (
            tile[0] % rows == 0 and tile[0] <= 256,
            "tile m must be a multiple of {} up to 256 with schedule {}: wgmma has 64 rows a warp group"
                .format(rows, repr(schedule)),
            "it is {}".format(tile[0]),
            "change the tile or the schedule",
        ),
        (
            tile[1] % 16 == 0 and tile[1] <= 256,
            "tile n must be a multiple of 16 up to 256, wgmma's widest",
            "it is {}".format(tile[1]),
            "change the tile",
        ),
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
        (
            accumulators <= max_accumulators,
            "a thread must hold at most {} accumulators (tile m * tile n / threads), or it spills"
                .format(max_accumulators),
            "it is {}".format(accumulators),
            "shrink the tile, or use schedule \"cooperative\"",
        ),
    ]
