"""Every CUTLASS kernel that is built: the only place where a config is written.

A config becomes one cubin and one host object, whose defines it makes, from the sources of its
family (`source`.cuh, .cu, .cc), and one entry of the kernel manifest. To add a kernel, add a config
to a list.
"""

# Elements of 8 bits that wgmma multiplies, and what the epilogue writes.
_OPERAND_DTYPES = ["e4m3", "e5m2"]
_OUT_DTYPES = ["bf16", "fp16", "fp32"]

# How sums are kept: "fast" by the tensor core alone, in some 14 bits; "slow" with a second set of
# fp32 registers, to which each 128 of k are added.
_ACCUMULATIONS = ["fast", "slow"]

# Schedule -> warp groups that share the accumulators of one tile (CUTLASS's kernel of that name:
# gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp). A warp group has 128 threads.
_WARP_GROUPS_PER_TILE = {
    "cooperative": 2,
    "pingpong": 1,
    "warpspecialized": 1,
}

# fp32 accumulators a thread may hold and leave room, in the 232 registers that CUTLASS gives a
# multiplying thread, for the rest of the loop and the epilogue. 128x256 pingpong (256) spills.
_MAX_ACCUMULATORS_PER_THREAD = 192

# Where each has a second register. 128x128 pingpong and 256x128 cooperative (128 each) spill.
_MAX_SLOW_ACCUMULATORS_PER_THREAD = 96

# Shared memory of a block on sm_90: 227 KiB (CUDA C++ Programming Guide, compute capability 9.0).
_MAX_SHARED_BYTES = 227 * 1024

# Fewer buffered stages than two cannot overlap loads with multiplication.
_MIN_STAGES = 2

def _fail(rule, value, remedy):
    fail("gemm_config: {}, but {}; {}".format(rule, value, remedy))

def _check_one_of(name, value, allowed):
    if value not in allowed:
        _fail(
            "{} must be one of {}".format(name, ", ".join(allowed)),
            "it is {}".format(repr(value)),
            "choose one of them",
        )

def _check_triple(name, value):
    if len(value) != 3 or [x for x in value if type(x) != "int" or x < 1]:
        _fail(
            "{} must be three positive integers".format(name),
            "it is {}".format(repr(value)),
            "write it as (m, n, k)",
        )

