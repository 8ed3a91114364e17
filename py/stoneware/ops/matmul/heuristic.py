"""The rule of thumb for matmul where nothing was measured. Free of torch: the bake uses it."""

from __future__ import annotations

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import by_tile_m

REASON = "no measurement applies; the vendor library, which has kernels for every arch and size"

VENDOR = Config(backend="vendor", kernel="torch.mm")


def preferred(key: Key, compute_capability: tuple[int, int], manifest: Manifest) -> list[Config]:
    """Configs by the rule of REASON, best first; the first is the canonical config."""
    return [
        VENDOR,
        *(
            config for backend in ("cutlass_sm90", "triton_aot")
            for config in by_tile_m(
                key, compute_capability, manifest.select(op=key.op, backend=backend)
            )
        ),
    ]
