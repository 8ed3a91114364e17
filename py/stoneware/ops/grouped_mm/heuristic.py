"""The rule of thumb for grouped_mm where nothing was measured. Free of torch: the bake uses it."""

from __future__ import annotations

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import by_tile_m

REASON = (
    "no measurement applies; of our CUTLASS kernels the one with the smallest tile that still "
    "covers the mean rows of a group, else torch's grouped product"
)

VENDOR = Config(backend="vendor", kernel="torch._grouped_mm")


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """Configs by the rule of REASON, best first; the first is the canonical config at this shape."""
    return [
        *by_tile_m(key, compute_capability, manifest.select(op=key.op, backend="cutlass_sm90")),
        VENDOR,
    ]
