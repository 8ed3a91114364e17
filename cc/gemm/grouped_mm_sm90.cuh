// The device side of grouped_mm; grouped_mm_sm90.h says what it computes.
//
// Warp group 0 loads, one thread of it; the other two multiply. They meet at two barriers for each
// stage of the ring in shared memory: `full` (its bytes have arrived) and `empty` (every warp that
// multiplies the stage has read it). Loader and multipliers visit the same tiles, so the number of
// the step within the block gives the stage and the phase of its barriers on both sides.

#pragma once

#include <cstdint>

#include "cc/gemm/grouped_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/transpose_sm90.cuh"
#include "cc/gemm/wgmma_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Where things are in the block's shared memory.
template <class Shape>
struct GroupedShared {
  // An element of an operand; only its address matters here.
  struct Element {
    char bytes[Shape::kOperandBytes];
  };

  char* base;

  __device__ Element* rows() const { return reinterpret_cast<Element*>(base); }
  __device__ Element* columns() const {
    return reinterpret_cast<Element*>(base + Shape::kStages * Shape::kRowStageBytes);
  }
  __device__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(base + Shape::kStages * Shape::kStageBytes) + stage;
  }
  __device__ Mbarrier* empty(int stage) const { return full(Shape::kMaxStages) + stage; }
  __device__ int* m_tile_ends() const {
    return reinterpret_cast<int*>(base + Shape::kStages * Shape::kStageBytes +
                                  Shape::kBarrierBytes);
  }
  __device__ int* offsets() const { return m_tile_ends() + kMaxGroups; }
};

