// The warps of persistent_mm that load: one for tiles, by TMA, and one for block scales.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Loads the block's tiles, stage after stage. Runs on a warp, of which one thread loads.
template <class Shape, bool kSplitsK>
__device__ void LoadTiles(const typename Shape::Params& params, const SharedMemory<Shape>& shared,
                          const KSlice<kSplitsK>& slice) {
  const bool is_loader = threadIdx.x % 32 == 0;
  if (is_loader) {
    PrefetchTensorMap(&params.b_map);
    PrefetchTensorMap(&params.a_map);
    if constexpr (Shape::kStoresBoxes && (!kSplitsK || Shape::kSplitsStoreBoxes)) {
      PrefetchTensorMap(&params.d_map);
    }
    if constexpr (Shape::kNarrowBoxes) PrefetchTensorMap(&params.narrow_d_map);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.full[stage].Init(Shape::kBlockScales ? 1 + 32 : 1);
      shared.empty[stage].Init(Shape::kBlockScales ? Shape::kConsumerThreads
                                                   : Shape::kConsumerThreads / 32);
    }
    if constexpr (kSplitsK) {
      shared.summed->Init(1);
      shared.summed->ArriveAndExpect(Shape::kRows * Shape::kColumns * 4 / slice.splits *
                                     (slice.splits - 1));
    }
    FenceBarrierInit();
  }
  __syncwarp();
  if constexpr (kSplitsK) ArriveAtCluster();
  ArriveAtNamedBarrier(Shape::kConsumerThreads + 32, kBarriersReady);
  if constexpr (Shape::kBlockScales) ArriveAtNamedBarrier(64, kBarriersReadyForScales);

  if (is_loader) {
    // With one tile along m, b is read once, and a by all blocks.
    const bool is_once = params.num_m_tiles == 1;
    const CacheHint a_hint = is_once ? CacheHint::kEvictLast : CacheHint::kEvictNormal;
    const CacheHint b_hint = is_once ? CacheHint::kEvictFirst : CacheHint::kEvictNormal;
    RingPosition<Shape::kStages> ring;
    for (int tile = slice.first_tile; tile < params.num_tiles; tile += slice.stride) {
      const TileOffset<Shape> offset(params, tile);
      for (int i = 0; i < slice.num_steps; ++i, ring.Advance()) {
        const int stage = ring.stage;
        Mbarrier* const full = &shared.full[stage];
        // In the first round the stage is empty: the phase before the first counts as complete.
        shared.empty[stage].Wait(ring.parity ^ 1);
        full->ArriveAndExpect(Shape::kRowStageBytes + Shape::kColumnStageBytes);
        for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
          const int k = (slice.first_step + i) * Shape::kTileK + chunk * Shape::kChunkElements;
          const int position = stage * Shape::kChunks + chunk;
          void* const rows = shared.rows + position * Shape::kRows * Shape::kChunkElements;
          void* const columns = shared.columns + position * Shape::kColumns * Shape::kChunkElements;
          LoadBox(&params.b_map, full, b_hint, Shape::kSwapAb ? rows : columns, k, offset.n);
          LoadBox(&params.a_map, full, a_hint, Shape::kSwapAb ? columns : rows, k, offset.m);
        }
      }
    }
  }
}

// Copies the block scales of each stage. Runs on a warp.
template <class Shape, bool kSplitsK>
__device__ void LoadBlockScales(const typename Shape::Params& params,
                                const SharedMemory<Shape>& shared, const KSlice<kSplitsK>& slice) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SyncAtNamedBarrier(64, kBarriersReadyForScales);
  RingPosition<Shape::kStages> ring;
  for (int tile = slice.first_tile; tile < params.num_tiles; tile += slice.stride) {
    const TileOffset<Shape> offset(params, tile);
    const float* const scales_b =
        params.scale_b + offset.n / Shape::kScaleBlock * params.scale_b_stride;
    // Without the pragma the compiler unrolls depending on the size of the surrounding code.
    constexpr int kUnrolled = Shape::kColumns <= 32 ? 2 : 1;
#pragma unroll kUnrolled
    for (int i = 0; i < slice.num_steps; ++i, ring.Advance()) {
      const int stage = ring.stage;
      shared.empty[stage].Wait(ring.parity ^ 1);
      for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
        const int block = (slice.first_step + i) * Shape::kChunks + chunk;
        const bool is_inside = block * Shape::kScaleBlock < params.k;
        float* const scales = shared.BlockScales(stage * Shape::kChunks + chunk);
        for (int column = lane; column < Shape::kColumns; column += 32) {
          const int m = offset.m + column;
          const bool has_scale = is_inside && m < params.m;
          CopyAsync(scales + column,
                    has_scale
                        ? params.scale_a + m * params.scale_a_stride + block * params.ld_scale_a
                        : params.scale_a,
                    has_scale);
        }
        if (lane == 0) {
          CopyAsync(scales + Shape::kColumns,
                    is_inside ? scales_b + block * params.ld_scale_b : scales_b, is_inside);
        }
      }
      shared.full[stage].ArriveWhenCopied();
    }
  }
}

}  // namespace stoneware::gemm::sm90
