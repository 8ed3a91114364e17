"""The rule of thumb for scaled_mm where nothing was measured. Free of torch: the bake uses it."""

from __future__ import annotations

from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.autotune.tile_rule import by_tile_m
from stoneware.runtime.manifest import Manifest

REASON = (
    "no measurement applies; of our CUTLASS kernels the one with the smallest tile that still "
    "covers m, else the vendor library, else the Triton kernel by the same rule"
)

VENDOR = Config(backend="vendor", kernel="torch._scaled_mm")


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """Configs by the rule of REASON, best first; the first is the canonical config at this shape.

    CUTLASS first because its kernels are made for the one arch that they run on (at m <= 128
    untuned ones beat torch's rowwise kernels 1.1 to 2 times on an H200); the vendor library
    before Triton because it has kernels for every arch and size.
    """
    return [
        *by_tile_m(key, compute_capability, manifest.select(op=key.op, backend="cutlass_sm90")),
        VENDOR,
        *by_tile_m(key, compute_capability, manifest.select(op=key.op, backend="triton_aot")),
    ]
