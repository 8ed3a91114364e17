"""Tile matmuls are right in each direction: dtypes, layouts, instructions, shapes that are no multiples of a tile."""

from __future__ import annotations

import itertools
import math

import pytest
import tile_layer
import torch

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.linking import toolchain
from stoneware.specs import tolerance
from stoneware.tile.plan import DIRECTIONS

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
LAYOUTS = list(itertools.product(("row", "col"), repeat=2))


@pytest.fixture(autouse=True)
def _can_link(device):
    reason = toolchain.why_missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="module")
def _own_cubins(tmp_path_factory):
    """Linked cubins of this run alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STONEWARE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def archs() -> list[str]:
    """Those that this GPU runs: on Hopper with wgmma, and without."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return ["sm_90a", "sm_90"] if (major, minor) == (9, 0) else [f"sm_{major}{minor}"]


def cases() -> list[tuple]:
    """(arch, a, b, layouts, (m, n, k), threads)."""
    found: list[tuple] = []
    for arch in archs():
        sizes = [((64, 64, 64), 128), ((128, 96, 64), 128), ((64, 128, 32), 128), ((128, 256, 64), 256)]
        sizes += [((128, 64, 128), 256), ((64, 48, 80), 128), ((192, 48, 64), 384)]
        for (a, layouts), (size, threads) in itertools.product(itertools.product(("bf16", "fp16"), LAYOUTS), sizes):
            found.append((arch, a, a, layouts, size, threads))
        for size, threads in (((16, 16, 16), 32), ((48, 80, 32), 32), ((32, 64, 64), 64)):
            found += [(arch, "bf16", "bf16", layouts, size, threads) for layouts in LAYOUTS]
        for layouts, size in itertools.product(LAYOUTS, ((64, 64, 32), (128, 64, 64), (64, 32, 48))):
            found.append((arch, "tf32", "tf32", layouts, size, 128))
        for a, b, size in itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2"), ((64, 64, 64), (128, 128, 128))):
            if int(arch[3:].rstrip("a")) >= 89:
                found.append((arch, a, b, ("row", "col"), size, size[0] * 2))
    return found


def matrix(rows: int, columns: int, dtype: str, layout: str = "row") -> torch.Tensor:
    """Random numbers that the tensor cores see as they are."""
    shape = (rows, columns) if layout == "row" else (columns, rows)
    values = torch.randn(shape, device="cuda")
    if dtype == "tf32":
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    values = values.to(DTYPES[dtype])
    return values if layout == "row" else values.T


