"""Tile matmuls for CUDA C++ kernels: a user's kernel calls them on shared memory, and only those needed are linked.

    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16")     # mm::forward, mm::dA and mm::dB in the kernel
    linked = sw.tile.link(source, [mm], needs={"forward", "dA"})  # NVRTC and nvJitLink, which torch brings
    kernel = sw.tile.Kernel(linked, "layer", shared_bytes=mm.tile_bytes["A"] + mm.tile_bytes["B"])
    kernel(a, b, c, k, grid=(m // 64, n // 64))

docs/tiles.md explains the tiles, the sums and the options.
"""

from stoneware.tile.api import TileMatmul, matmul
from stoneware.tile.kernel import Kernel
from stoneware.tile.module import Linked, Module, link
from stoneware.tile.needs import enable_backward, needs_of

__all__ = ["Kernel", "Linked", "Module", "TileMatmul", "enable_backward", "link", "matmul", "needs_of"]
