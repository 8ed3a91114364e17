// The device side of persistent_mm; persistent_mm_sm90.h says what it computes.
//
// The first warp groups multiply; then a warp loads tiles, and others block scales. They meet at
// two barriers for each stage in shared memory: `full` (its bytes have arrived) and `empty` (the
// warps that multiply have read it). With groups the warp that loads also writes where a tile
// begins, next to the tile's first stage.

#pragma once

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_load_sm90.cuh"
#include "cc/gemm/persistent_mm_overlapped_sum_sm90.cuh"
#include "cc/gemm/persistent_mm_partial_sums_sm90.cuh"
#include "cc/gemm/persistent_mm_scales_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/persistent_mm_store_sm90.cuh"
#include "cc/gemm/persistent_mm_sum_sm90.cuh"
#include "cc/gemm/persistent_mm_turns_sm90.cuh"
#include "cc/gemm/persistent_mm_vectors_sm90.cuh"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/wgmma_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Prefetches the first stage of b to L2, if no other block reads it. A row that begins inside a
// line of L2 has the first line of each chunk prefetched.
template <class Shape, bool kSplitsK>
__device__ void FetchAhead(const typename Shape::Params& params,
                           const KSlice<Shape, kSplitsK>& slice) {
  if (params.num_m_tiles > 1) return;
  const int first_n = FirstOfTile<Shape::kTileN, Shape::kFullAlongN>(slice.first_tile, params.n);
  if constexpr (Shape::kBIsNMajor) {
    constexpr int kLines = Shape::kTileN / 64;  // of a row of b
    for (int line = static_cast<int>(threadIdx.x); line < Shape::kTileK * kLines;
         line += Shape::kConsumerThreads) {
      const int n = first_n + line % kLines * 64;
      const int k = slice.first_step * Shape::kTileK + line / kLines;
      if (n < params.n && k < params.k) {
        PrefetchToL2(static_cast<const char*>(params.b) + k * params.ldb_bytes +
                     static_cast<unsigned>(n * Shape::kOperandBytes));
      }
    }
  } else {
    for (int line = static_cast<int>(threadIdx.x); line < Shape::kTileN * Shape::kChunks;
         line += Shape::kConsumerThreads) {
      const int n = first_n + line / Shape::kChunks;
      const int k =
          slice.first_step * Shape::kTileK + line % Shape::kChunks * Shape::kChunkElements;
      if (n < params.n && k < params.k) {
        PrefetchToL2(static_cast<const char*>(params.b) + n * params.ldb_bytes +
                     static_cast<unsigned>(k * Shape::kOperandBytes));
      }
    }
  }
}

template <class Shape, bool kSplitsK>
__device__ __forceinline__ void PrefetchForEpilogue(const typename Shape::Params& params,
                                                    const TileOffset<Shape>& offset,
                                                    const KSlice<Shape, kSplitsK>& slice) {
  int m_end = params.m;
  if constexpr (Shape::kGroups) m_end = offset.group_end;
  constexpr int kThreads = 128 * Shape::kGroupsOfTile;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  RunPrefetch({offset.m, offset.n, Shape::kTileM, Shape::kTileN, m_end, params.n,
               slice.rank * kThreads + thread, slice.splits * kThreads},
              params);
}

template <class Shape>
__device__ void SumOverlapped(const SharedMemory<Shape>& shared, const TileOffset<Shape>& offset,
                              RingPosition<Shape::kStages>& ring, int num_steps,
                              Sums<Shape>& sums) {
  if constexpr (Shape::kGroups) {
    if constexpr (Shape::kHasHalves) {
      if (offset.is_half) {
        OverlappedSum<Shape, 1>(shared).Run(ring, num_steps, offset.n, sums);
        return;
      }
    }
  }
  OverlappedSum<Shape>(shared).Run(ring, num_steps, offset.n, sums);
}

