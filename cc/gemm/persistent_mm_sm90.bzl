"""persistent_mm_config: a kernel of persistent_mm_sm90.cuh.

Its blocks go from tile to tile, or some share the k of one.
"""

load(":config_checks.bzl", "config_function", "field", "one_of", "positives")
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")
load(
    ":persistent_mm_memory.bzl",
    "CHUNK_BYTES",
    "MAX_SHARED_BYTES",
    "OPERAND_BYTES",
    "column_bytes",
    "groups_of_tile",
    "has_groups",
    "promotes",
    "shared_bytes",
    "splits_of",
)
load(":tile_rules.bzl", "SCALE_BLOCK", "cluster_rules", "swap_ab_field", "tile_rules")

_SHARED_HDRS = ["config.h", "epilogue_sm90.h", "fast_divmod.h", "grouped_tiles.h", "persistent_mm_sm90.h"]

_DEVICE_HDRS = _SHARED_HDRS + [
    "persistent_mm_block_sm90.cuh",
    "persistent_mm_boxes_sm90.cuh",
    "persistent_mm_groups_sm90.cuh",
    "persistent_mm_load_sm90.cuh",
    "persistent_mm_overlapped_sum_sm90.cuh",
    "persistent_mm_partial_sums_sm90.cuh",
    "persistent_mm_sm90.cuh",
    "persistent_mm_registers_sm90.cuh",
    "persistent_mm_scales_sm90.cuh",
    "persistent_mm_store_sm90.cuh",
    "persistent_mm_sum_sm90.cuh",
    "persistent_mm_turns_sm90.cuh",
    "persistent_mm_vectors_sm90.cuh",
    "ptx_sm90.cuh",
    "ring_position_sm90.cuh",
    "transpose_sm90.cuh",
    "wgmma_sm90.cuh",
]

_HOST_HDRS = _SHARED_HDRS + [
    "epilogue_params.h",
    "operand_map.h",
    "persistent_mm_sm90_host.h",
]

# Gradients of weights, and sums that may be added to out, have no epilogue. Clusters that share k are for few tiles of a
# long k: what open kernels may take of the wheel is left to tiles that fused calls have more often. Pingpong leaves an
# epilogue of large tiles no registers, and with groups it has other code when it is open.
_OPEN, _CLOSED = [
    kernel_family(
        name = "persistent_mm_sm90",
        template = "PersistentMm",
        device_hdrs = _DEVICE_HDRS,
        host_hdrs = _HOST_HDRS,
        is_open = is_open,
    )
    for is_open in [True, False]
]

# Warp groups that share a tile -> fp32 accumulators that fit the registers of a thread (kConsumerRegisters).
# Measured with ptxas 13.0: bf16 with swapped operands reaches these. Others may spill with fewer, and then nvcc_wrapper
# refuses the kernel. With three warp groups 192x208 does not compile; with four a thread has too few registers for any.
_MAX_ACCUMULATORS = {1: 192, 2: 192, 3: 100}

# The same of open pingpong kernels: an epilogue also needs registers, and takes longer with fewer (open_kernels.md).
_MAX_OPEN_PINGPONG = 128

# The same of pingpong where tiles of groups have straight operands, and two ways to be stored.
_MAX_STRAIGHT_PINGPONG_GROUPS = 128

# Warp groups of a block -> blocks that may share the k of a tile. Each block stores the sums of whole
# warps or, with two warp groups, of a warp group.
_MAX_SPLITS = {1: 4, 2: 2, 3: 1}

# The same where clusters share it through global memory.
_MAX_GRID_SPLITS = 16

# The same where blocks share the columns: what it is by default, and what it may be.
_MAX_COLUMN_SPLITS = 4
_COLUMN_SPLITS = [4, 8]

# Warp groups of a block -> accumulators of a thread with block scales or slow accumulation: the sum over k, and
# the products of 64 rows with each block of a tile's k.
_MAX_PROMOTED_ACCUMULATORS = {1: 192, 2: 192, 3: 112}