def guarded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A result [rows, columns] of NaN, and the memory behind it, which must stay NaN."""
    base = torch.full((rows * columns + 4096,), math.nan, device="cuda")
    return base[: rows * columns].view(rows, columns), base[rows * columns :]


def check(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: str) -> None:
    expected = left.double() @ right.double()
    error = (result.double() - expected).norm() / expected.norm()
    assert error <= tolerance.on_gpu(dtype, "fp32", left.shape[1]), f"relative error {error:.2e}"
    rms = expected.square().mean(1, keepdim=True).sqrt()
    worst = ((result.double() - expected).abs() / rms).max()
    assert worst < tolerance.MAX_ELEMENT_ERROR, f"an element is wrong by {worst:.2e} of its row's rms"


def run(mm, m: int, n: int, k: int, *, is_ragged: bool, needs=None) -> None:
    """Computes every direction, and compares it with float64."""
    directions = [name for name in DIRECTIONS if name in mm.plans and (needs is None or name in needs)]
    linked = sw.tile.link(tile_layer.source(mm, is_ragged=is_ragged), [mm], needs=needs)
    assert [direction for _, direction in linked.matmuls] == sorted(directions)
    kernel = sw.tile.Kernel(linked, shared_bytes=tile_layer.shared_bytes(mm))
    a, b, dc = matrix(m, k, mm.a, mm.layouts[0]), matrix(k, n, mm.b, mm.layouts[1]), matrix(m, n, mm.a)
    results = {"forward": guarded(m, n), "dA": guarded(m, k), "dB": guarded(k, n)}
    outputs = [result for result, _ in results.values()]
    kernel(a, b, dc, *outputs, m, n, k, grid=tile_layer.grid(mm, m, n, k))
    torch.cuda.synchronize()
    operands = {"forward": (a, b), "dA": (dc, b.T), "dB": (a.T, dc)}
    for name, (result, behind) in results.items():
        assert bool(behind.isnan().all()), f"{name} wrote behind its result"
        if name in directions:
            check(result, *operands[name], mm.a)
        else:
            assert bool(result.isnan().all()), f"{name} is not linked, and was computed"


def case_id(case: tuple) -> str:
    arch, a, b, layouts, size, threads = case
    return f"{arch}-{a}-{b}-{'-'.join(layouts)}-{'x'.join(map(str, size))}-{threads}"


@pytest.mark.parametrize("case", cases(), ids=case_id)
@pytest.mark.parametrize("is_ragged", [False, True], ids=["whole", "ragged"])
def test_each_direction_agrees_with_float64(case, is_ragged):
    arch, a, b, layouts, (m, n, k), threads = case
    mm = sw.tile.matmul(m=m, n=n, k=k, a=a, b=b, layouts=layouts, threads=threads, arch=arch)
    if is_ragged:
        run(mm, 3 * m - 16, 2 * n + 16, 3 * k - 16, is_ragged=True)
    else:
        run(mm, 2 * m, 3 * n, 4 * k, is_ragged=False)


@pytest.mark.parametrize("arch", archs())
@pytest.mark.parametrize(
    "needs",
    [frozenset(names) for num in (1, 2, 3) for names in itertools.combinations(DIRECTIONS, num)],
    ids=lambda names: "+".join(sorted(names)),
)
def test_each_set_of_needs_is_loaded_and_computes_that_alone(arch, needs):
    mm = sw.tile.matmul(m=64, n=96, k=64, a="bf16", b="bf16", arch=arch)
    run(mm, 192, 288, 128, is_ragged=False, needs=needs)


_TWO_MATMULS = """
using namespace stoneware::tile;
extern "C" __global__ void __launch_bounds__(128)
chain(const {element}* x, const {element}* w1, const {element}* w2, float* y, {element}* copy) {{
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& x_tile = *reinterpret_cast<first::TileA*>(shared);
  auto& w1_tile = *reinterpret_cast<first::TileB*>(&x_tile + 1);
  auto& h_tile = *reinterpret_cast<second::TileA*>(&w1_tile + 1);
  auto& w2_tile = *reinterpret_cast<second::TileB*>(&h_tile + 1);
  x_tile.Load(x, 64);
  w1_tile.Load(w1, 96);
  w2_tile.Load(w2, 64);
  CommitLoads();
  WaitForLoads();
  Sync();
  first::SumC h;
  h.Clear();
  first::forward(h, x_tile, w1_tile);
  h.ForEach([](int row, int column, float& value) {{ value = row == column ? 1.0f : fmaxf(value, 0.0f); }});
  h.Store(h_tile);
  Sync();
  h_tile.Store(copy, 96);
  second::SumC sum;
  sum.Clear();
  second::start_forward(sum, h_tile, w2_tile);
  WaitForMatmuls(sum);
  sum.Store(y, 64);
}}
"""


@pytest.mark.parametrize("arch", archs())
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_sums_of_one_matmul_are_the_operand_of_the_next(arch, dtype):
    """Also: positions by ForEach, sums to a tile, a tile to memory."""
    first = sw.tile.matmul(m=64, n=96, k=64, a=dtype, b=dtype, arch=arch, name="first")
    second = sw.tile.matmul(m=64, n=64, k=96, a=dtype, b=dtype, arch=arch, name="second")
    text = _TWO_MATMULS.format(element={"bf16": "Bf16", "fp16": "Fp16"}[dtype])
    shared = sum(sum(mm.tile_bytes[name] for name in "AB") for mm in (first, second))
    kernel = sw.tile.Kernel(sw.tile.link(text, [first, second]), shared_bytes=shared)
    x, w1, w2 = matrix(64, 64, dtype), matrix(64, 96, dtype), matrix(96, 64, dtype)
    y, copy = torch.full((64, 64), math.nan, device="cuda"), torch.zeros(64, 96, dtype=DTYPES[dtype], device="cuda")
    kernel(x, w1, w2, y, copy, grid=(1,))
    hidden = (x.double() @ w1.double()).relu()
    hidden.fill_diagonal_(1.0)
    assert (copy.double() - hidden).norm() <= 2 * tolerance.OUTPUT_ROUNDING[dtype] * hidden.norm()
    check(y, copy, w2, dtype)


_PIPELINE = """
using namespace stoneware::tile;
extern "C" __global__ void __launch_bounds__(256) pipeline(const Bf16* a, const Bf16* b, float* c, int n, int k) {
  constexpr int kStages = 4, kAhead = 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  mm::TileA* tiles_a = reinterpret_cast<mm::TileA*>(shared);
  mm::TileB* tiles_b = reinterpret_cast<mm::TileB*>(tiles_a + kStages);
  a += blockIdx.x * 128ll * k;
  b += blockIdx.y * 128;
  const auto load = [&](int i) {
    if (i * 64 < k) {
      tiles_a[i % kStages].Load(a + i * 64, k);
      tiles_b[i % kStages].Load(b + i * 64ll * n, n);
    }
    CommitLoads();
  };
  for (int i = 0; i < kAhead; ++i) load(i);
  mm::SumC sum;
  sum.Clear();
  WaitForLoads<kAhead - 1>();
  Sync();
  load(kAhead);
  mm::start_forward(sum, tiles_a[0], tiles_b[0]);
  for (int i = 1; i * 64 < k; ++i) {
    WaitForLoads<kAhead - 1>();
    Sync();
    load(i + kAhead);
    mm::start_forward(sum, tiles_a[i % kStages], tiles_b[i % kStages]);
    WaitForMatmuls<1>(sum);
  }
  WaitForMatmuls(sum);
  sum.Store(c + blockIdx.x * 128ll * n + blockIdx.y * 128, n);
}
"""


@pytest.mark.parametrize("arch", archs())
def test_loads_and_two_matmuls_run_at_the_same_time(arch):
    mm = sw.tile.matmul(m=128, n=128, k=64, a="bf16", b="bf16", threads=256, arch=arch)
    linked = sw.tile.link(_PIPELINE, [mm])
    assert linked.log == ""  # nothing is serialized
    kernel = sw.tile.Kernel(linked, shared_bytes=4 * (mm.tile_bytes["A"] + mm.tile_bytes["B"]))
    a, b = matrix(512, 1024, "bf16"), matrix(1024, 384, "bf16")
    c, behind = guarded(512, 384)
    for k in (64, 128, 192, 1024):
        kernel(a[:, :k].contiguous(), b[:k], c, 384, k, grid=(4, 3))
        check(c, a[:, :k], b[:k], "bf16")
    assert bool(behind.isnan().all())


_SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, long long n, int step) {
  const long long i = (blockIdx.x + static_cast<long long>(gridDim.x) * blockIdx.y) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i] + step;
}
"""