// Fills the table: offsets, and the ends of the groups in tiles along m. Called by the whole block.
template <class Shape>
__device__ void MakeTable(const GroupedMmParams& params, const GroupedShared<Shape>& shared) {
  int* const offsets = shared.offsets();
  int* const ends = shared.m_tile_ends();
  for (int group = threadIdx.x; group < params.num_groups; group += Shape::kThreads) {
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
      count += NumTiles(rows.end - rows.begin, Shape::kTileM);
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

// An output tile: where it begins in the tensors.
struct GroupedTileOffset {
  int group;
  int m_begin;
  int m_end;  // the group's, not the tile's
  int n_begin;
};

template <class Shape>
__device__ GroupedTileOffset FindTile(const GroupedMmParams& params,
                                      const GroupedShared<Shape>& shared, int num_n_tiles,
                                      int tile) {
  const GroupTile found =
      TileAt(tile, shared.m_tile_ends(), params.num_groups, num_n_tiles, params.band);
  const GroupRows rows = RowsOfGroup(shared.offsets(), found.group, params.m);
  return {found.group, rows.begin + found.m_idx * Shape::kTileM, rows.end,
          found.n_idx * Shape::kTileN};
}

// Runs on one thread.
template <class Shape>
__device__ void LoadGroups(const GroupedMmParams& params, const GroupedShared<Shape>& shared,
                           int num_tiles, int num_n_tiles, int num_steps) {
  RingPosition<Shape::kStages> ring;
  for (int tile_idx = blockIdx.x; tile_idx < num_tiles; tile_idx += gridDim.x) {
    const GroupedTileOffset tile = FindTile(params, shared, num_n_tiles, tile_idx);
    for (int step = 0; step < num_steps; ++step) {
      Mbarrier* const full = shared.full(ring.stage);
      // In the first round the stage is empty: the phase before the first counts as complete.
      shared.empty(ring.stage)->Wait(ring.parity ^ 1);
      // A box that reaches beyond a tensor has as many bytes, with zeros there.
      full->ArriveAndExpect(Shape::kStageBytes);
      auto* rows = shared.rows() + ring.stage * (Shape::kTileRows * Shape::kTileK);
      auto* columns = shared.columns() + ring.stage * (Shape::kTileColumns * Shape::kTileK);
      for (int slab = 0; slab < Shape::kNumSlabs; ++slab) {
        const int k = step * Shape::kTileK + slab * Shape::kSlabK;
        constexpr CacheHint kHint = CacheHint::kEvictNormal;
        if constexpr (Shape::kSwapAb) {
          LoadBox(&params.rows, full, kHint, rows, k, tile.n_begin, tile.group);
          LoadBox(&params.columns, full, kHint, columns, k, tile.m_begin);
        } else {
          LoadBox(&params.rows, full, kHint, rows, k, tile.m_begin);
          LoadBox(&params.columns, full, kHint, columns, k, tile.n_begin, tile.group);
        }
        rows += Shape::kTileRows * Shape::kSlabK;
        columns += Shape::kTileColumns * Shape::kSlabK;
      }
      ring.Advance();
    }
  }
}

// Scales, rounds and stores the sums of one warp group, laid out as wgmma_sm90.cuh describes.
template <class Shape>
class GroupedTileStore {
 public:
  using Sums = float[Shape::kSums];

  __device__ GroupedTileStore(const GroupedMmParams& params, const GroupedTileOffset& tile)
      : params_(params), tile_(tile) {}

  __device__ void Run(const float (&sums)[Shape::kRowSteps][Shape::kSums], int consumer_idx) const {
    const int warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int step = 0; step < Shape::kRowSteps; ++step) {
      const int row = (step * Shape::kConsumersPerTile + consumer_idx) * 64 + warp * 16;
      if constexpr (Shape::kSwapAb) {
        StoreTransposed(sums[step], tile_.n_begin + row);
      } else {
        StoreStraight(sums[step], tile_.m_begin + row);
      }
    }
  }

 private:
  // Rows run along m: `first_m` is this warp's first.
  __device__ void StoreStraight(const Sums& sums, int first_m) const {
    static_assert(Shape::kTileColumns % 32 == 0);
    const int m[2] = {first_m + lane_ / 4, first_m + lane_ / 4 + 8};
    const float scale_a[2] = {ScaleOfRow(m[0]), ScaleOfRow(m[1])};
    EpilogueState state;
#pragma unroll
    for (int block = 0; block < Shape::kTileColumns / 8; block += 4) {
      unsigned words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = tile_.n_begin + (block + i) * 8 + 2 * quad_lane_;
        const float scale_b[2] = {ScaleOfColumn(n), ScaleOfColumn(n + 1)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (block + i) * 4 + half * 2;
          words[half][i] = Finish(sums[at] * scale_a[half] * scale_b[0],
                                  sums[at + 1] * scale_a[half] * scale_b[1], m[half], n,
                                  {i % 2 * 2 + half, block + i / 2 == 0,
                                   block + i / 2 * 2 + 2 == Shape::kTileColumns / 8},
                                  state);
        }
      }
      // Lane q of the quad gets all eight columns of block + q.
      const int n = tile_.n_begin + (block + quad_lane_) * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        TransposeInQuad(words[half], quad_lane_);
        if (m[half] < tile_.m_end && n < params_.n) StoreEight(m[half], n, words[half]);
      }
    }
  }

  // Rows run along n: `first_n` is this warp's first.
  __device__ void StoreTransposed(const Sums& sums, int first_n) const {
    static_assert(Shape::kTileColumns % 16 == 0);
    const float scale_b[2] = {ScaleOfColumn(first_n + lane_ / 4),
                              ScaleOfColumn(first_n + lane_ / 4 + 8)};
    EpilogueState state;
#pragma unroll
    for (int block = 0; block < Shape::kTileColumns / 8; block += 2) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = tile_.m_begin + (block + i) * 8 + 2 * quad_lane_;
        const float scale_a[2] = {ScaleOfRow(m), ScaleOfRow(m + 1)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (block + i) * 4 + half * 2;
          words[2 * i + half] = TransposeInWarp(
              Finish(sums[at] * scale_a[0] * scale_b[half],
                     sums[at + 1] * scale_a[1] * scale_b[half], m, first_n + lane_ / 4 + 8 * half,
                     {2 * i + half, block == 0, block + 2 == Shape::kTileColumns / 8}, state));
        }
      }
      // Word 2 * i + half holds row lane / 4 of block + i, n of `half`. Lane q of the quad gets the
      // eight n of half q % 2 of that row of block + q / 2.
      TransposeInQuad(words, quad_lane_);
      const int m = tile_.m_begin + (block + quad_lane_ / 2) * 8 + lane_ / 4;
      const int n = first_n + (quad_lane_ % 2) * 8;
      if (m < tile_.m_end && n < params_.n) StoreEight(m, n, words);
    }
  }

  // Rounds two neighbours, of n or with swapped operands of m, after the epilogue of an open
  // kernel.
  __device__ __forceinline__ unsigned Finish(float first, float second, int m, int n,
                                             EpilogueStep step, EpilogueState& state) const {
    if constexpr (Shape::kIsOpen) {
      const EpiloguePair pair = {m,           n,         Shape::kSwapAb, tile_.m_end, params_.n,
                                 tile_.group, step.slot, step.is_first,  step.is_last};
      const float2 values = RunEpilogue(make_float2(first, second), pair, state, params_);
      return Pack<Shape::kOut>(values.x, values.y);
    } else {
      return Pack<Shape::kOut>(first, second);
    }
  }

  __device__ float ScaleOfRow(int m) const {
    return params_.scale_a != nullptr && m < tile_.m_end ? __ldg(params_.scale_a + m) : 1.0f;
  }

  __device__ float ScaleOfColumn(int n) const {
    return params_.scale_b != nullptr && n < params_.n
               ? __ldg(params_.scale_b + static_cast<std::int64_t>(tile_.group) * params_.n + n)
               : 1.0f;
  }

  // Stores eight neighbours in n of one row of d.
  __device__ void StoreEight(int m, int n, const unsigned (&words)[4]) const {
    auto* const target = static_cast<unsigned short*>(params_.d) + m * params_.ldd + n;
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  const int lane_ = threadIdx.x % 32;
  const int quad_lane_ = lane_ % 4;
  const GroupedMmParams& params_;
  const GroupedTileOffset& tile_;
};