# The columns of an operand in the smaller of two swizzle atoms, where they run fastest.
_CONTIGUOUS_COLUMNS = 32

def _max_splits(config):
    if has_groups(config) or config.schedule == "pingpong":
        return 1
    if config.shares == "grid":
        return _MAX_GRID_SPLITS
    if config.shares == "columns":
        return _MAX_COLUMN_SPLITS
    return _MAX_SPLITS.get(config.warp_groups, 1) if config.swap_ab else 1

_FIELDS = {
    "op": field(one_of("grouped_mm", "matmul", "scaled_mm"), "the op that it serves"),
    "dtype": field(one_of(*sorted(OPERAND_BYTES)), "the dtype of the left operand"),
    "b_dtype": field(
        one_of(*sorted(OPERAND_BYTES)),
        "the dtype of the right operand, with as many bytes",
        default = lambda config: config.dtype,
    ),
    "out": field(
        one_of("bf16", "fp16", "fp32"),
        "the dtype of the result; a result of fp32, of bf16 operands, may be added to out",
    ),
    "layout": field(
        one_of("nt", "nn", "tn"),
        "the layout of a and b, \"n\" for row-major and \"t\" for column-major, of bf16",
        default = "nt",
    ),
    "tile": field(
        positives("m", "n", "k"),
        "(m, n, k), the elements of the tile",
    ),
    "stages": field(
        one_of(*range(1, 17)),
        "how many tiles of both operands are in flight",
    ),
    "warp_groups": field(
        one_of(1, 2, 3),
        "how many warp groups multiply",
        default = 1,
    ),
    "schedule": field(
        one_of("cooperative", "pingpong"),
        "whether warp groups share each tile (\"cooperative\") or two take turns, a tile each (\"pingpong\")",
        default = "cooperative",
    ),
    "block_scales": field(
        one_of(True, False),
        "whether scales are 1x128 of a and 128x128 of b, of fp8",
        default = False,
    ),
    "swap_ab": swap_ab_field(True),
    "shares": field(
        one_of("columns", "grid", "warps"),
        "what each of the blocks that share the k of a tile stores of it: the sums of some warps; groups of columns, for " +
        "wide tiles, whose partial sums take the place of the stages; or \"grid\", all or nothing: the last to have its " +
        "sums finds those of the others in global memory, and consecutive clusters of the grid share",
        default = "warps",
    ),
    "cluster": field(
        positives("m", "n", "k"),
        "blocks along the tile's m and n that load for each other: of those along n each loads its part of the " +
        "left operand, of those along m of the right one",
        default = (1, 1, 1),
    ),
    "accumulation": field(
        one_of("fast", "slow"),
        "\"slow\" to sum in full fp32 beyond 128 of k, of fp8",
        default = "fast",
    ),
    "max_splits": field(
        one_of(1, 2, 4, 8, 16),
        "how many blocks may share the k of a tile: 1 where shared memory has no room for their partial " +
        "sums, by default what the warp groups allow, or 4 that share columns, of which 8 may be, or 16 of the grid",
        default = _max_splits,
    ),
}

