// The device side of one config: a cubin with one kernel, named by the config's id.
// grouped_mm_sm90.cuh says what it computes; grouped_mm_sm90.cc is its host side.
//
// Warp group 0 loads, one thread of it; the other two multiply. They meet at two barriers for each
// stage of the ring in shared memory: `full` (the bytes have come) and `empty` (every warp that
// multiplies the stage is done with it). Loader and multipliers walk the same tiles, so that the
// number of the step within the block gives the stage and the phase of its barriers on both sides.

#include "cc/gemm/grouped_mm_sm90.cuh"

#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/transpose_sm90.cuh"

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace stoneware::gemm::sm90 {
namespace {

namespace dtype {
using e4m3 = cutlass::float_e4m3_t;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
}  // namespace dtype

using Operand = dtype::STONEWARE_OPERAND;
using Out = dtype::STONEWARE_OUT;
static_assert(sizeof(Operand) == kOperandBytes && sizeof(Out) == kOutBytes);

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

constexpr int kWarpsPerGroup = kThreadsPerGroup / 32;

// Registers a thread: 40 * 128 + 2 * 232 * 128 of the 65536 of an SM.
constexpr int kLoaderRegisters = 40;
constexpr int kMultiplierRegisters = 232;

// Named barriers, beyond the one of __syncthreads, on which a warp group of pingpong waits for its
// turn.
constexpr int kTurnBarrier = 1;

using MmaTile =
    cute::Shape<cute::Int<kTileRows>, cute::Int<kTileColumns>, cute::Int<kTileK>>;
using TiledMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Operand, Operand, float, MmaTile>(),
    cute::Layout<cute::Shape<cute::Int<kConsumersPerTile>, cute::_1, cute::_1>>{}));

// [row, k, stage] in shared memory: for each stage a slab of 128 bytes of k after the other, each
// as one TMA box writes it.
using SwizzleAtom = cute::GMMA::Layout_K_SW128_Atom<Operand>;
using RowLayout = decltype(cute::tile_to_shape(
    SwizzleAtom{},
    cute::Shape<cute::Int<kTileRows>, cute::Int<kTileK>, cute::Int<kStages>>{}));
using ColumnLayout = decltype(cute::tile_to_shape(
    SwizzleAtom{},
    cute::Shape<cute::Int<kTileColumns>, cute::Int<kTileK>, cute::Int<kStages>>{}));
static_assert(cute::cosize_v<RowLayout> * kOperandBytes == kStages * kRowStageBytes);
static_assert(cute::cosize_v<ColumnLayout> * kOperandBytes == kStages * kColumnStageBytes);

// Where things are in the block's shared memory.
struct Shared {
  char* base;

  __device__ Operand* rows() const { return reinterpret_cast<Operand*>(base); }
  __device__ Operand* columns() const {
    return reinterpret_cast<Operand*>(base + kStages * kRowStageBytes);
  }
  __device__ std::uint64_t* full(int stage) const {
    return reinterpret_cast<std::uint64_t*>(base + kStages * kStageBytes) + stage;
  }
  __device__ std::uint64_t* empty(int stage) const { return full(kMaxStages) + stage; }
  __device__ int* m_tile_ends() const {
    return reinterpret_cast<int*>(base + kStages * kStageBytes + kBarrierBytes);
  }
  __device__ int* offsets() const { return m_tile_ends() + kMaxGroups; }
};

// Fills the table: offsets, and the ends of the groups in tiles along m. Called by the whole block.
__device__ void MakeTable(const Params& params, const Shared& shared) {
  int* const offsets = shared.offsets();
  int* const ends = shared.m_tile_ends();
  for (int group = threadIdx.x; group < params.num_groups; group += kNumThreads) {
    offsets[group] = params.offsets[group];
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Each lane counts a run of groups, the lanes sum up to their run, each writes its run.
    const int lane = threadIdx.x;
    const int run = (params.num_groups + 31) / 32;
    const int begin = min(lane * run, params.num_groups);
    const int end = min(begin + run, params.num_groups);
    int count = 0;
    for (int group = begin; group < end; ++group) {
      const GroupRows rows = RowsOfGroup(offsets, group, params.m);
      count += NumTiles(rows.end - rows.begin, kTileM);
      ends[group] = count;
    }
    int sum = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    for (int group = begin; group < end; ++group) ends[group] += sum - count;
  }
  __syncthreads();
}

