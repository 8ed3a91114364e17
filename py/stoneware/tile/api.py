"""sw.tile.matmul: describes a matmul that kernels call; `mm.header` declares it to them."""

from __future__ import annotations

from collections.abc import Iterable

from stoneware.errors import quoted
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tile import source
from stoneware.tile.description import Description, checked_setting


@dataclass(frozen=True, kw_only=True)
class TileMatmul(Description):
    """What `sw.tile.matmul` returns; its arguments are the attributes.

    Further attributes:
      tile_bytes: bytes of shared memory of the tiles "A", "B" and "dC".
      plans: by direction, the instruction that computes it and how warps divide it.
      unsupported: the directions that it does not have -> why.
      header: what a kernel sees: the types and functions of all directions, in the namespace `name`.
    """

    @property
    def header(self) -> str:
        return source.header(self, frozenset(self.plans))


def matmul(
    *,
    m: int,
    n: int,
    k: int,
    a: str,
    b: str,
    acc: str = "f32",
    layouts: Iterable[str] = ("row", "row"),
    threads: int = 128,
    arch: str = "sm_90a",
    name: str = "mm",
    enable_backward: bool | Iterable[str] | None = None,
) -> TileMatmul:
    """Describes a matmul on shared memory that kernels call, with its gradients.

        forward   c[m, n] += a[m, k] b[k, n]
        dA        da[m, k] += dc[m, n] b^T
        dB        db[k, n] += a^T dc[m, n]

    a, b and dc are tiles in shared memory, c, da and db sums in the registers of the block's threads.

    Args:
      m, n, k: extents of the tiles, multiples of 16; k a multiple of 32 for fp8.
      a, b: dtypes of a and b: "bf16", "fp16", "tf32" (float in memory), or each "e4m3" or "e5m2", which have the
        forward matmul alone, with layouts=("row", "col"). dc has the dtype of a.
      acc: dtype of the sums, "f32".
      layouts: of a and b, "row" if rows are contiguous or "col". dc is "row".
      threads: of the block, all of which take part; a multiple of 32, or for wgmma of 128.
      arch: of the GPU: one of ARCHS. "sm_90a" has wgmma.
      name: the namespace in which the header declares it, and its name in messages.
      enable_backward: whether gradients may be linked, or which of "dA" and "dB"; None leaves it to the kernel, the
        module and `sw.tile.enable_backward`.

    Raises:
      ValueError: a field breaks its rule, or no instruction computes the forward matmul.
      TypeError: a field has another type.
    """
    if isinstance(layouts, str):
        raise TypeError(f'layouts={quoted(layouts)} must be two layouts, not a str; pass ("row", "row") for example')
    return TileMatmul(
        m=m,
        n=n,
        k=k,
        a=a,
        b=b,
        acc=acc,
        layouts=tuple(layouts),  # type: ignore[arg-type]  # checked there
        threads=threads,
        arch=arch,
        name=name,
        enable_backward=checked_setting("enable_backward", enable_backward),
    )
