"""The rule of thumb for scaled_mm where nothing was measured. Free of torch: the bake uses it."""

from __future__ import annotations

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import LARGEST_SPLIT_M, by_tile_m

REASON = (
    f"no measurement applies; up to m = {LARGEST_SPLIT_M} with fast accumulation of our CUTLASS "
    "kernels the one with the smallest tile that still covers m, else the vendor library, else our "
    "kernels by the same rule"
)

VENDOR = Config(backend="vendor", kernel="torch._scaled_mm")


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """Configs by the rule of REASON, best first; the first is the canonical config at this shape.

    On an H200 the CUTLASS kernels that it takes up to m = 128 were 1.1 to 2 times as fast as
    torch's rowwise ones, untuned, and those of e5m2 1.02 to 2.03 times (7 shapes). Those that it
    would take above took 1.08 to 1.28 times as long (e5m2, 7 shapes, m of 512 to 14336), and those
    with slow accumulation 1.06 to 1.42 times at any m (e4m3, 20 problems, m of 1 to 4096). The
    vendor library comes before Triton because it has kernels for every arch and size.
    """
    ours, triton = (
        by_tile_m(key, compute_capability, manifest.select(op=key.op, backend=backend))
        for backend in ("cutlass_sm90", "triton_aot")
    )
    is_ours_first = key.m <= LARGEST_SPLIT_M and key.accumulation == "fast"
    return [*ours, VENDOR, *triton] if is_ours_first else [VENDOR, *ours, *triton]
