"""The tile matmuls that the wheel has; NVRTC compiles any other when a kernel is linked."""

_SHAPES = [
    # m, n, k, threads
    (64, 64, 64, 128),
    (128, 128, 64, 128),
    (128, 256, 64, 256),
]

# name -> arguments of tile_matmul.
MATMULS = {
    "{}_{}_{}x{}x{}".format(dtype, "_".join(layouts), m, n, k): {
        "a": dtype,
        "b": dtype,
        "k": k,
        "layouts": layouts,
        "m": m,
        "n": n,
        "threads": threads,
    }
    for dtype in ["bf16"]
    for layouts in (["row", "row"], ["row", "col"])
    for m, n, k, threads in _SHAPES
}

TILE_MATMULS = ["//cc/tile:" + name for name in MATMULS]