def _rules(config):
    dtype, b_dtype, tile, warp_groups = config.dtype, config.b_dtype, config.tile, groups_of_tile(config)
    sharing = "schedule \"pingpong\"" if config.schedule == "pingpong" else "{} warp groups".format(warp_groups)
    k_bytes = tile[2] * OPERAND_BYTES[dtype]
    n_step = 8 if config.swap_ab else 16
    rules = tile_rules(tile, warp_groups, sharing, _MAX_ACCUMULATORS[warp_groups], n_step) + [
        (
            b_dtype == dtype or (OPERAND_BYTES[dtype] == 1 and OPERAND_BYTES[b_dtype] == 1),
            "b_dtype must be dtype's, or both fp8, but is {} with {}; change one of them"
                .format(repr(b_dtype), repr(dtype)),
        ),
        (
            k_bytes % CHUNK_BYTES == 0,
            "tile k must be whole swizzle atoms of {} bytes, but is {} bytes; change it"
                .format(CHUNK_BYTES, k_bytes),
        ),
    ]
    if config.schedule == "pingpong":
        rules += _pingpong_rules(config)
    if has_groups(config):
        rules.append((
            config.max_splits == 1 and config.shares == "warps",
            "blocks must not share the k of a tile of grouped_mm, but max_splits is {} and shares {}; omit both"
                .format(config.max_splits, repr(config.shares)),
        ))
    elif config.shares == "columns":
        rules += _column_rules(config)
    elif config.shares == "grid":
        rules += _grid_rules(config)
    else:
        splits = [1, _MAX_SPLITS[config.warp_groups]] if config.swap_ab else [1]
        rules.append((
            config.max_splits in splits,
            "max_splits must be one of {} with {} and swap_ab = {}, but is {}; choose one of them"
                .format(", ".join([str(x) for x in splits]), sharing, config.swap_ab, config.max_splits),
        ))
    if config.layout != "nt":
        rules += _layout_rules(config)
    if config.out == "fp32":
        rules += _fp32_rules(config)
    if config.block_scales:
        rules += _block_scale_rules(config)
    if promotes(config):
        rules += _promoting_rules(config)
    rules += _cluster_rules(config)
    shared = shared_bytes(config)
    rules.append((
        shared.block <= MAX_SHARED_BYTES,
        ("a block must have at most {} bytes of shared memory, but {} stages and the rest take " +
         "{}; take fewer stages, or shrink the tile").format(MAX_SHARED_BYTES, config.stages, shared.block),
    ))
    return rules

def _pingpong_rules(config):
    accumulators = config.tile[0] * config.tile[1] // 128
    return [
        (
            config.warp_groups == 2 and config.max_splits == 1 and config.shares == "warps" and not promotes(config),
            ("pingpong must have two warp groups, with fast accumulation and without block scales or shared k, but " +
             "has {}, with accumulation {}, block_scales {}, shares {} and max_splits {}; change them, or omit schedule")
                .format(
                config.warp_groups,
                repr(config.accumulation),
                config.block_scales,
                repr(config.shares),
                config.max_splits,
            ),
        ),
        (
            not has_groups(config) or config.swap_ab or accumulators <= _MAX_STRAIGHT_PINGPONG_GROUPS,
            ("a thread must hold at most {} accumulators with pingpong in grouped_mm without swapped operands, but has " +
             "{}; shrink the tile, or swap operands").format(_MAX_STRAIGHT_PINGPONG_GROUPS, accumulators),
        ),
    ]

def _blocks(config):
    """The blocks of a cluster along m and n of the result."""
    along_rows, along_columns, _ = config.cluster
    return (along_columns, along_rows) if config.swap_ab else (along_rows, along_columns)

def _cluster_rules(config):
    along_m, along_n = _blocks(config)
    is_one_block = along_m * along_n == 1
    return cluster_rules(config.cluster, 1 if config.shares == "grid" else config.max_splits) + [
        (
            is_one_block or config.max_splits == 1 or config.shares != "warps",
            ("blocks that load for each other must share columns or the grid if they share k as well, but shares is {} " +
             "and max_splits {}; set shares = \"columns\" or \"grid\", or max_splits = 1")
                .format(repr(config.shares), config.max_splits),
        ),
        (
            is_one_block or not config.block_scales or config.warp_groups > 1,
            ("blocks of one warp group must not load for each other with block scales, but cluster is {}; omit it, or " +
             "take two or three warp groups").format(config.cluster),
        ),
        (
            along_m == 1 or not has_groups(config),
            ("a cluster of grouped_mm must have one block along m, whose tiles have each their own group, but has {} " +
             "with swap_ab = {}; change the cluster").format(along_m, config.swap_ab),
        ),
    ]

