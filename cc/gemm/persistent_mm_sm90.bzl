"""persistent_mm_config: a kernel of persistent_mm_sm90.cuh."""

load(":config_checks.bzl", "check_config", "check_rules", "flag", "one_of", "positive", "positives")
load(":kernel_config.bzl", "join", "kernel_config", "kernel_family")

_SHARED_HDRS = ["config.h", "fast_divmod.h", "persistent_mm_sm90.h"]

_FAMILY = kernel_family(
    name = "persistent_mm_sm90",
    template = "PersistentMm",
    device_hdrs = _SHARED_HDRS + [
        "persistent_mm_block_sm90.cuh",
        "persistent_mm_load_sm90.cuh",
        "persistent_mm_sm90.cuh",
        "persistent_mm_store_sm90.cuh",
        "ptx_sm90.cuh",
        "ring_position_sm90.cuh",
        "transpose_sm90.cuh",
        "wgmma_sm90.cuh",
    ],
    host_hdrs = _SHARED_HDRS + [
        "make_kernel_entry.h",
        "persistent_mm_sm90_host.h",
        "tensor_map_type.h",
    ],
)

_OPERAND_BYTES = {"bf16": 2, "e4m3": 1, "e5m2": 1, "fp16": 2}

_SCHEMA = {
    "b_dtype": one_of(sorted(_OPERAND_BYTES)),
    "block_scales": flag,
    "dtype": one_of(sorted(_OPERAND_BYTES)),
    "max_splits": one_of([1, 2, 4]),
    "op": one_of(["matmul", "scaled_mm"]),
    "out": one_of(["bf16", "fp16"]),
    "stages": positive,
    "swap_ab": flag,
    "tile": positives(["m", "n", "k"]),
    "warp_groups": one_of([1, 2, 3]),
}

# Warp groups of a block -> fp32 accumulators that a thread may hold and leave room in its registers
# (kConsumerRegisters). Of four warp groups a thread has too few for any.
_MAX_ACCUMULATORS = {1: 192, 2: 192, 3: 112}

# Warp groups of a block -> blocks that may share the k of a tile: each stores the sums of whole warps,
# or of a warp group where there are two.
_MAX_SPLITS = {1: 4, 2: 2, 3: 1}

# Elements of k, and columns of b, that share a block scale.
_SCALE_BLOCK = 128

# The sum over k, and one of each block of a tile's k.
_MAX_BLOCK_ACCUMULATORS = 192

# What the chunks of k of an operand and the boxes of a stored tile are wide: a swizzle atom, and as
# many elements of 16 bits.
_CHUNK_BYTES = 128
_BOX_COLUMNS = 64

def _tile_rules(dtype, b_dtype, tile, warp_groups):
    row_step = 64 * warp_groups
    accumulators = tile[0] * tile[1] // (2 * row_step)
    k_bytes = tile[2] * _OPERAND_BYTES[dtype]
    return [
        (
            b_dtype == dtype or (_OPERAND_BYTES[dtype] == 1 and _OPERAND_BYTES[b_dtype] == 1),
            "b_dtype must be dtype's, or both fp8",
            "it is {} with {}".format(repr(b_dtype), repr(dtype)),
            "change one of them",
        ),
        (
            tile[0] % 64 == 0 and tile[0] <= 256,
            "tile m must be a multiple of 64 up to 256, the largest box of TMA",
            "it is {}".format(tile[0]),
            "change it",
        ),
        (
            tile[0] % row_step == 0,
            "tile m must have 64 rows for each warp group",
            "it is {} for {}".format(tile[0], warp_groups),
            "change tile or warp groups",
        ),
        (
            tile[1] % 16 == 0 and tile[1] <= 256,
            "tile n must be a multiple of 16 up to 256",
            "it is {}".format(tile[1]),
            "change it",
        ),
        (
            accumulators <= _MAX_ACCUMULATORS[warp_groups],
            "a thread must hold at most {} accumulators with {} warp groups".format(
                _MAX_ACCUMULATORS[warp_groups],
                warp_groups,
            ),
            "it is {}".format(accumulators),
            "shrink the tile, or change the warp groups",
        ),
        (
            k_bytes % _CHUNK_BYTES == 0,
            "tile k must be whole swizzle atoms of {} bytes".format(_CHUNK_BYTES),
            "it is {} bytes".format(k_bytes),
            "change it",
        ),
    ]

def _block_scale_rules(dtype, tile, warp_groups, swap_ab):
    blocks = tile[2] // _SCALE_BLOCK
    accumulators = tile[0] * tile[1] // (128 * warp_groups) * (1 + blocks)
    return [
        (
            swap_ab,
            "operands with block scales must be swapped",
            "swap_ab is False",
            "swap them, or omit block_scales",
        ),
        (
            _OPERAND_BYTES[dtype] == 1 and tile[0] <= _SCALE_BLOCK,
            "block scales are of fp8, with tile m up to {}".format(_SCALE_BLOCK),
            "dtype is {}, tile m {}".format(repr(dtype), tile[0]),
            "change them",
        ),
        (
            blocks in [1, 2] and tile[2] % _SCALE_BLOCK == 0,
            "tile k must be one or two blocks of {} with block scales".format(_SCALE_BLOCK),
            "it is {}".format(tile[2]),
            "change it",
        ),
        (
            accumulators <= _MAX_BLOCK_ACCUMULATORS,
            "a thread must hold at most {} accumulators with block scales"
                .format(_MAX_BLOCK_ACCUMULATORS),
            "it is {}".format(accumulators),
            "shrink the tile",
        ),
    ]