// Runs on the warp groups that multiply.
template <class Shape, bool kSplitsK>
__device__ void MultiplyTiles(const typename Shape::Params& params,
                              const SharedMemory<Shape>& shared,
                              const KSlice<Shape, kSplitsK>& slice) {
  if constexpr (Shape::kFetchesAhead) FetchAhead<Shape>(params, slice);
  // Together with the loader, which has initialised the barriers.
  SyncAtNamedBarrier(Shape::kConsumerThreads + 32, kBarriersReady);

  const Operands<Shape> operands(shared);
  const StageRelease<Shape> release(shared.empty->Address());
  Sums<Shape> sums = {};
  RingPosition<Shape::kStages> ring;
  int tile = slice.first_tile;
  int stride = slice.stride;
  if constexpr (Shape::kPingpong) BeginTurns(slice, tile, stride, ring);
  for (int tile_idx = 0; tile < TilesOfResult(params, shared); tile += stride, ++tile_idx) {
    int last_stage = 0;
    if constexpr (Shape::kPingpong) {
      if constexpr (Shape::kIsOpen) {
        PrefetchForEpilogue<Shape>(params, TileOffset<Shape>(params, shared, tile), slice);
      }
      last_stage = SumInTurn<Shape>(shared, slice, operands, release, tile,
                                    TilesOfResult(params, shared), tile_idx, ring, sums);
    }
    // With kPingpong the rest of a tile is not urgent, but registers are scarce.
    if constexpr (Shape::kHandsOverTiles) shared.full[ring.stage].Wait(ring.parity);
    const TileToMultiply<Shape> offset(params, shared, Shape::kHandsOverTiles ? ring.stage : tile);
    const TileVectors<Shape> vectors(params, offset);
    if constexpr (Shape::kIsOpen && !Shape::kPingpong) {
      PrefetchForEpilogue<Shape>(params, offset, slice);
    }
    if constexpr (Shape::kOverlapsSums) {
      SumOverlapped(shared, offset, ring, slice.num_steps, sums);
      if (!Shape::kMultipliesScales || params.bias != nullptr) vectors.Share(shared, tile_idx);
    } else if constexpr (Shape::kBlockScales) {
      SumScaledTile<Shape>(shared, operands, release, ring, slice.num_steps, sums);
      vectors.Share(shared, tile_idx);
    } else {
      if constexpr (!Shape::kPingpong) {
        last_stage = SumTile<Shape>(shared, operands, release, ring, slice.num_steps, sums);
        vectors.Share(shared, tile_idx);  // while the last products are summed
      }
      WaitForWgmma<0>();
      FenceSums(sums);
      release(last_stage);
      if constexpr (Shape::kPingpong) vectors.Share(shared, tile_idx);
    }

    if constexpr (Shape::kSharesGrid) {
      if (slice.splits > 1 && !AddGridSums<Shape>(params, slice, sums)) break;
    }
    const bool is_last_tile = tile + slice.stride >= TilesOfResult(params, shared);
    if constexpr (Shape::kGroups && Shape::kStoresBoxes) {
      if (offset.HasRowsOfOthers()) {
        // A box would overwrite the rows of the next group.
        TileStore<Shape, false>(params, shared, offset, tile_idx, is_last_tile).Run(sums);
        Boxes<Shape>::End();
        continue;
      }
    }
    if constexpr (kSplitsK && Shape::kSharesColumns) {
      const PartialColumns<Shape> partial(shared, slice);
      partial.Exchange(shared, sums);
      TileStore<Shape, false> store(params, shared, offset, tile_idx, is_last_tile);
      if constexpr (Shape::kFloatOut) {
        store.RunShareOfFloats(partial, slice);
      } else {
        store.RunShare(partial, slice);
      }
      partial.End();
    } else if constexpr (!kSplitsK) {
      TileStore<Shape, Shape::kStoresBoxes>(params, shared, offset, tile_idx, is_last_tile)
          .Run(sums);
    } else if (AddPartialSums(shared, slice, sums)) {
      TileStore<Shape, Shape::kSplitsStoreBoxes>(params, shared, offset, tile_idx, is_last_tile)
          .Run(sums);
    }
  }
  if constexpr (Shape::kStoresBoxes) Boxes<Shape>::End();
}

template <class Config>
struct PersistentMmKernel {
  using Shape = PersistentMmShape<Config>;
  using Params = typename Shape::Params;

  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSharedBytes = Shape::kSharedBytes;
  // Swizzle atoms begin at multiples of it.
  static constexpr int kSharedAlignment = 1024;

  static __device__ void Run(const Params& params, char* shared_bytes) {
    const SharedMemory<Shape> shared(shared_bytes);
    if constexpr (Shape::kGroups) MakeTable<Shape>(params, shared);
    if (Shape::kMaxSplits > 1 && BlocksOfCluster() > Shape::kSharingBlocks) {
      RunBlock<(Shape::kMaxSplits > 1)>(params, shared);
    } else {
      RunBlock<false>(params, shared);
    }
  }

 private:
  template <bool kSplitsK>
  static __device__ void RunBlock(const Params& params, const SharedMemory<Shape>& shared) {
    const KSlice<Shape, kSplitsK> slice(params);
    const int thread = static_cast<int>(threadIdx.x);
    // Every warp arrives at the cluster's barrier before its loads and products, and so waits for
    // nothing there. The loader arrives when its barriers are initialised; with kSharesColumns the
    // warps that multiply arrive when they have read the stages.
    const bool is_loader = thread / 32 == Shape::kConsumerThreads / 32;
    const bool arrives_late = Shape::kSharesColumns && thread < Shape::kConsumerThreads;
    if constexpr (Shape::kSharingBlocks > 1) {
      if (!is_loader) {
        ArriveAtCluster();
        WaitForClusterToArrive();
      }
    }
    if (kSplitsK && !is_loader && !arrives_late) ArriveAtCluster();
    if (thread < Shape::kConsumerThreads) {
      if constexpr (Shape::kMovesRegisters) TakeRegisters<Shape::kConsumerRegisters>();
      MultiplyTiles<Shape>(params, shared, slice);
    } else {
      if constexpr (Shape::kMovesRegisters) GiveRegisters<Shape::kLoaderRegisters>();
      if (thread < Shape::kConsumerThreads + 32) {
        LoadTiles<Shape>(params, shared, slice);
      } else if (thread < Shape::kConsumerThreads + 32 + 32 * Shape::kScaleWarps) {
        if constexpr (Shape::kMultipliesScales) {
          ScaleProducts<Shape>::LoadAll(params, shared, slice);
        } else if constexpr (Shape::kBlockScales) {
          LoadBlockScales<Shape>(params, shared, slice);
        }
      }
      // A thread that has arrived at the cluster's barrier must not exit before the barrier is
      // complete: it would be counted as arriving once more.
      if constexpr (kSplitsK) WaitForClusterToArriveApart();
    }
    if constexpr (Shape::kSharingBlocks > 1 && !kSplitsK) {
      // No block leaves before the other has arrived at its barriers for the last time.
      __syncwarp();
      ArriveAtCluster();
      WaitForClusterToArrive();
    }
  }
};

}  // namespace stoneware::gemm::sm90
