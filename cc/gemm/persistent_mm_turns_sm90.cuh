// How the warp groups of persistent_mm share the tiles of a block.

#pragma once

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// The tiles that this warp group multiplies: all of its block, together with the others, or with
// kPingpong every second one. Then one warp group reads the stages of its tile while the other
// stores, and skips the stages of the other's.
template <class Shape, bool kSplitsK>
class Turns {
 public:
  __device__ explicit Turns(const KSlice<Shape, kSplitsK>& slice) : slice_(slice) {}

  __device__ int FirstTile() const {
    if constexpr (Shape::kPingpong) {
      return slice_.first_tile + warp_group_ * slice_.stride;
    } else {
      return slice_.first_tile;
    }
  }

  // From one tile to the next.
  __device__ int Stride() const { return Shape::kPingpong ? 2 * slice_.stride : slice_.stride; }

  // Where the stages of the first tile begin.
  __device__ RingPosition<Shape::kStages> Ring() const {
    RingPosition<Shape::kStages> ring;
    if constexpr (Shape::kPingpong) ring.Skip(warp_group_ * slice_.num_steps);
    return ring;
  }

  // Waits until the last stage of the tile before has arrived: a barrier tells a phase only from
  // the one before. `tile_idx`: how many tiles this warp group had.
  __device__ void Begin(int tile_idx) const {
    if constexpr (Shape::kPingpong) {
      if (tile_idx > 0 || warp_group_ > 0) {
        SyncAtNamedBarrier(Shape::kConsumerThreads, kTurnOfWarpGroup + warp_group_);
      }
    }
  }

  // All stages of this tile have arrived.
  __device__ void End(int tile, int num_tiles, RingPosition<Shape::kStages>& ring) const {
    if constexpr (Shape::kPingpong) {
      if (tile + slice_.stride < num_tiles) {
        ArriveAtNamedBarrier(Shape::kConsumerThreads, kTurnOfWarpGroup + 1 - warp_group_);
      }
      ring.Skip(slice_.num_steps);
    }
  }

 private:
  const KSlice<Shape, kSplitsK>& slice_;
  const int warp_group_ = SameInWarp(static_cast<int>(threadIdx.x) / 128);
};

}  // namespace stoneware::gemm::sm90