def _stored_rules(dtype, tile, stages, warp_groups):
    # A block's last tile is stored from where its stages were, 64 x 64 elements from each.
    boxes = tile[0] // (64 * warp_groups) * ((tile[1] + _BOX_COLUMNS - 1) // _BOX_COLUMNS)
    places = stages * (tile[2] * _OPERAND_BYTES[dtype] // _CHUNK_BYTES)
    return [(
        boxes <= places,
        "without swapped operands the stages must have a place of {} bytes of k for each {} of n that a warp group stores"
            .format(_CHUNK_BYTES, _BOX_COLUMNS),
        "{} stages have {}, for {}".format(stages, places, boxes),
        "add stages, or narrow the tile",
    )]

def persistent_mm_config(
        op,
        dtype,
        out,
        tile,
        stages,
        warp_groups = 1,
        block_scales = False,
        swap_ab = True,
        b_dtype = None,
        max_splits = None):
    """Describes one kernel whose blocks go from tile to tile, or whose clusters share the k of one.

    Example:

        persistent_mm_config(
            op = "scaled_mm",
            dtype = "e4m3",
            out = "bf16",
            tile = (64, 16, 256),
            stages = 5,
        )

    Args:
      op: "scaled_mm" or "matmul".
      dtype: of the left operand: "e4m3", "e5m2", "bf16" or "fp16".
      out: dtype of the result, "bf16" or "fp16".
      tile: (m, n, k) elements of the tile; with swap_ab that of the swapped problem, whose m runs
        along the user's n.
      stages: tiles of both operands in flight. Those that do not fit shared memory do not compile.
      warp_groups: warp groups that share the accumulators of one tile.
      block_scales: scales 1x128 of a and 128x128 of b, of fp8.
      swap_ab: whether d^T = b^T a^T is computed; otherwise k is not split.
      b_dtype: of the right operand, with as many bytes; None is the left one's.
      max_splits: blocks that may share the k of a tile, 1 where shared memory has no room for their
        partial sums; None is what the warp groups allow.

    Returns:
      A struct as kernel_config() gives it.
    """
    function = "persistent_mm_config"
    b_dtype = b_dtype or dtype
    if max_splits == None:
        max_splits = _MAX_SPLITS.get(warp_groups, 1) if swap_ab else 1
    values = dict(
        b_dtype = b_dtype,
        block_scales = block_scales,
        dtype = dtype,
        max_splits = max_splits,
        op = op,
        out = out,
        stages = stages,
        swap_ab = swap_ab,
        tile = tile,
        warp_groups = warp_groups,
    )
    check_config(function, _SCHEMA, values)
    check_rules(function, _tile_rules(dtype, b_dtype, tile, warp_groups))
    allowed = [1, _MAX_SPLITS[warp_groups]] if swap_ab else [1]
    check_rules(function, [(
        max_splits in allowed,
        "max_splits must be one of {} with {} warp groups and swap_ab = {}".format(
            ", ".join([str(x) for x in allowed]),
            warp_groups,
            swap_ab,
        ),
        "it is {}".format(max_splits),
        "choose one of them",
    )])
    if block_scales:
        check_rules(function, _block_scale_rules(dtype, tile, warp_groups, swap_ab))
    if not swap_ab:
        check_rules(function, _stored_rules(dtype, tile, stages, warp_groups))
    return _config(**values)

def _config(op, dtype, b_dtype, out, tile, stages, warp_groups, block_scales, swap_ab, max_splits):
    schedule = "splitk" if max_splits > 1 else "persistent"
    return kernel_config(
        family = _FAMILY,
        id = join(
            op,
            "block" if block_scales else "",
            "sm90",
            dtype,
            b_dtype,
            out,
            tile,
            "1x1x1",
            "{}{}x{}".format(schedule, warp_groups, stages),
            "swap" if swap_ab else "",
        ),
        op = op,
        a = dtype,
        b = b_dtype,
        out = out,
        tile = tile,
        swap_ab = swap_ab,
        constants = {
            "kBlockScales": block_scales,
            "kMaxSplits": max_splits,
            "kSchedule": schedule,
            "kStages": stages,
            "kWarpGroups": warp_groups,
        },
        uses_cute = False,
        json_fields = {
            "accumulation": "fast",
            "cluster": (1, 1, 1),
            "layout": "nt",
            "max_splits": max_splits,
            "schedule": schedule,
            "stages": stages,
            "warp_groups": warp_groups,
        } | ({"scales": "block"} if block_scales else {}),
    )