def _columns_are_contiguous(config):
    """Whether the tile's columns run fastest: of a with swapped operands, else of b."""
    return config.layout[0] == "t" if config.swap_ab else config.layout[1] == "n"

def _layout_rules(config):
    columns = config.tile[1]
    return [
        (
            config.dtype == "bf16" and config.op == "matmul",
            "layout must be \"nt\" except for matmul of bf16, but is {} for {} of {}; omit it"
                .format(repr(config.layout), config.op, config.dtype),
        ),
        (
            columns % _CONTIGUOUS_COLUMNS == 0 or not _columns_are_contiguous(config),
            ("tile n must be a multiple of {} where it runs fastest in memory, but is {} with layout {} and swap_ab = {}; " +
             "change the tile")
                .format(_CONTIGUOUS_COLUMNS, columns, repr(config.layout), config.swap_ab),
        ),
    ]

def _fp32_rules(config):
    return [
        (
            config.dtype == "bf16" and config.op == "matmul",
            "out must have 16 bits except for matmul of bf16, but is fp32 for {} of {}; change it"
                .format(config.op, config.dtype),
        ),
        (
            config.tile[1] % (16 if config.swap_ab else 32) == 0,
            "a tile of fp32 must have n in multiples of 32, or 16 with swapped operands, but has n = {} with swap_ab = {}; change them"
                .format(config.tile[1], config.swap_ab),
        ),
    ]

def _column_rules(config):
    needed = column_bytes(config, config.max_splits)
    place = shared_bytes(config).stages_and_boxes
    return [
        (
            config.max_splits in _COLUMN_SPLITS and not promotes(config),
            ("blocks that share columns must be up to {}, without block scales, but max_splits is {} and " +
             "block_scales {}; omit both, or share warps")
                .format(" or ".join([str(x) for x in _COLUMN_SPLITS]), config.max_splits, config.block_scales),
        ),
        (
            needed <= place,
            ("the stages and boxes must have place for the partial sums of the columns, {} bytes, but have " +
             "{}; add stages, shrink the tile, or do not share columns").format(needed, place),
        ),
    ]

def _grid_rules(config):
    return [
        (
            config.max_splits == _MAX_GRID_SPLITS and not config.block_scales,
            ("clusters that share k must be up to {}, without block scales, but max_splits is {} and block_scales {}; " +
             "omit both").format(_MAX_GRID_SPLITS, config.max_splits, config.block_scales),
        ),
    ]

def _block_scale_rules(config):
    tile = config.tile

    # Tiles begin at multiples of their n.
    alignment = [x for x in [128, 64, 32, 16, 8] if tile[1] % x == 0][0]
    return [
        (
            config.swap_ab == (config.warp_groups == 1),
            ("operands with block scales must be swapped with one warp group, and not with two or three, but " +
             "swap_ab is {} with {} warp groups; change one of them").format(config.swap_ab, config.warp_groups),
        ),
        (
            not config.swap_ab or tile[1] * tile[2] // SCALE_BLOCK % 32 == 0,
            ("tile n must be a multiple of 32 with block scales and one block of {} in tile k, so that each " +
             "lane of a warp copies as many, but is {}; widen the tile, or double its k")
                .format(SCALE_BLOCK, tile[1]),
        ),
        (
            config.swap_ab or tile[1] - alignment <= SCALE_BLOCK,
            ("a tile must have at most two scales of b, one for {} columns, but tile n is {}; take at most {}, or " +
             "144, 160 or 192").format(SCALE_BLOCK, tile[1], SCALE_BLOCK),
        ),
    ]

