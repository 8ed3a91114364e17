// How two warp groups of persistent_mm take turns with the tiles of a block.

#pragma once

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/persistent_mm_sum_sm90.cuh"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// The warp group, in a register of the warp.
__device__ __forceinline__ int WarpGroupWithTurn() {
  return SameInWarp(static_cast<int>(threadIdx.x) / 128);
}

// Sets the first tile and the stride to those of this warp group, and the ring to the stages of the
// first tile: of two tiles one is the other's, whose stages are skipped.
template <class Shape, bool kSplitsK>
__device__ __forceinline__ void BeginTurns(const KSlice<Shape, kSplitsK>& slice, int& tile,
                                           int& stride, RingPosition<Shape::kStages>& ring) {
  const int warp_group = WarpGroupWithTurn();
  tile += warp_group * stride;
  stride *= 2;
  ring.Skip(warp_group * slice.num_steps);
}

// Sums a tile over k, as SumTile does, when the last stage of the tile before has arrived at the
// other warp group: a barrier tells a phase only from the one before. `tile_idx`: how many tiles
// this warp group had.
template <class Shape, bool kSplitsK>
__device__ __forceinline__ int SumInTurn(const SharedMemory<Shape>& shared,
                                         const KSlice<Shape, kSplitsK>& slice,
                                         const Operands<Shape>& operands,
                                         const StageRelease<Shape>& release, int tile,
                                         int num_tiles, int tile_idx,
                                         RingPosition<Shape::kStages>& ring, Sums<Shape>& sums) {
  const int warp_group = WarpGroupWithTurn();
  if (tile_idx > 0 || warp_group > 0) {
    SyncAtNamedBarrier(Shape::kConsumerThreads, kTurnOfWarpGroup + warp_group);
  }
  const int last_stage = SumTile<Shape>(shared, operands, release, ring, slice.num_steps, sums);
  if (tile + slice.stride < num_tiles) {
    ArriveAtNamedBarrier(Shape::kConsumerThreads, kTurnOfWarpGroup + 1 - warp_group);
  }
  ring.Skip(slice.num_steps);
  return last_stage;
}

}  // namespace stoneware::gemm::sm90
