"""The rule of thumb for matmul where nothing was measured. Free of torch: the bake uses it."""

from __future__ import annotations

from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.autotune.tile_rule import by_tile_m
from stoneware.runtime.manifest import Manifest

REASON = "no measurement applies; the vendor library, which has kernels for every arch and size"

VENDOR = Config(backend="vendor", kernel="torch.mm")

_MOST_APART_M = 2
"""How far the m of a batch may lie from the one that was measured, as a factor."""


def may_answer(key: Key, measured: Key) -> bool:
    """Whether what was measured there says something of this key.

    Batches are not modelled, and the vendor library has kernels for small products of which we have
    none: only the same n and k count for them, at an m nearby.
    """
    if not key.num_groups:
        return True
    return (measured.n, measured.k) == (key.n, key.k) and (
        max(key.m, measured.m) <= _MOST_APART_M * min(key.m, measured.m)
    )


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
