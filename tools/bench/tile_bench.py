"""What a tile matmul costs in a kernel: c = a @ b in bf16 with sw.tile, next to the same kernel written by hand.

    python tools/bench/tile_bench.py [--size=4096] [--rounds=30]

with Stoneware and torch on PYTHONPATH, on a GPU of Hopper. Both kernels have the same tile, threads, stages and loads
(cp.async, two matmuls in flight). The one by hand has its wgmma instructions, descriptors, swizzle and stores in its
own text, and calls nothing. torch.mm and sw.matmul, whose kernels load by TMA and stay resident, show the distance to
the fastest. Times are medians of interleaved rounds. Operands that fit stay in L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from absl import app, flags

import stoneware as sw

_SIZE = flags.DEFINE_integer("size", 4096, "m, n and k of the matmul; a multiple of 256.")
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds, each of which times every kernel.", lower_bound=1)

TILES = ((128, 128, 128), (128, 128, 256), (128, 256, 256), (256, 128, 256))
"""m, n and threads; k is 64."""

_STAGES = 4

_BY_TILE = """
using namespace stoneware::tile;
extern "C" __global__ void __launch_bounds__(THREADS, 1)
by_tile(const Bf16* a, const Bf16* b, Bf16* c, int n, int k) {
  constexpr int kStages = 4, kAhead = 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  mm::TileA* tiles_a = reinterpret_cast<mm::TileA*>(shared);
  mm::TileB* tiles_b = reinterpret_cast<mm::TileB*>(tiles_a + kStages);
  const long long row = blockIdx.y * TILE_Mll;
  const int column = blockIdx.x * TILE_N;
  a += row * k;
  b += column;
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
#pragma unroll 1
  for (int i = 1; i * 64 < k; ++i) {
    WaitForLoads<kAhead - 1>();
    Sync();
    load(i + kAhead);
    mm::start_forward(sum, tiles_a[i % kStages], tiles_b[i % kStages]);
    WaitForMatmuls<1>(sum);
  }
  WaitForMatmuls(sum);
  sum.Store(c + row * n + column, n);
}
"""

_BY_HAND = """
// Rows of 128 bytes, of which 16-byte chunk j of row r is at j ^ r % 8. b has slabs of 64 columns.
__device__ __forceinline__ unsigned Place(int row, int chunk) { return row * 128 + ((chunk ^ row) & 7) * 16; }