def gemm_config(a, b, out, tile, cluster, schedule, swap_ab = False, accumulation = "fast"):
    """Describes one scaled_mm kernel for sm_90a.

    Example:

        gemm_config(
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
      A struct with `id` (a C identifier, the kernel's symbol), `op`, `source`, `arch`, `defines` (a
      list of "NAME=VALUE" for cubin and host object alike) and `config_json` (the manifest's
      "config").
    """
    _check_one_of("a", a, _OPERAND_DTYPES)
    _check_one_of("b", b, _OPERAND_DTYPES)
    _check_one_of("out", out, _OUT_DTYPES)
    _check_one_of("accumulation", accumulation, _ACCUMULATIONS)
    _check_one_of("schedule", schedule, sorted(_WARP_GROUPS_PER_TILE))
    _check_triple("tile", tile)
    _check_triple("cluster", cluster)
    tile_m, tile_n, tile_k = tile
    warp_groups = _WARP_GROUPS_PER_TILE[schedule]

    if tile_m % (64 * warp_groups) != 0:
        _fail(
            "tile m must be a multiple of {} with schedule {}: wgmma has 64 rows a warp group"
                .format(64 * warp_groups, repr(schedule)),
            "it is {}".format(tile_m),
            "change the tile or the schedule",
        )
    if tile_n % 16 != 0 or tile_n > 256:
        _fail(
            "tile n must be a multiple of 16 up to 256, wgmma's widest",
            "it is {}".format(tile_n),
            "change the tile",
        )
    if tile_k not in [64, 128, 256]:
        _fail(
            "tile k must be 64, 128 or 256: whole swizzle atoms of fp8",
            "it is {}".format(tile_k),
            "change the tile",
        )
    if cluster[2] != 1 or cluster[0] not in [1, 2, 4] or cluster[1] not in [1, 2, 4]:
        _fail(
            "cluster must be (m, n, 1) with m and n of 1, 2 or 4",
            "it is {}".format(repr(cluster)),
            "change the cluster",
        )
    if cluster[0] * cluster[1] > 8:
        _fail(
            "a cluster must have at most 8 blocks, the portable size",
            "it is {}".format(repr(cluster)),
            "make it smaller",
        )
    accumulators = tile_m * tile_n // (128 * warp_groups)
    max_accumulators = _MAX_ACCUMULATORS_PER_THREAD
    if accumulation == "slow":
        max_accumulators = _MAX_SLOW_ACCUMULATORS_PER_THREAD
    if accumulators > max_accumulators:
        _fail(
            "a thread must hold at most {} accumulators (tile m * tile n / threads), or it spills"
                .format(max_accumulators),
            "it is {}".format(accumulators),
            "shrink the tile, or use schedule \"cooperative\"",
        )
    stage_bytes = (tile_m + tile_n) * tile_k
    if _MIN_STAGES * stage_bytes > _MAX_SHARED_BYTES:
        _fail(
            "{} stages of (tile m + tile n) * tile k bytes must fit {} bytes of shared memory"
                .format(_MIN_STAGES, _MAX_SHARED_BYTES),
            "a stage has {} bytes".format(stage_bytes),
            "shrink the tile",
        )

    kernel_id = "scaled_mm_sm90_{}_{}_{}_{}_{}_{}{}{}".format(
        a,
        b,
        out,
        "x".join([str(x) for x in tile]),
        "x".join([str(x) for x in cluster]),
        schedule,
        "_slow" if accumulation == "slow" else "",
        "_swap" if swap_ab else "",
    )
    return struct(
        id = kernel_id,
        op = "scaled_mm",
        source = "scaled_mm_sm90",
        arch = "sm_90a",
        defines = [
            "STONEWARE_KERNEL_ID=" + kernel_id,
            "STONEWARE_A=" + a,
            "STONEWARE_B=" + b,
            "STONEWARE_OUT=" + out,
            "STONEWARE_TILE_M={}".format(tile_m),
            "STONEWARE_TILE_N={}".format(tile_n),
            "STONEWARE_TILE_K={}".format(tile_k),
            "STONEWARE_CLUSTER_M={}".format(cluster[0]),
            "STONEWARE_CLUSTER_N={}".format(cluster[1]),
            "STONEWARE_SCHEDULE=" + schedule,
            "STONEWARE_FAST_ACCUMULATION={}".format(1 if accumulation == "fast" else 0),
            "STONEWARE_SWAP_AB={}".format(1 if swap_ab else 0),
        ],
        config_json = json.encode({
            "a": a,
            "accumulation": accumulation,
            "b": b,
            "cluster": cluster,
            "out": out,
            "schedule": schedule,
            "swap_ab": swap_ab,
            "tile": tile,
        }),
    )

# Elements of k, and columns of b, that share a block scale.
_SCALE_BLOCK = 128

# Of a block-scaled tile each element has two fp32 accumulators: what the tensor core sums within a
# block of k, and the sum of the blocks. 256x128 cooperative (128) spills.
_MAX_BLOCK_ACCUMULATORS_PER_THREAD = 96

# Elements that a split-k kernel multiplies, and their bytes.
_SPLITK_OPERAND_BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "fp16": 2}

# Warp groups of a block -> fp32 accumulators that a thread may hold and leave room in its registers
# (splitk_sm90.cuh, kConsumerRegisters). Of four warp groups a thread has too few for any.
_SPLITK_MAX_ACCUMULATORS = {1: 192, 2: 192, 3: 112}

# Warp groups of a block -> blocks that may share the k of a tile: each stores the sums of whole warps,
# or of a warp group where there are two.
_SPLITK_MAX_SPLITS = {1: 4, 2: 2, 3: 1}

_SPLITK_OUT_DTYPES = ["bf16", "fp16"]

