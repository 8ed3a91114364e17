// The vectors that the epilogue of a tile of persistent_mm needs: row and column scales, and bias.

#pragma once

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// A thread's part of the vectors that a tile's epilogue needs. They are read from global memory
// before the tile is multiplied, with kPingpong afterwards, and then shared.
template <class Shape>
struct TileVectors {
  static constexpr int kThreads = Shape::kVectorThreads;
  static constexpr int kOfN = (Shape::kTileN - 1) / kThreads + 1;
  static constexpr int kOfM = (Shape::kTileM - 1) / kThreads + 1;

  float scale_a[kOfM];
  float scale_b[kOfN];
  float bias[kOfN];

  __device__ TileVectors(const typename Shape::Params& params, const TileOffset<Shape>& offset) {
    const int first_n = offset.n;
    const int first_m = offset.m;
    const int thread = Thread();
    const float* scales_b = params.scale_b;
    if constexpr (Shape::kGroups && Shape::kHasVectorScales) {
      if (scales_b != nullptr) scales_b += offset.group * params.group_stride_scale_b;
    }
    const auto* const biases = static_cast<const OutElement*>(params.bias);
#pragma unroll
    for (int i = 0; i < kOfN; ++i) {
      const int n = first_n + thread + i * kThreads;
      const bool is_inside = n < params.n;
      bias[i] = is_inside && biases != nullptr ? Unpack<Shape::kOut>(biases[n]) : 0.0f;
      scale_b[i] = Shape::kHasVectorScales && is_inside && scales_b != nullptr
                       ? scales_b[n * params.scale_b_stride]
                       : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kOfM; ++i) {
      const int m = first_m + thread + i * kThreads;
      scale_a[i] = Shape::kHasVectorScales && m < params.m && params.scale_a != nullptr
                       ? params.scale_a[m * params.scale_a_stride]
                       : 1.0f;
    }
  }

  // They may be read once all threads have come here. They use the memory of the tile before
  // the last, which has been read when the last tile's barrier completes.
  __device__ void Share(const SharedMemory<Shape>& shared, int tile_idx) const {
    const int thread = Thread();
#pragma unroll
    for (int i = 0; i < kOfN; ++i) {
      const int at = thread + i * kThreads;
      if (at < Shape::kTileN) {
        if constexpr (Shape::kHasVectorScales) shared.ScalesOfB(tile_idx)[at] = scale_b[i];
        shared.Biases(tile_idx)[at] = bias[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kOfM; ++i) {
      const int at = thread + i * kThreads;
      if (Shape::kHasVectorScales && at < Shape::kTileM)
        shared.ScalesOfA(tile_idx)[at] = scale_a[i];
    }
    SyncAtNamedBarrier(kThreads, Shape::kVectorCopies > 1 ? kAmongWarpGroup + threadIdx.x / kThreads
                                                          : kAmongConsumers);
  }

 private:
  using OutElement = typename Element<Shape::kOut>::Bits;

  // Among those that share a copy.
  static __device__ int Thread() {
    const int thread = static_cast<int>(threadIdx.x);
    return Shape::kVectorCopies > 1 ? thread % kThreads : thread;
  }
};

}  // namespace stoneware::gemm::sm90