__device__ __forceinline__ void Copy(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void Multiply(float (&sums)[TILE_N / 2], unsigned long long a, unsigned long long b) {
  asm volatile("WGMMA" : OPERANDS : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
by_hand(const unsigned short* a, const unsigned short* b, unsigned short* c, int n, int k) {
  constexpr int kGroups = THREADS / 128, kRowBlocks = TILE_M / 64 / kGroups;
  constexpr unsigned kBytesA = TILE_M * 128, kBytesB = TILE_N * 128, kStages = 4, kAhead = 2;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned at_a = static_cast<unsigned>(__cvta_generic_to_shared(shared)), at_b = at_a + kStages * kBytesA;
  const int thread = threadIdx.x;
  const long long row = blockIdx.y * TILE_Mll;
  const int column = blockIdx.x * TILE_N;
  constexpr int kStepA = THREADS / 8, kStepB = THREADS * 8 / TILE_N;
  const unsigned short* from_a = a + (row + thread / 8) * k + thread % 8 * 8;
  const int line_b = thread / (TILE_N / 8);
  const unsigned short* from_b = b + static_cast<long long>(line_b) * n + column + thread % (TILE_N / 8) * 8;
  const unsigned to_a = Place(thread / 8, thread % 8);
  const unsigned to_b = thread % (TILE_N / 8) / 8 * 8192;

  const auto load = [&](int i) {
    if (i * 64 < k) {
      const unsigned stage_a = at_a + i % kStages * kBytesA, stage_b = at_b + i % kStages * kBytesB;
#pragma unroll
      for (int j = 0; j < TILE_M / kStepA; ++j) {
        Copy(stage_a + to_a + j * kStepA * 128, from_a + j * kStepA * static_cast<long long>(k));
      }
      from_a += 64;
#pragma unroll
      for (int j = 0; j < 64 / kStepB; ++j) {
        const unsigned to = stage_b + to_b + Place(line_b + j * kStepB, thread % 8);
        Copy(to, from_b + j * kStepB * static_cast<long long>(n));
      }
      from_b += 64ll * n;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sums[kRowBlocks][TILE_N / 2] = {};
  const auto start = [&](int i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    load(i + kAhead);
    const unsigned group = thread / 128 * kRowBlocks * 64 * 128;
    const unsigned long long desc_a =
        (at_a + i % kStages * kBytesA + group) >> 4 & 0x3fff | 1ull << 16 | 64ull << 32 | 1ull << 62;
    const unsigned long long desc_b =
        (at_b + i % kStages * kBytesB) >> 4 & 0x3fff | 512ull << 16 | 64ull << 32 | 1ull << 62;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int j = 0; j < TILE_N / 2; ++j) asm volatile("" : "+f"(sums[r][j])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) Multiply(sums[r], desc_a + step * 2 + r * 512, desc_b + step * 128);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  };
  const auto wait = [&] {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
      for (int j = 0; j < TILE_N / 2; ++j) asm volatile("" : "+f"(sums[r][j])::"memory");
  };

  for (int i = 0; i < kAhead; ++i) load(i);
  start(0);
#pragma unroll 1
  for (int i = 1; i * 64 < k; ++i) {
    start(i);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    wait();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  wait();
  const int first = (thread / 128 * kRowBlocks * 64) + thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r)
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j += 2) {
      const long long to = (row + first + r * 64 + j % 4 / 2 * 8) * n + column + j / 4 * 8 + thread % 4 * 2;
      unsigned pair;
      asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(sums[r][j]), "f"(sums[r][j + 1]));
      *reinterpret_cast<unsigned*>(c + to) = pair;
    }
}
"""


class LinkedKernel(NamedTuple):
    """A kernel, and the bytes of shared memory that it needs."""

    linked: sw.tile.Linked
    shared_bytes: int


def kernels(m: int, n: int, threads: int) -> dict[str, LinkedKernel]:
    """Both kernels with a tile; raises RuntimeError if the compiler made wgmma wait."""
    mm = sw.tile.matmul(m=m, n=n, k=64, a="bf16", b="bf16", threads=threads, arch="sm_90a")
    num = n // 2
    registers = ", ".join(f"%{i}" for i in range(num))
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, %{num}, %{num + 1}, 1, 1, 1, 0, 1;"
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(num))
    result = {}
    for name, text in (("by_tile", _BY_TILE), ("by_hand", _BY_HAND)):
        for word, value in (
            ("WGMMA", wgmma),
            ("OPERANDS", operands),
            ("THREADS", threads),
            ("TILE_M", m),
            ("TILE_N", n),
        ):
            text = text.replace(word, str(value))
        linked = sw.tile.link(text, [mm])
        if linked.log:
            raise RuntimeError(f"{name} of {m}x{n}, {threads} threads: {linked.log}")
        result[name] = LinkedKernel(linked, _STAGES * (mm.tile_bytes["A"] + mm.tile_bytes["B"]))
    return result


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / 5)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main(argv: Sequence[str]) -> None:
    del argv
    size = _SIZE.value
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(a, b, out=out),
        "sw.matmul": lambda: sw.matmul(a, b, out=out),
    }
    expected = torch.mm(a, b).float()
    for m, n, threads in TILES:
        for name, (linked, shared_bytes) in kernels(m, n, threads).items():
            kernel = sw.tile.Kernel(linked, shared_bytes=shared_bytes)

            def call(kernel=kernel, grid=(size // n, size // m)) -> None:
                kernel(a, b, out, size, size, grid=grid)

            out.fill_(float("nan"))
            call()
            error = float((out.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"{name} of {m}x{n}, {threads} threads is wrong by {error:.1e}"
            calls[f"{m}x{n}, {threads} threads, {name}"] = call
    times = medians(calls, _ROUNDS.value)
    print(torch.cuda.get_device_name(), f"m = n = k = {size}, bf16")
    for name, time_us in times.items():
        print(f"{name:32} {time_us:9.1f} us {2 * size**3 / time_us / 1e6:7.1f} TFLOP/s")
    for m, n, threads in TILES:
        title = f"{m}x{n}, {threads} threads"
        print(f"{title}: by hand / by tile = {times[title + ', by_hand'] / times[title + ', by_tile']:.3f}")


if __name__ == "__main__":
    app.run(main)