def _promoting_rules(config):
    dtype, tile, warp_groups = config.dtype, config.tile, config.warp_groups
    blocks = tile[2] // SCALE_BLOCK
    accumulators = tile[1] // 2 * (tile[0] // (64 * warp_groups) + blocks)
    most = _MAX_PROMOTED_ACCUMULATORS[warp_groups]
    return [
        (
            OPERAND_BYTES[dtype] == 1,
            "block scales and slow accumulation must be of fp8, but dtype is {}; change it".format(repr(dtype)),
        ),
        (
            config.block_scales or (warp_groups > 1 and not config.swap_ab),
            ("slow accumulation must have two or three warp groups and operands that are not swapped, but has {} " +
             "with swap_ab = {}; change them").format(warp_groups, config.swap_ab),
        ),
        (
            tile[2] % SCALE_BLOCK == 0 and blocks in ([1, 2, 4] if warp_groups == 1 else [1]),
            ("tile k must be one, two or four blocks of {} with block scales and one warp group, and one block " +
             "with more or slow accumulation, but is {} with {}; change it")
                .format(SCALE_BLOCK, tile[2], warp_groups),
        ),
        (
            accumulators <= most,
            ("a thread must hold at most {} accumulators with block scales or slow accumulation and {} warp " +
             "groups, but has {}; shrink the tile").format(most, warp_groups, accumulators),
        ),
    ]

def _shared_part(config):
    """The part of an id that names what is shared: of columns by how many blocks, if by more than usual."""
    if config.shares == "grid":
        return "grid"
    if config.shares != "columns":
        return ""
    return "columns" if config.max_splits == _MAX_COLUMN_SPLITS else "columns{}".format(config.max_splits)

def _is_open(config):
    if config.out == "fp32" or config.layout == "tn" or config.shares == "grid":
        return False
    return config.schedule != "pingpong" or (
        not has_groups(config) and config.tile[0] * config.tile[1] <= 128 * _MAX_OPEN_PINGPONG
    )

def _kernel(config):
    along_m, along_n = _blocks(config)
    schedule = "splitk" if config.max_splits > 1 else "persistent"
    json_fields = {
        "accumulation": config.accumulation,
        "cluster": config.cluster,
        "layout": config.layout,
        "schedule": schedule,
        "splits": splits_of(config),
        "stages": config.stages,
        "sum_chunk": SCALE_BLOCK if promotes(config) else 0,
        "warp_groups": config.warp_groups,
    }
    if config.block_scales:
        json_fields["scales"] = "block"
    if config.schedule == "pingpong":
        json_fields["pingpong"] = True
    if config.shares != "warps":
        json_fields["shares"] = config.shares
    return kernel_config(
        family = _OPEN if _is_open(config) else _CLOSED,
        id = join(
            config.op,
            "block" if config.block_scales else "",
            "sm90",
            config.dtype,
            config.b_dtype,
            config.out,
            config.layout if config.layout != "nt" else "",
            config.tile,
            config.cluster,
            "{}{}x{}".format(
                "pingpong" if config.schedule == "pingpong" else schedule,
                config.warp_groups,
                config.stages,
            ),
            "swap" if config.swap_ab else "",
            _shared_part(config),
            "slow" if config.accumulation == "slow" else "",
        ),
        op = config.op,
        a = config.dtype,
        b = config.b_dtype,
        out = config.out,
        tile = config.tile,
        swap_ab = config.swap_ab,
        layout = config.layout,
        constants = {
            "kBlockScales": config.block_scales,
            "kBlocksAlongM": along_m,
            "kBlocksAlongN": along_n,
            "kGroups": has_groups(config),
            "kMaxSplits": config.max_splits,
            "kPromotes": promotes(config),
            "kSchedule": config.schedule,
            "kSharesColumns": config.shares == "columns",
            "kSharesGrid": config.shares == "grid",
            "kStages": config.stages,
            "kWarpGroups": config.warp_groups,
        },
        uses_cute = False,
        json_fields = json_fields,
    )

persistent_mm_config = config_function("persistent_mm_config", _FIELDS, _rules, _kernel)