// What runs on a warp group that multiplies; `consumer_idx` is its position among those.
template <class Shape>
class GroupedMultiplier {
 public:
  __device__ GroupedMultiplier(const GroupedMmParams& params, const GroupedShared<Shape>& shared,
                               int consumer_idx)
      : params_(params),
        shared_(shared),
        consumer_idx_(consumer_idx),
        idx_in_tile_(Shape::kIsPingpong ? 0 : consumer_idx),
        rows_(OperandDescriptor(shared.rows() + idx_in_tile_ * 64 * Shape::kSlabK)),
        columns_(OperandDescriptor(shared.columns())) {}

  __device__ void Run(int num_tiles, int num_n_tiles, int num_steps) {
    float sums[Shape::kRowSteps][Shape::kSums] = {};
    int tile_idx = blockIdx.x;
    int stride = gridDim.x;
    if constexpr (Shape::kIsPingpong) {
      tile_idx += consumer_idx_ * gridDim.x;
      stride *= Shape::kNumConsumers;
      ring_.Advance(consumer_idx_ * num_steps);
      // The first warp group begins as if the second had just multiplied a tile.
      if (consumer_idx_ == 1) ArriveAtNamedBarrier(kConsumerThreads, kTurnBarrier);
    }
    for (; tile_idx < num_tiles; tile_idx += stride) {
      const GroupedTileOffset tile = FindTile(params_, shared_, num_n_tiles, tile_idx);
      if constexpr (Shape::kIsPingpong) {
        // Not before the other warp group has waited for all earlier steps: a barrier can tell only
        // two phases apart.
        SyncAtNamedBarrier(kConsumerThreads, kTurnBarrier + consumer_idx_);
      }
      if constexpr (Shape::kIsOpen) {
        const int thread = static_cast<int>(threadIdx.x) % Shape::kThreadsPerGroup;
        RunPrefetch({tile.m_begin, tile.n_begin, Shape::kTileM, Shape::kTileN, tile.m_end,
                     params_.n, idx_in_tile_ * Shape::kThreadsPerGroup + thread,
                     Shape::kConsumersPerTile * Shape::kThreadsPerGroup},
                    params_);
      }
      Sum(sums, num_steps);
      if constexpr (Shape::kIsPingpong) ring_.Advance(num_steps);
      GroupedTileStore<Shape>(params_, tile).Run(sums, idx_in_tile_);
    }
  }

 private:
  // Sums a tile over k.
  __device__ void Sum(float (&sums)[Shape::kRowSteps][Shape::kSums], int num_steps) {
    const bool is_arriving = threadIdx.x % 32 == 0;
    int is_added = 0;
    int last_stage = 0;
    for (int step = 0; step < num_steps; ++step) {
      shared_.full(ring_.stage)->Wait(ring_.parity);
      FenceSums(sums);
      FenceWgmma();
      MultiplyStage(sums, is_added);
      CommitWgmma();
      // All but the newest step are done: the stage of the step before can be released.
      WaitForWgmma<1>();
      FenceSums(sums);
      if (step > 0 && is_arriving) shared_.empty(last_stage)->Arrive();
      last_stage = ring_.stage;
      ring_.Advance();
    }
    if constexpr (Shape::kIsPingpong) {
      ArriveAtNamedBarrier(kConsumerThreads, kTurnBarrier + 1 - consumer_idx_);
    }
    WaitForWgmma<0>();
    FenceSums(sums);
    if (is_arriving) shared_.empty(last_stage)->Arrive();
  }