// One tile of the walk with its places in the tensors.
struct Tile {
  int group;
  int m_begin;
  int m_end;  // the group's, not the tile's
  int n_begin;
};

__device__ Tile FindTile(const Params& params, const Shared& shared, int num_n_tiles, int tile) {
  const GroupTile found =
      TileAt(tile, shared.m_tile_ends(), params.num_groups, num_n_tiles, params.band);
  const GroupRows rows = RowsOfGroup(shared.offsets(), found.group, params.m);
  return {found.group, rows.begin + found.m_idx * kTileM, rows.end, found.n_idx * kTileN};
}

// Runs on one thread.
__device__ void Load(const Params& params, const Shared& shared, int num_tiles, int num_n_tiles,
                     int num_steps) {
  const auto keep = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  RingPosition<kStages> ring;
  for (int tile_idx = blockIdx.x; tile_idx < num_tiles; tile_idx += gridDim.x) {
    const Tile tile = FindTile(params, shared, num_n_tiles, tile_idx);
    for (int step = 0; step < num_steps; ++step) {
      std::uint64_t* const full = shared.full(ring.stage);
      // At the first round the stage is empty: the parity before the first counts as passed.
      EmptyBarrier::wait(shared.empty(ring.stage), ring.parity ^ 1);
      // Boxes that reach over the ends of a tensor bring as many bytes, zeros there.
      FullBarrier::arrive_and_expect_tx(full, kStageBytes);
      Operand* rows = shared.rows() + ring.stage * (kTileRows * kTileK);
      Operand* columns = shared.columns() + ring.stage * (kTileColumns * kTileK);
      for (int slab = 0; slab < kNumSlabs; ++slab) {
        const int k = step * kTileK + slab * kSlabK;
        if constexpr (kSwapAb) {
          cute::SM90_TMA_LOAD_3D::copy(&params.rows, full, keep, rows, k, tile.n_begin,
                                       tile.group);
          cute::SM90_TMA_LOAD_2D::copy(&params.columns, full, keep, columns, k, tile.m_begin);
        } else {
          cute::SM90_TMA_LOAD_2D::copy(&params.rows, full, keep, rows, k, tile.m_begin);
          cute::SM90_TMA_LOAD_3D::copy(&params.columns, full, keep, columns, k, tile.n_begin,
                                       tile.group);
        }
        rows += kTileRows * kSlabK;
        columns += kTileColumns * kSlabK;
      }
      ring.Advance();
    }
  }
}

