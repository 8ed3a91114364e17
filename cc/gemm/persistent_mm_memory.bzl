"""Shared memory of a block of persistent_mm_sm90.cuh, from its config: what PersistentMmShape has, in Starlark."""

load(":tile_rules.bzl", "SCALE_BLOCK")

OPERAND_BYTES = {"bf16": 2, "e4m3": 1, "e5m2": 1, "fp16": 2}
_OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# The columns of a tile that a block stores together where blocks share them.
_GROUP_COLUMNS = 16

# The width of an operand's chunks of k, one swizzle atom, and of a stored tile's boxes along n.
CHUNK_BYTES = 128

# What a box has of m.
_BOX_ROWS = 64

# kMaxSharedBytesSm90 of config.h.
MAX_SHARED_BYTES = 227 * 1024

# The table of groups: kMaxGroups of grouped_tiles.h, each with two ints.
_TABLE_BYTES = 1024 * 2 * 4

# What the warp that loads hands over of a tile of a group, for each stage.
_HANDED_OVER_BYTES = 16

def has_groups(config):
    """Whether the rows of a are in groups."""
    return config.op == "grouped_mm"

def groups_of_tile(config):
    """How many warp groups share a tile."""
    return 1 if config.schedule == "pingpong" else config.warp_groups

def promotes(config):
    """Whether the tensor core sums over 128 of k alone."""
    return config.block_scales or config.accumulation == "slow"

def _overlaps_sums(config):
    """Whether one warp group adds sums while another multiplies."""
    return promotes(config) and config.warp_groups > 1

def _has_vector_scales(config):
    is_straight_group = has_groups(config) and not config.swap_ab
    return (OPERAND_BYTES[config.dtype] == 1 or is_straight_group) and not config.block_scales

def _scales_of_chunk(config, tile_m, tile_n):
    """kChunkScales of persistent_mm_sm90.h."""
    if _overlaps_sums(config):
        return tile_m * (1 if SCALE_BLOCK % tile_n == 0 else 2)
    return tile_m + 4

def _ceil_div(numerator, denominator):
    return (numerator + denominator - 1) // denominator

def shared_bytes(config):
    """Shared memory as PersistentMmShape (persistent_mm_sm90.h) has it.

    Args:
      config: a struct of the fields.

    Returns:
      A struct: `block`, at least, with all scales and barriers; `stages_and_boxes`, the place that
      partial sums of columns may take.
    """
    rows, columns, k = config.tile
    tile_m, tile_n = (columns, rows) if config.swap_ab else (rows, columns)
    stages = config.stages * (rows + columns) * k * OPERAND_BYTES[config.dtype]
    of_tile = 2 * tile_n + tile_m if _has_vector_scales(config) else tile_n
    vectors = 2 * of_tile * 4 * (config.warp_groups if _overlaps_sums(config) or config.schedule == "pingpong" else 1)
    scales = 0
    if config.block_scales:
        scales = config.stages * k // SCALE_BLOCK * _scales_of_chunk(config, tile_m, tile_n) * 4
    barriers = (2 * config.stages + 1) * 8
    table = 0
    if has_groups(config):
        table = _TABLE_BYTES + (0 if config.schedule == "pingpong" else config.stages * _HANDED_OVER_BYTES)
    fixed = stages + vectors + scales + barriers + table

    # Boxes: a place for each, or as many as fit.
    out_bytes = _OUT_BYTES[config.out]
    box = _BOX_ROWS * CHUNK_BYTES
    box_columns = _BOX_ROWS if config.swap_ab else CHUNK_BYTES // out_bytes
    boxes = rows // (64 * groups_of_tile(config)) * _ceil_div(columns, box_columns)
    wanted = (boxes - 1) * box + box // box_columns * ((columns - 1) % box_columns + 1)
    least = 0 if config.swap_ab else min(box, wanted)
    space = (MAX_SHARED_BYTES - fixed) // config.warp_groups
    stores_registers = tile_m < _BOX_ROWS or (config.swap_ab and out_bytes == 4)
    held = 0 if stores_registers else wanted if wanted <= space else space // box * box
    partial = 0
    if config.shares == "warps":
        partial = rows * columns * 4 // config.max_splits * (config.max_splits - 1)
    return struct(
        block = fixed + max(partial, config.warp_groups * least),
        stages_and_boxes = stages + config.warp_groups * held,
    )

def splits_of(config):
    """How many blocks may share the k of a tile: CanSplit of persistent_mm_sm90.h.

    Args:
      config: a struct of the fields.

    Returns:
      The numbers, ascending.
    """
    if config.shares == "columns":
        place = shared_bytes(config).stages_and_boxes
        return [x for x in range(1, config.max_splits + 1) if column_bytes(config, x) <= place]
    if config.shares == "grid":
        return range(1, config.max_splits + 1)
    return [x for x in [1, 2, 4] if x <= config.max_splits]

def column_bytes(config, splits):
    """Bytes of a block's partial sums and of those that arrive, if `splits` blocks share the columns of a tile."""
    groups = _ceil_div(config.tile[1], _GROUP_COLUMNS)
    arriving = _ceil_div(groups, splits) * (splits - 1)
    return (groups + arriving) * _GROUP_COLUMNS * config.tile[0] * 4