def splitk_config(
        op,
        dtype,
        out,
        tile,
        stages,
        warp_groups = 1,
        block_scales = False,
        swap_ab = True,
        b_dtype = None):
    """Describes one kernel whose clusters may share the k of a tile, for small and middling m, or
    whose blocks only go from tile to tile (splitk_sm90.cuh).

    Example:

        splitk_config(
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
      stages: tiles of both operands in flight.
      warp_groups: warp groups that share the accumulators of one tile.
      block_scales: scales 1x128 of a and 128x128 of b, of fp8.
      swap_ab: whether d^T = b^T a^T is computed; else k is not split, nor where there is no room
        for the partial sums, nor with three warp groups.
      b_dtype: of the right operand, with as many bytes; None is the left one's.

    Returns:
      A struct as gemm_config() gives it.
    """
    _check_one_of("op", op, ["matmul", "scaled_mm"])
    b_dtype = b_dtype or dtype
    _check_one_of("dtype", dtype, sorted(_SPLITK_OPERAND_BYTES))
    element_bytes = _SPLITK_OPERAND_BYTES[dtype]
    _check_one_of("b_dtype", b_dtype, [dtype] if element_bytes > 1 else _OPERAND_DTYPES)
    _check_one_of("out", out, _SPLITK_OUT_DTYPES)
    _check_triple("tile", tile)
    tile_m, tile_n, tile_k = tile
    if tile_m % 64 != 0 or tile_m > 256:
        _fail(
            "tile m must be a multiple of 64 up to 256, the largest box of TMA",
            "it is {}".format(tile_m),
            "change it",
        )
    if tile_n % 16 != 0 or tile_n > 256:
        _fail("tile n must be a multiple of 16 up to 256", "it is {}".format(tile_n), "change it")
    if warp_groups not in _SPLITK_MAX_ACCUMULATORS:
        _fail("warp_groups must be 1, 2 or 3", "it is {}".format(warp_groups), "choose one of them")
    if tile_m % (64 * warp_groups) != 0:
        _fail(
            "tile m must have 64 rows for each warp group",
            "it is {} for {}".format(tile_m, warp_groups),
            "change tile or warp groups",
        )
    accumulators = tile_m * tile_n // (128 * warp_groups)
    max_accumulators = _SPLITK_MAX_ACCUMULATORS[warp_groups]
    if accumulators > max_accumulators:
        _fail(
            "a thread must hold at most {} accumulators with {} warp groups".format(
                max_accumulators,
                warp_groups,
            ),
            "it is {}".format(accumulators),
            "shrink the tile, or change the warp groups",
        )
    if tile_k * element_bytes % 128 != 0:
        _fail(
            "tile k must be whole swizzle atoms of 128 bytes",
            "it is {} bytes".format(tile_k * element_bytes),
            "change it",
        )
    if not swap_ab and block_scales:
        _fail(
            "operands with block scales must be swapped",
            "swap_ab is False",
            "swap them, or leave block_scales away",
        )

    # Beside the stages: vectors of two tiles, barriers, the block scales of each stage and, without
    # swapped operands, 64 x 64 elements of the result for each warp group (splitk_sm90.cuh,
    # SharedLayout).
    vectors = 2 * tile_m + tile_n if swap_ab else tile_m + 2 * tile_n
    shared_bytes = (
        stages * ((tile_m + tile_n) * tile_k * element_bytes + 16) + 8 + 8 * vectors +
        (stages * (tile_k // _SCALE_BLOCK) * (tile_n + 4) * 4 if block_scales else 0) +
        (0 if swap_ab else warp_groups * 64 * 64 * 2)
    )
    if stages < _MIN_STAGES or shared_bytes > _MAX_SHARED_BYTES:
        _fail(
            "at least {} stages must fit {} bytes of shared memory".format(_MIN_STAGES, _MAX_SHARED_BYTES),
            "{} stages take {}".format(stages, shared_bytes),
            "change tile or stages",
        )

    if not swap_ab:
        # A block's last tile is stored from where its stages were, 64 x 64 elements from each.
        boxes = tile_m // (64 * warp_groups) * ((tile_n + 63) // 64)
        places = stages * (tile_k * element_bytes // 128)
        if boxes > places:
            _fail(
                "without swapped operands the stages must have a place of 128 bytes of k for each " +
                "64 of n that a warp group stores",
                "{} stages have {}, for {}".format(stages, places, boxes),
                "add stages, or narrow the tile",
            )
    if block_scales and (element_bytes != 1 or tile_m > _SCALE_BLOCK):
        _fail(
            "block scales are of fp8, with tile m up to {}".format(_SCALE_BLOCK),
            "dtype is {}, tile m {}".format(repr(dtype), tile_m),
            "change them",
        )
    if block_scales and tile_k not in [_SCALE_BLOCK, 2 * _SCALE_BLOCK]:
        _fail(
            "tile k must be one or two blocks of {} with block scales".format(_SCALE_BLOCK),
            "it is {}".format(tile_k),
            "change it",
        )
    # The sum over k, and one of each block of a tile's k.
    block_accumulators = accumulators * (1 + tile_k // _SCALE_BLOCK)
    if block_scales and block_accumulators > 2 * _MAX_BLOCK_ACCUMULATORS_PER_THREAD:
        _fail(
            "a thread must hold at most {} accumulators with block scales".format(
                2 * _MAX_BLOCK_ACCUMULATORS_PER_THREAD,
            ),
            "it is {}".format(block_accumulators),
            "shrink the tile",
        )

    # What the other blocks send of a tile's sums arrives beside the stages.
    max_splits = _SPLITK_MAX_SPLITS[warp_groups] if swap_ab else 1
    partial_bytes = 4 * tile_m * tile_n // max_splits * (max_splits - 1)
    if shared_bytes + partial_bytes > _MAX_SHARED_BYTES:
        max_splits = 1
    schedule = "splitk" if max_splits > 1 else "persistent"
    kernel_id = "{}_sm90_{}_{}_{}_{}_1x1x1_{}{}x{}{}".format(
        op + ("_block" if block_scales else ""),
        dtype,
        b_dtype,
        out,
        "x".join([str(x) for x in tile]),
        schedule,
        warp_groups,
        stages,
        "_swap" if swap_ab else "",
    )
    return struct(
        id = kernel_id,
        op = op,
        source = "splitk_sm90",
        device_hdrs = ["ring_position_sm90.cuh", "transpose_sm90.cuh"],
        arch = "sm_90a",
        defines = [
            "STONEWARE_KERNEL_ID=" + kernel_id,
            "STONEWARE_OP=" + op,
            "STONEWARE_A=" + dtype,
            "STONEWARE_B=" + b_dtype,
            "STONEWARE_OUT=" + out,
            "STONEWARE_TILE_M={}".format(tile_m),
            "STONEWARE_TILE_N={}".format(tile_n),
            "STONEWARE_TILE_K={}".format(tile_k),
            "STONEWARE_STAGES={}".format(stages),
            "STONEWARE_WARP_GROUPS={}".format(warp_groups),
            "STONEWARE_BLOCK_SCALES={}".format(1 if block_scales else 0),
            "STONEWARE_SWAP_AB={}".format(1 if swap_ab else 0),
            "STONEWARE_MAX_SPLITS={}".format(max_splits),
        ],
        config_json = json.encode({
            "a": dtype,
            "accumulation": "fast",
            "b": b_dtype,
            "cluster": (1, 1, 1),
            "layout": "nt",
            "max_splits": max_splits,
            "out": out,
            "schedule": schedule,
            "stages": stages,
            "swap_ab": swap_ab,
            "tile": tile,
            "warp_groups": warp_groups,
        } | ({"scales": "block"} if block_scales else {})),
    )

# fp8 with tensor or row scales, for large m; the rest is SPLITK_SM90's.
SCALED_MM_SM90 = [
    gemm_config(
        a = "e4m3",
        b = "e4m3",
        out = out,
        tile = tile,
        cluster = (2, 1, 1),
        schedule = "pingpong",
    )
    for out in ["bf16", "fp16"]
    for tile in [(128, 128, 128), (128, 160, 128), (128, 192, 128)]
]

# Small and middling m: of the tile, n is what m needs; stages for one block an SM or, of the first,
# three and two. Without swapped operands those with 64 rows are for m of 64 and 128, where n / 96 or
# n / 112 makes better use of the SMs than n / 64; the wide ones for m above 64 where the problem has
# as many tiles as there are SMs, or a few times as many, and k is long beside the tile's epilogue.
SPLITK_SM90 = [
    splitk_config(
        op = "scaled_mm",
        dtype = "e4m3",
        out = out,
        tile = tile,
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = swap_ab,
    )
    for out in ["bf16", "fp16"]
    for tile, stages, warp_groups, swap_ab in [
        ((64, 16, 256), 3, 1, True),
        ((64, 16, 256), 5, 1, True),
        ((64, 16, 256), 9, 1, True),
        ((64, 32, 256), 8, 1, True),
        ((64, 64, 256), 6, 1, True),
        ((64, 96, 128), 8, 1, True),
        ((64, 128, 128), 8, 1, True),
        ((128, 64, 128), 8, 2, True),
        ((128, 96, 128), 7, 2, True),
        ((128, 192, 128), 5, 2, True),
        ((192, 176, 128), 4, 3, True),
        ((64, 96, 256), 5, 1, False),
        ((64, 112, 256), 4, 1, False),
        ((128, 96, 128), 7, 2, False),
        ((128, 112, 128), 6, 2, False),
        ((128, 192, 128), 4, 2, False),
        ((128, 224, 128), 4, 2, False),
        ((128, 256, 128), 4, 2, False),
        ((192, 176, 128), 4, 3, False),
    ]
] + [
    # Gradients, by a weight. Above m = 128 torch's own kernels are the faster ones.
    splitk_config(
        op = "scaled_mm",
        dtype = "e5m2",
        b_dtype = "e4m3",
        out = "bf16",
        tile = tile,
        stages = stages,
    )
    for tile, stages in [
        ((64, 64, 256), 6),
        ((64, 128, 128), 8),
    ]
] + [
    splitk_config(
        op = "scaled_mm",
        dtype = "e4m3",
        out = "bf16",
        tile = tile,
        stages = stages,
        block_scales = True,
    )
    for tile, stages in [
        ((64, 16, 256), 9),
        ((64, 32, 256), 8),
        ((64, 64, 256), 6),
        ((64, 96, 128), 8),
    ]
] + [
    splitk_config(
        op = "matmul",
        dtype = dtype,
        out = dtype,
        tile = tile,
        stages = stages,
        warp_groups = warp_groups,
        swap_ab = swap_ab,
    )
    for dtype in ["bf16", "fp16"]
    for tile, stages, warp_groups, swap_ab in [
        ((64, 16, 128), 9, 1, True),
        ((64, 32, 128), 8, 1, True),
        ((64, 64, 128), 6, 1, True),
        ((128, 64, 64), 8, 2, True),
        ((64, 96, 128), 5, 1, False),
        ((64, 112, 128), 4, 1, False),
        ((128, 128, 64), 6, 2, False),
        ((192, 176, 64), 4, 3, False),
    ]
]

def _fail_block(rule, value, remedy):
    fail("block_scaled_config: {}, but {}; {}".format(rule, value, remedy))

def block_scaled_config(a, b, out, tile, cluster, schedule, swap_ab = False):
    """Describes one scaled_mm kernel with scales 1x128 of a and 128x128 of b for sm_90a.

    Example:

        block_scaled_config(
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
      A struct as gemm_config's.
    """
    if schedule not in ["cooperative", "pingpong"]:
        _fail_block(
            "schedule must be \"cooperative\" or \"pingpong\"",
            "it is {}".format(repr(schedule)),
            "choose one of them",
        )
    tile_m, tile_n, tile_k = tile
    if tile_k != _SCALE_BLOCK:
        _fail_block(
            "tile k must be {}, the elements of k that share a scale".format(_SCALE_BLOCK),
            "it is {}".format(tile_k),
            "change the tile",
        )
    tile_along_n = tile_m if swap_ab else tile_n
    if tile_along_n % _SCALE_BLOCK != 0 and _SCALE_BLOCK % tile_along_n != 0:
        _fail_block(
            "the tile must have whole blocks of {} along the user's n, or divide one"
                .format(_SCALE_BLOCK),
            "it has {}".format(tile_along_n),
            "change the tile",
        )
    if tile_m % (64 * _WARP_GROUPS_PER_TILE[schedule]) != 0 or tile_n % 16 != 0:
        _fail_block(
            "tile m must be a multiple of 64 for each warp group of a tile, and tile n of 16",
            "the tile is {} with schedule {}".format(repr(tile), repr(schedule)),
            "change the tile or the schedule",
        )
    accumulators = tile_m * tile_n // (128 * _WARP_GROUPS_PER_TILE[schedule])
    if accumulators > _MAX_BLOCK_ACCUMULATORS_PER_THREAD:
        _fail_block(
            "a thread must hold at most {} elements of a tile, or it spills"
                .format(_MAX_BLOCK_ACCUMULATORS_PER_THREAD),
            "it holds {}".format(accumulators),
            "shrink the tile, or use schedule \"cooperative\"",
        )
    kernel_id = "scaled_mm_block_sm90_{}_{}_{}_{}_{}_{}{}".format(
        a,
        b,
        out,
        "x".join([str(x) for x in tile]),
        "x".join([str(x) for x in cluster]),
        schedule,
        "_swap" if swap_ab else "",
    )
    return struct(
        id = kernel_id,
        op = "scaled_mm",
        source = "scaled_mm_block_sm90",
        arch = "sm_90a",
        defines = [
            "STONEWARE_KERNEL_ID=" + kernel_id,
            "STONEWARE_A=" + a,
            "STONEWARE_B=" + b,
            "STONEWARE_OUT=" + out,
            "STONEWARE_TILE_M={}".format(tile_m),
            "STONEWARE_TILE_N={}".format(tile_n),
            "STONEWARE_TILE_K={}".format(tile_k),
            "STONEWARE_CLUSTER_M={}".format(cluster[0]),
            "STONEWARE_CLUSTER_N={}".format(cluster[1]),
            "STONEWARE_SCHEDULE=" + schedule,
            "STONEWARE_SWAP_AB={}".format(1 if swap_ab else 0),
        ],
        config_json = json.encode({
            "a": a,
            "b": b,
            "cluster": cluster,
            "out": out,
            "scales": "block",
            "schedule": schedule,
            "swap_ab": swap_ab,
            "tile": tile,
        }),
    )

# fp8 with sums in full fp32, for what torch's kernels refuse: scales of two kinds, a bias on a result
# in fp32. Where both run torch's are the faster ones.
SCALED_MM_SLOW_SM90 = [
    gemm_config(
        a = a,
        b = b,
        out = out,
        tile = tile,
        cluster = (2, 1, 1),
        schedule = schedule,
        accumulation = "slow",
    )
    for a, b, out, tile, schedule in [
        ("e4m3", "e4m3", "bf16", (128, 128, 128), "cooperative"),
        ("e4m3", "e4m3", "bf16", (64, 128, 128), "pingpong"),
        ("e4m3", "e4m3", "fp32", (128, 128, 128), "cooperative"),
    ]
]

# fp8 with scales 1x128 of a and 128x128 of b: for large m; the rest is SPLITK_SM90's.
SCALED_MM_BLOCK_SM90 = [
    block_scaled_config(
        a = "e4m3",
        b = "e4m3",
        out = "bf16",
        tile = tile,
        cluster = cluster,
        schedule = schedule,
        swap_ab = swap_ab,
    )
    for tile, cluster, schedule, swap_ab in [
        ((64, 128, 128), (1, 1, 1), "pingpong", False),
    ]
]

# Bytes of an element of grouped_mm's operands.
_GROUPED_OPERAND_BYTES = {"bf16": 2, "e4m3": 1, "fp16": 2}

def grouped_mm_config(operand, out, tile, schedule, swap_ab = False):
    """Describes one grouped_mm kernel for sm_90a.

    Args:
      operand: dtype of both operands, "e4m3" (with a scale per row), "bf16" or "fp16".
      out: dtype of the result, "bf16" or "fp16".
      tile: (m, n) elements of the output tile. With swap_ab it is the tile of the swapped problem:
        its m runs along the user's n. Along k it has 128 bytes.
      schedule: "pingpong" (two warp groups take turns, a tile each) or "cooperative" (they share).
      swap_ab: compute the transposed product, for few rows a group.

    Returns:
      A struct as gemm_config() returns.
    """
    _check_one_of("operand", operand, sorted(_GROUPED_OPERAND_BYTES))
    _check_one_of("out", out, _OUT_DTYPES)
    _check_one_of("schedule", schedule, ["cooperative", "pingpong"])
    tile = (tile[0], tile[1], 128 // _GROUPED_OPERAND_BYTES[operand])
    _check_triple("tile", tile)
    rows = 64 * _WARP_GROUPS_PER_TILE[schedule]
    if tile[0] % rows != 0 or tile[0] > 256:
        _fail(
            "tile m must be a multiple of {} up to 256 with schedule {}".format(rows, schedule),
            "it is {}".format(tile[0]),
            "change the tile or the schedule",
        )
    columns = 16 if swap_ab else 32
    if tile[1] % columns != 0 or tile[1] > 256:
        _fail(
            "tile n must be a multiple of {} up to 256".format(columns),
            "it is {}".format(tile[1]),
            "change the tile",
        )
    kernel_id = "grouped_mm_sm90_{}_{}_{}_{}{}".format(
        operand,
        out,
        "x".join([str(x) for x in tile]),
        schedule,
        "_swap" if swap_ab else "",
    )
    return struct(
        id = kernel_id,
        op = "grouped_mm",
        source = "grouped_mm_sm90",
        device_hdrs = ["ring_position_sm90.cuh", "transpose_sm90.cuh"],
        arch = "sm_90a",
        defines = [
            "STONEWARE_KERNEL_ID=" + kernel_id,
            "STONEWARE_OPERAND=" + operand,
            "STONEWARE_OUT=" + out,
            "STONEWARE_TILE_M={}".format(tile[0]),
            "STONEWARE_TILE_N={}".format(tile[1]),
            "STONEWARE_TILE_K={}".format(tile[2]),
            "STONEWARE_SCHEDULE=" + schedule,
            "STONEWARE_SWAP_AB={}".format(1 if swap_ab else 0),
        ],
        config_json = json.encode({
            "a": operand,
            "b": operand,
            "layout": "nt",
            "out": out,
            "schedule": schedule,
            "swap_ab": swap_ab,
            "tile": tile,
        }),
    )

# Rows a group: up to 16, 32, 64 (the swapped ones, whose tile's n runs along them), 128, and many.
GROUPED_MM_SM90 = [
    grouped_mm_config(
        operand = operand,
        out = "bf16",
        tile = tile,
        schedule = schedule,
        swap_ab = swap_ab,
    )
    for operand in ["e4m3", "bf16"]
    for tile, schedule, swap_ab in [
        ((128, 16), "cooperative", True),
        ((128, 32), "cooperative", True),
        ((128, 64), "cooperative", True),
        ((128, 128), "pingpong", False),
        ((128, 256), "cooperative", False),
    ]
]

_MATMUL_OPERAND_DTYPES = ["bf16", "fp16"]
_MATMUL_LAYOUTS = ["nt", "nn", "tn", "tt"]

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
      A struct as gemm_config() makes it.
    """
    out = out or operand
    _check_one_of("operand", operand, _MATMUL_OPERAND_DTYPES)
    _check_one_of("layout", layout, _MATMUL_LAYOUTS)
    _check_one_of("out", out, [operand, "fp32"])
    _check_one_of("schedule", schedule, sorted(_WARP_GROUPS_PER_TILE))
    _check_triple("tile", tile)
    _check_triple("cluster", cluster)
    tile_m, tile_n, tile_k = tile
    warp_groups = _WARP_GROUPS_PER_TILE[schedule]

    if tile_m % (64 * warp_groups) != 0:
        _fail(
            "tile m must be a multiple of {} with schedule {}: wgmma has 64 rows a warp group"
                .format(64 * warp_groups, repr(schedule)),
            "it is {}".format(tile_m),
            "change the tile or the schedule",
        )
    if tile_n % 16 != 0 or tile_n > 256:
        _fail(
            "tile n must be a multiple of 16 up to 256, wgmma's widest",
            "it is {}".format(tile_n),
            "change the tile",
        )
    if tile_k not in [64, 128]:
        _fail(
            "tile k must be 64 or 128: whole swizzle atoms of 16 bits",
            "it is {}".format(tile_k),
            "change the tile",
        )
    if cluster[2] != 1 or cluster[0] not in [1, 2, 4] or cluster[1] not in [1, 2, 4]:
        _fail(
            "cluster must be (m, n, 1) with m and n of 1, 2 or 4",
            "it is {}".format(repr(cluster)),
            "change the cluster",
        )
    if cluster[0] * cluster[1] > 8:
        _fail(
            "a cluster must have at most 8 blocks, the portable size",
            "it is {}".format(repr(cluster)),
            "make it smaller",
        )
    accumulators = tile_m * tile_n // (128 * warp_groups)
    if accumulators > _MAX_ACCUMULATORS_PER_THREAD:
        _fail(
            "a thread must hold at most {} accumulators (tile m * tile n / threads), or it spills"
                .format(_MAX_ACCUMULATORS_PER_THREAD),
            "it is {}".format(accumulators),
            "shrink the tile, or use schedule \"cooperative\"",
        )
    stage_bytes = 2 * (tile_m + tile_n) * tile_k
    if _MIN_STAGES * stage_bytes > _MAX_SHARED_BYTES:
        _fail(
            "{} stages of 2 * (tile m + tile n) * tile k bytes must fit {} bytes of shared memory"
                .format(_MIN_STAGES, _MAX_SHARED_BYTES),
            "a stage has {} bytes".format(stage_bytes),
            "shrink the tile",
        )

    kernel_id = "matmul_sm90_{}_{}_{}_{}_{}_{}{}".format(
        operand,
        out,
        layout,
        "x".join([str(x) for x in tile]),
        "x".join([str(x) for x in cluster]),
        schedule,
        "_swap" if swap_ab else "",
    )
    return struct(
        id = kernel_id,
        op = "matmul",
        source = "matmul_sm90",
        arch = "sm_90a",
        defines = [
            "STONEWARE_KERNEL_ID=" + kernel_id,
            "STONEWARE_OPERAND=" + operand,
            "STONEWARE_OUT=" + out,
            "STONEWARE_A_IS_M_MAJOR={}".format(1 if layout[0] == "t" else 0),
            "STONEWARE_B_IS_N_MAJOR={}".format(1 if layout[1] == "n" else 0),
            "STONEWARE_TILE_M={}".format(tile_m),
            "STONEWARE_TILE_N={}".format(tile_n),
            "STONEWARE_TILE_K={}".format(tile_k),
            "STONEWARE_CLUSTER_M={}".format(cluster[0]),
            "STONEWARE_CLUSTER_N={}".format(cluster[1]),
            "STONEWARE_SCHEDULE=" + schedule,
            "STONEWARE_SWAP_AB={}".format(1 if swap_ab else 0),
        ],
        config_json = json.encode({
            "a": operand,
            "b": operand,
            "cluster": cluster,
            "layout": layout,
            "out": out,
            "schedule": schedule,
            "swap_ab": swap_ab,
            "tile": tile,
        }),
    )

_LARGE = ((128, 256, 64), (2, 1, 1), "cooperative", False)
_MIDDLE = ((128, 128, 64), (2, 1, 1), "pingpong", False)
_WIDE_160 = ((128, 160, 64), (2, 1, 1), "pingpong", False)
_WIDE_192 = ((128, 192, 64), (2, 1, 1), "pingpong", False)
_SMALL_M = ((64, 64, 128), (1, 1, 1), "warpspecialized", True)
_SMALL_M_16 = ((64, 16, 128), (1, 1, 1), "warpspecialized", True)

# bf16 so far: nt, a linear layer's product; nn, the gradient of its input; tn, that of its weight,
# which is often wanted in fp32. Layout tt has no kernel, and fp16 those of SPLITK_SM90 alone; the rest
# goes to other backends. Swapped tiles are for small m.
MATMUL_SM90 = [
    matmul_config(
        operand = operand,
        out = out,
        layout = layout,
        tile = tile,
        cluster = cluster,
        schedule = schedule,
        swap_ab = swap_ab,
    )
    for operand, out, layout, kernels in [
        ("bf16", "bf16", "nt", [_MIDDLE, _WIDE_160, _WIDE_192, _SMALL_M, _SMALL_M_16]),
        ("bf16", "bf16", "nn", [_MIDDLE, _SMALL_M]),
        ("bf16", "bf16", "tn", [_MIDDLE, _WIDE_192]),
        ("bf16", "fp32", "tn", [_LARGE]),
    ]
    for tile, cluster, schedule, swap_ab in kernels
]

# Everything that is built for sm_90a.
KERNELS_SM90 = (
    SCALED_MM_SM90 + SCALED_MM_SLOW_SM90 + SCALED_MM_BLOCK_SM90 + SPLITK_SM90 +
    GROUPED_MM_SM90 + MATMUL_SM90
)