  // Multiplies a stage. Adds the products to the sums if `is_added` is 1, otherwise overwrites
  // them; sets `is_added` to 1.
  __device__ void MultiplyStage(float (&sums)[Shape::kRowSteps][Shape::kSums],
                                int& is_added) const {
    using Instruction = Wgmma<Shape::kOperand, Shape::kOperand, Shape::kTileColumns>;
    // In the units of a matrix descriptor: from one wgmma to the next along k, and from row to row.
    constexpr int kWgmmaOffset = kWgmmaBytes / kDescriptorBytes;
    constexpr int kRowOffset = Shape::kSlabBytes / kDescriptorBytes;
    constexpr int kWgmmas = Shape::kSlabBytes / kWgmmaBytes;  // of a slab
#pragma unroll
    for (int at = 0; at < Shape::kNumSlabs * kWgmmas; ++at) {
      const int slab = ring_.stage * Shape::kNumSlabs + at / kWgmmas;
      const std::uint64_t rows =
          Advance(rows_, at % kWgmmas * kWgmmaOffset + slab * (Shape::kTileRows * kRowOffset));
      const std::uint64_t columns = Advance(
          columns_, at % kWgmmas * kWgmmaOffset + slab * (Shape::kTileColumns * kRowOffset));
#pragma unroll
      for (int step = 0; step < Shape::kRowSteps; ++step) {
        Instruction::Multiply(sums[step],
                              Advance(rows, step * (Shape::kConsumersPerTile * 64 * kRowOffset)),
                              Advance(columns, 0), is_added);
      }
      is_added = 1;
    }
  }

  static constexpr int kConsumerThreads = Shape::kNumConsumers * Shape::kThreadsPerGroup;
  // Named barriers at which the warp groups of pingpong wait for their turn: this and the next one.
  static constexpr unsigned kTurnBarrier = 9;

  const GroupedMmParams& params_;
  const GroupedShared<Shape>& shared_;
  const int consumer_idx_;
  const int idx_in_tile_;
  const std::uint64_t rows_;
  const std::uint64_t columns_;
  RingPosition<Shape::kStages> ring_;
};

template <class Config>
struct GroupedMmKernel {
  using Shape = GroupedMmShape<Config>;
  using Params = GroupedMmParams;

  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSharedBytes = Shape::kSharedBytes;
  // Swizzle atoms begin at multiples of it.
  static constexpr int kSharedAlignment = 1024;

  static __device__ void Run(const Params& params, char* shared_bytes) {
    const GroupedShared<Shape> shared{shared_bytes};
    if (threadIdx.x == 0) {
      PrefetchTensorMap(&params.rows);
      PrefetchTensorMap(&params.columns);
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        shared.full(stage)->Init(1);
        shared.empty(stage)->Init(Shape::kConsumersPerTile * Shape::kThreadsPerGroup / 32);
      }
      FenceBarrierInit();
    }
    // Ends with a __syncthreads, after which every thread sees table and barriers.
    MakeTable(params, shared);

    const int num_n_tiles = NumTiles(params.n, Shape::kTileN);
    const int num_tiles = shared.m_tile_ends()[params.num_groups - 1] * num_n_tiles;
    const int num_steps = NumTiles(params.k, Shape::kTileK);
    // By a shuffle, so that the compiler knows it to be the same for all threads of a warp.
    const int group_idx =
        __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x), 0) / Shape::kThreadsPerGroup;
    if (group_idx == 0) {
      GiveRegisters<kLoaderRegisters>();
      if (threadIdx.x == 0) LoadGroups(params, shared, num_tiles, num_n_tiles, num_steps);
    } else {
      TakeRegisters<kMultiplierRegisters>();
      GroupedMultiplier<Shape>(params, shared, group_idx - 1)
          .Run(num_tiles, num_n_tiles, num_steps);
    }
  }

 private:
  // Registers a thread: 40 * 128 + 2 * 232 * 128 of the 65536 of an SM.
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
};

}  // namespace stoneware::gemm::sm90