__device__ void StoreEight(const Params& params, int m, int n, const unsigned (&words)[4]) {
  Out* const target = static_cast<Out*>(params.d) + m * params.ldd + n;
  *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ float ScaleOfRow(const Params& params, const Tile& tile, int m) {
  return params.scale_a != nullptr && m < tile.m_end ? __ldg(params.scale_a + m) : 1.0f;
}

__device__ float ScaleOfColumn(const Params& params, const Tile& tile, int n) {
  return params.scale_b != nullptr && n < params.n
             ? __ldg(params.scale_b + static_cast<std::int64_t>(tile.group) * params.n + n)
             : 1.0f;
}

// Scales, rounds and stores the accumulators of one warp group. A thread holds, of each 64 x 8
// block, columns 2 * (lane % 4) and the next of row 16 * warp + lane / 4 and of the row 8 later
// (PTX ISA, "wgmma: Register Fragments and Shared Memory Matrix Layouts", accumulator D).
template <class Accumulators>
__device__ void Store(const Params& params, const Tile& tile, const Accumulators& accumulators,
                      int consumer_idx) {
  const int lane = threadIdx.x % 32;
  const int quad_lane = lane % 4;
  const int warp = threadIdx.x / 32 % kWarpsPerGroup;
  constexpr int kNumBlocks = kTileColumns / 8;
  constexpr int kNumSteps = kTileRows / (64 * kConsumersPerTile);
  const auto value = [&](int column, int half, int block, int row_step) {
    return accumulators(cute::make_coord(column, half, block), row_step, 0);
  };
#pragma unroll
  for (int row_step = 0; row_step < kNumSteps; ++row_step) {
    const int row = (row_step * kConsumersPerTile + consumer_idx) * 64 + warp * 16;
    if constexpr (!kSwapAb) {
      static_assert(kSwapAb || kNumBlocks % 4 == 0);
      const int m[2] = {tile.m_begin + row + lane / 4, tile.m_begin + row + lane / 4 + 8};
      const float scale_a[2] = {ScaleOfRow(params, tile, m[0]), ScaleOfRow(params, tile, m[1])};
#pragma unroll
      for (int block = 0; block < kNumBlocks; block += 4) {
        unsigned words[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = tile.n_begin + (block + i) * 8 + 2 * quad_lane;
          const float scale_b[2] = {ScaleOfColumn(params, tile, n),
                                    ScaleOfColumn(params, tile, n + 1)};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            words[half][i] =
                Pack<Out>(value(0, half, block + i, row_step) * scale_a[half] * scale_b[0],
                     value(1, half, block + i, row_step) * scale_a[half] * scale_b[1]);
          }
        }
        // Lane q of the quad gets all eight columns of block + q.
        const int n = tile.n_begin + (block + quad_lane) * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          TransposeInQuad(words[half], quad_lane);
          if (m[half] < tile.m_end && n < params.n) StoreEight(params, m[half], n, words[half]);
        }
      }
    } else {
      static_assert(!kSwapAb || kNumBlocks % 2 == 0);
      const int n_begin = tile.n_begin + row;
      const float scale_b[2] = {ScaleOfColumn(params, tile, n_begin + lane / 4),
                                ScaleOfColumn(params, tile, n_begin + lane / 4 + 8)};
#pragma unroll
      for (int block = 0; block < kNumBlocks; block += 2) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int m = tile.m_begin + (block + i) * 8 + 2 * quad_lane;
          const float scale_a[2] = {ScaleOfRow(params, tile, m), ScaleOfRow(params, tile, m + 1)};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            words[2 * i + half] = TransposeInWarp(
                Pack<Out>(value(0, half, block + i, row_step) * scale_a[0] * scale_b[half],
                     value(1, half, block + i, row_step) * scale_a[1] * scale_b[half]));
          }
        }
        // Word 2 * i + half holds row lane / 4 of block + i, n of `half`. Lane q of the quad gets
        // the eight n of half q % 2 of that row of block + q / 2.
        TransposeInQuad(words, quad_lane);
        const int m = tile.m_begin + (block + quad_lane / 2) * 8 + lane / 4;
        const int n = n_begin + (quad_lane % 2) * 8;
        if (m < tile.m_end && n < params.n) StoreEight(params, m, n, words);
      }
    }
  }
}