@pytest.fixture
def scale(device):
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", arch=archs()[0])
    return sw.tile.Kernel(sw.tile.link(_SCALE, [mm]))


def test_a_launch_is_on_the_current_stream_and_in_graphs(scale):
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    scale(x, y, 2.0, 1000, -3, grid=(2, 4))
    assert torch.equal(y, 2 * x - 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, y, 0.5, 1000, 1, grid=(8,))
    x.copy_(torch.randn(1000, device="cuda"))
    graph.replay()
    assert torch.equal(y, 0.5 * x + 1)


def test_wrong_arguments_are_refused(scale):
    x = torch.randn(64, device="cuda")
    with pytest.raises(TypeError, match="scale must have 5 arguments, and got 1; pass one for each parameter"):
        scale(x, grid=(1,))
    with pytest.raises(ValueError, match="argument 1 of scale must be on a GPU, and is on cpu; move it there"):
        scale(x, x.cpu(), 1.0, 64, 0, grid=(1,))
    with pytest.raises(TypeError, match="argument 4 of scale must be a number of 32 bits, and is a tensor"):
        scale(x, x, 1.0, 64, x, grid=(1,))
    with pytest.raises(ValueError, match=r"grid=\(0,\) must be one to three positive ints"):
        scale(x, x, 1.0, 64, 0, grid=(0,))


def test_a_kernel_for_another_gpu_is_refused():
    other = "sm_80" if torch.cuda.get_device_capability()[0] != 8 else "sm_90a"
    mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", arch=other)
    kernel = sw.tile.Kernel(sw.tile.link(_SCALE, [mm]))
    x = torch.randn(64, device="cuda")
    with pytest.raises(UnsupportedError, match=f"scale was linked for {other}, and cuda:0 has compute capability"):
        kernel(x, x, 1.0, 64, 0, grid=(1,))
