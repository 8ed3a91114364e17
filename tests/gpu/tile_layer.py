"""A kernel in CUDA C++ that calls a tile matmul in each direction, for the tests of sw.tile and its benchmark.

    c[m, n] = a b        da[m, k] = dc b^T        db[k, n] = a^T dc

a and b have the layouts of the tile matmul, dc, c, da and db are row-major, c, da and db float. A block has one
tile of each result; the grid covers the largest of them.
"""

from __future__ import annotations

_ELEMENTS = {"bf16": "Bf16", "fp16": "Fp16", "e4m3": "E4m3", "e5m2": "E5m2", "tf32": "float"}

_SOURCE = """\
using namespace stoneware::tile;

extern "C" __global__ void __launch_bounds__({threads})
layer(const {a}* a, const {b}* b, const {a}* dc, float* c, float* da, float* db, int m, int n, int k) {{
  constexpr int kM = {m}, kN = {n}, kK = {k};
  extern __shared__ __align__(1024) unsigned char shared[];
  mm::TileA& tile_a = *reinterpret_cast<mm::TileA*>(shared);
  mm::TileB& tile_b = *reinterpret_cast<mm::TileB*>(shared + sizeof(mm::TileA));
  mm::TileDC& tile_dc = *reinterpret_cast<mm::TileDC*>(shared + sizeof(mm::TileA) + sizeof(mm::TileB));

  const auto load_a = [&](int row, int column) {{
    tile_a.Load(a + {at_a}, {lda}{rest_a});
  }};
  const auto load_b = [&](int row, int column) {{
    tile_b.Load(b + {at_b}, {ldb}{rest_b});
  }};
  const auto load_dc = [&](int row, int column) {{
    tile_dc.Load(dc + static_cast<long long>(row) * n + column, n{rest_dc});
  }};
  const auto wait = [] {{
    CommitLoads();
    WaitForLoads();
    Sync();
  }};
  const int x = blockIdx.x, y = blockIdx.y;

{directions}}}
"""

_DIRECTION = """\
  if constexpr (mm::has_{direction}) {{
    const int row = x * {rows}, column = y * {columns};
    if (row < {m} && column < {n}) {{
      mm::{sum} sum;
      sum.Clear();
#pragma unroll 1
      for (int i = 0; i < {k}; i += {step}) {{
        {loads}
        wait();
        mm::{call};
        __syncthreads();
      }}
      sum.Store({result} + static_cast<long long>(row) * {n} + column, {n}{rest});
    }}
  }}
"""

_DIRECTIONS = {
    "forward": ("c", "SumC", "m", "n", "k", "load_a(row, i); load_b(i, column);", "forward(sum, tile_a, tile_b)"),
    "dA": ("da", "SumDA", "m", "k", "n", "load_dc(row, i); load_b(column, i);", "dA(sum, tile_dc, tile_b)"),
    "dB": ("db", "SumDB", "k", "n", "m", "load_a(i, row); load_dc(i, column);", "dB(sum, tile_a, tile_dc)"),
}


def source(mm, *, is_ragged: bool = False) -> str:
    """The kernel `layer` for a matmul named "mm".

    Args:
      mm: a TileMatmul.
      is_ragged: whether m, n and k need not be multiples of the tile's.
    """
    by_row = "static_cast<long long>(row) * {0} + column"
    by_column = "static_cast<long long>(column) * {0} + row"
    a_is_row, b_is_row = (layout == "row" for layout in mm.layouts)
    lda, ldb = ("k" if a_is_row else "m"), ("n" if b_is_row else "k")
    rests = {"a": ", m - row, k - column", "b": ", k - row, n - column", "dc": ", m - row, n - column"}
    directions = ""
    for direction in mm.plans:
        result, sum_type, m, n, k, loads, call = _DIRECTIONS[direction]
        directions += _DIRECTION.format(
            direction=direction,
            result=result,
            sum=sum_type,
            m=m,
            n=n,
            k=k,
            rows=f"k{m.upper()}",
            columns=f"k{n.upper()}",
            step=f"k{k.upper()}",
            loads=loads,
            call=call,
            rest=f", {m} - row, {n} - column" if is_ragged else "",
        )
    return _SOURCE.format(
        directions=directions,
        a=_ELEMENTS[mm.a],
        b=_ELEMENTS[mm.b],
        m=mm.m,
        n=mm.n,
        k=mm.k,
        threads=mm.threads,
        lda=lda,
        ldb=ldb,
        at_a=(by_row if a_is_row else by_column).format(lda),
        at_b=(by_row if b_is_row else by_column).format(ldb),
        **{f"rest_{name}": rest if is_ragged else "" for name, rest in rests.items()},
    )


def shared_bytes(mm) -> int:
    return sum(mm.tile_bytes.values())


def grid(mm, m: int, n: int, k: int) -> tuple[int, int]:
    """Blocks that cover c, da and db."""
    return max(-(-m // mm.m), -(-k // mm.k)), max(-(-n // mm.n), -(-k // mm.k))