// Runs on a warp group; `consumer_idx` is its position among those that multiply.
__device__ void Multiply(const Params& params, const Shared& shared, int num_tiles,
                         int num_n_tiles, int num_steps, int consumer_idx) {
  using namespace cute;
  const bool is_arriving = threadIdx.x % 32 == 0;
  const int idx_in_tile = kIsPingpong ? 0 : consumer_idx;

  Tensor rows = make_tensor(make_smem_ptr(shared.rows()), RowLayout{});
  Tensor columns = make_tensor(make_smem_ptr(shared.columns()), ColumnLayout{});
  TiledMma mma;
  const auto slice = mma.get_slice(idx_in_tile * kThreadsPerGroup);
  Tensor row_fragments = slice.make_fragment_A(slice.partition_A(rows));
  Tensor column_fragments = slice.make_fragment_B(slice.partition_B(columns));
  Tensor accumulators =
      partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kTileColumns>>{});
  static_assert(size(accumulators) == kTileRows * kTileColumns /
                                          (kConsumersPerTile * kThreadsPerGroup));

  RingPosition<kStages> ring;
  int tile_idx = blockIdx.x;
  int stride = gridDim.x;
  if constexpr (kIsPingpong) {
    tile_idx += consumer_idx * gridDim.x;
    stride *= kNumConsumers;
    ring.Advance(consumer_idx * num_steps);
    // The first warp group begins as if the second had just multiplied a tile.
    if (consumer_idx == 1) {
      cutlass::arch::NamedBarrier::arrive(kNumConsumers * kThreadsPerGroup, kTurnBarrier);
    }
  }
  for (; tile_idx < num_tiles; tile_idx += stride) {
    const Tile tile = FindTile(params, shared, num_n_tiles, tile_idx);
    if constexpr (kIsPingpong) {
      // Not before the other one has waited for every step before these: a barrier tells only two
      // phases apart.
      cutlass::arch::NamedBarrier::sync(kNumConsumers * kThreadsPerGroup,
                                        kTurnBarrier + consumer_idx);
    }
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int last_stage = 0;
    for (int step = 0; step < num_steps; ++step) {
      FullBarrier::wait(shared.full(ring.stage), ring.parity);
      warpgroup_fence_operand(accumulators);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k_block = 0; k_block < size<2>(row_fragments); ++k_block) {
        cute::gemm(mma, row_fragments(_, _, k_block, ring.stage),
                   column_fragments(_, _, k_block, ring.stage), accumulators);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      // All but the newest step are done: the one before gives its stage back.
      warpgroup_wait<1>();
      warpgroup_fence_operand(accumulators);
      if (step > 0 && is_arriving) EmptyBarrier::arrive(shared.empty(last_stage));
      last_stage = ring.stage;
      ring.Advance();
    }
    if constexpr (kIsPingpong) {
      cutlass::arch::NamedBarrier::arrive(kNumConsumers * kThreadsPerGroup,
                                          kTurnBarrier + 1 - consumer_idx);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulators);
    if (is_arriving) EmptyBarrier::arrive(shared.empty(last_stage));
    if constexpr (kIsPingpong) ring.Advance(num_steps);
    Store(params, tile, accumulators, idx_in_tile);
  }
}

__device__ void Run(const Params& params, char* base) {
  const Shared shared{base};
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.rows));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.columns));
    for (int stage = 0; stage < kStages; ++stage) {
      FullBarrier::init(shared.full(stage), 1);
      EmptyBarrier::init(shared.empty(stage), kConsumersPerTile * kWarpsPerGroup);
    }
    cutlass::arch::fence_barrier_init();
  }
  // Ends with a __syncthreads, after which every thread sees table and barriers.
  MakeTable(params, shared);

  const int num_n_tiles = NumTiles(params.n, kTileN);
  const int num_tiles = shared.m_tile_ends()[params.num_groups - 1] * num_n_tiles;
  const int num_steps = NumTiles(params.k, kTileK);
  // The same for all threads of a warp, and known to be.
  const int group_idx = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), 0) /
                        kThreadsPerGroup;
  if (group_idx == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (threadIdx.x == 0) Load(params, shared, num_tiles, num_n_tiles, num_steps);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
    Multiply(params, shared, num_tiles, num_n_tiles, num_steps, group_idx - 1);
  }
}

}  // namespace
}  // namespace stoneware::gemm::sm90

extern "C" __global__ void __launch_bounds__(stoneware::gemm::sm90::kNumThreads, 1)
STONEWARE_KERNEL_ID(__grid_constant__ const stoneware::gemm::sm90::Params params) {
  // The swizzle counts from multiples of 1024 bytes.
  extern __shared__ __align__(1024) char shared_storage[];
  stoneware::gemm::sm90::Run(params, shared_storage);
}
