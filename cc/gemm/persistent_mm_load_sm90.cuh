// The warp of persistent_mm that loads tiles, by TMA.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Loads this block's part of a chunk of k of an operand, from row `first_row` on, to its place in
// `chunk`: load(box, x, y) of each box, with its coordinates in the tensor map. If k runs fastest,
// the box has `box_rows` rows.
template <class Boxes, class Load>
__device__ __forceinline__ void LoadPart(void* chunk, int part, int first_row, int k, int box_rows,
                                         const Load& load) {
  char* const bytes = static_cast<char*>(chunk);
  if constexpr (Boxes::kContiguous == 0) {
    load(bytes + part * box_rows * Boxes::kChunkBytes, k, first_row + part * box_rows);
  } else {
    const int part_row = Boxes::kDividesK ? 0 : part * (Boxes::kNumber * Boxes::kContiguous);
    const int part_k = part * Boxes::kKFromPartToPart;
#pragma unroll
    for (int box = 0; box < Boxes::kNumber; ++box) {
      // One k of a box takes a row of the swizzle.
      load(bytes + part_row * Boxes::kChunkBytes + part_k * (Boxes::kContiguous * 2) +
               box * Boxes::kBytesFromBoxToBox,
           first_row + part_row + box * Boxes::kContiguous, k + part_k);
    }
  }
}

// Loads the block's tiles, stage after stage. Runs on a warp, of which one thread loads.
template <class Shape, bool kSplitsK>
__device__ void LoadTiles(const typename Shape::Params& params, const SharedMemory<Shape>& shared,
                          const KSlice<Shape, kSplitsK>& slice) {
  const bool is_loader = IsElected();
  if (is_loader) {
    PrefetchTensorMap(&params.b_map);
    PrefetchTensorMap(&params.a_map);
    if constexpr (Shape::kStoresBoxes && (!kSplitsK || Shape::kSplitsStoreBoxes)) {
      PrefetchTensorMap(&params.d_map);
    }
    if constexpr (Shape::kSmallerBoxes) PrefetchTensorMap(&params.smaller_d_map);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.full[stage].Init(1 + Shape::kScaleArrivals);
      shared.empty[stage].Init(Shape::kBlockScales && !Shape::kOverlapsSums
                                   ? Shape::kConsumerThreads
                                   : 4 * Shape::kGroupsOfTile * Shape::kLoadingBlocks);
    }
    if constexpr (kSplitsK) {
      shared.summed->Init(1);
      if constexpr (Shape::kSharesColumns) {
        const ColumnShare<Shape> share(slice, slice.rank);
        shared.summed->ArriveAndExpect((share.end - share.begin) * Shape::kGroupBytes *
                                       (slice.splits - 1));
      } else {
        shared.summed->ArriveAndExpect(Shape::kRows * Shape::kColumns * 4 / slice.splits *
                                       (slice.splits - 1));
      }
    }
    FenceBarrierInit();
  }
  __syncwarp();
  if constexpr (kSplitsK || Shape::kSharingBlocks > 1) ArriveAtCluster();
  // Nothing is loaded to a block whose barriers are not ready.
  if constexpr (Shape::kSharingBlocks > 1) {
    WaitForClusterToArrive();
    if constexpr (kSplitsK) ArriveAtCluster();
  }
  ArriveAtNamedBarrier(Shape::kConsumerThreads + 32, kBarriersReady);
  if constexpr (Shape::kBlockScales) {
    ArriveAtNamedBarrier(32 + 32 * Shape::kScaleWarps, kBarriersReadyForScales);
  }

  if (is_loader) {
    // With one tile along m, b is read once, and a by all blocks.
    const bool is_once = params.num_m_tiles == 1;
    const CacheHint a_hint = is_once ? CacheHint::kEvictLast : CacheHint::kEvictNormal;
    const CacheHint b_hint = is_once ? CacheHint::kEvictFirst : CacheHint::kEvictNormal;
    const PlaceInCluster<Shape> place;
    RingPosition<Shape::kStages> ring;
    const int num_tiles = TilesOfResult(params, shared);
    for (int tile = slice.first_tile; tile < num_tiles; tile += slice.stride) {
      const TileOffset<Shape> offset(params, shared, tile);
      // The compiler would unroll depending on the size of the surrounding code.
#pragma unroll 1
      for (int i = 0; i < slice.num_steps; ++i, ring.Advance()) {
        const int stage = ring.stage;
        Mbarrier* const full = &shared.full[stage];
        // In the first round the stage is empty: the phase before the first counts as complete.
        shared.empty[stage].Wait(ring.parity ^ 1);
        if constexpr (Shape::kHandsOverTiles) {
          if (i == 0) offset.Share(shared, stage);
        }
        if constexpr (Shape::kHasHalves) {
          full->ArriveAndExpect(
              params.stage_bytes -
              (offset.is_half ? Shape::kChunks * Shape::BoxesOfA::BytesOfChunk(params.m) : 0));
        } else {
          full->ArriveAndExpect(params.stage_bytes);
        }
        for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
          const int k = (slice.first_step + i) * Shape::kTileK + chunk * Shape::kChunkElements;
          const int position = stage * Shape::kChunks + chunk;
          void* const rows = shared.rows + position * Shape::kRows * Shape::kChunkElements;
          void* const columns = shared.columns + position * Shape::kColumns * Shape::kChunkElements;
          void* const a_tile = Shape::kSwapAb ? columns : rows;
          void* const b_tile = Shape::kSwapAb ? rows : columns;
          const auto load_b = [&](void* box, int x, int y) {
            if constexpr (Shape::kBlocksAlongM > 1) {
              LoadBoxToBlocks(&params.b_map, full, b_hint, box, x, y, place.SharingB());
            } else if constexpr (Shape::kGroups) {
              LoadBox(&params.b_map, full, b_hint, box, x, y, offset.group);
            } else {
              LoadBox(&params.b_map, full, b_hint, box, x, y);
            }
          };
          const auto load_a = [&](void* box, int x, int y) {
            if constexpr (Shape::kBlocksAlongN > 1) {
              LoadBoxToBlocks(&params.a_map, full, a_hint, box, x, y, place.SharingA());
            } else {
              LoadBox(&params.a_map, full, a_hint, box, x, y);
            }
          };
          LoadPart<typename Shape::BoxesOfB>(b_tile, place.along_m, offset.n, k,
                                             params.rows_of_b_box, load_b);
          LoadPart<typename Shape::BoxesOfA>(a_tile, place.along_n, offset.m, k,
                                             params.rows_of_a_box, load_a);
          if constexpr (Shape::kHasHalves) {
            constexpr int kHalf = Shape::kTileM / 2;
            if (offset.is_half) continue;
            LoadPart<typename Shape::BoxesOfA>(
                static_cast<char*>(a_tile) + kHalf * Shape::kChunkBytes, place.along_n,
                offset.m + kHalf, k, params.rows_of_a_box, load_a);
          }
        }
      }
    }
  }
}

}  // namespace stoneware::gemm::sm90
