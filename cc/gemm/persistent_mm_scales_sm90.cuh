// The warps of persistent_mm that load block scales.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Copies the block scales of each stage. Runs on a warp. Its loop must be short, or the warps that
// multiply wait for scales: addresses are advanced, and the only branch is for the scale of b.
template <class Shape, bool kSplitsK>
__device__ void LoadBlockScales(const typename Shape::Params& params,
                                const SharedMemory<Shape>& shared,
                                const KSlice<Shape, kSplitsK>& slice) {
  // The scales of a for a stage, chunk after chunk: each lane copies every 32nd.
  constexpr int kScales = Shape::kChunks * Shape::kTileM;
  constexpr int kCopies = kScales / 32;
  static_assert(kCopies * 32 == kScales, "persistent_mm_sm90.bzl refuses such a config");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_blocks = (params.k - 1) / Shape::kScaleBlock + 1;
  const int first_block = slice.first_step * Shape::kChunks;
  SyncAtNamedBarrier(64, kBarriersReadyForScales);
  RingPosition<Shape::kStages> ring;
  const int num_tiles = TilesOfResult(params, shared);
  for (int tile = slice.first_tile; tile < num_tiles; tile += slice.stride) {
    const TileOffset<Shape> offset(params, shared, tile);
    const float* scales_a[kCopies];
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int at = copy * 32 + lane;
      // A row beyond the last one is not stored: any scale will do.
      const int m = min(offset.m + at % Shape::kTileM, params.m - 1);
      const int block = first_block + at / Shape::kTileM;
      scales_a[copy] = params.scale_a + m * params.scale_a_stride + block * params.ld_scale_a;
    }
    // The scales of b: a lane for each, chunk after chunk.
    const int chunk_of_b = lane / Shape::kScalesOfB;
    int block_of_n = offset.n / Shape::kScaleBlock + lane % Shape::kScalesOfB;
    if constexpr (Shape::kScalesOfB > 1 || Shape::kBlocksAlongN > 1) {
      block_of_n = min(block_of_n, (params.n - 1) / Shape::kScaleBlock);
    }
    const float* scale_b = params.scale_b + block_of_n * params.scale_b_stride +
                           (first_block + chunk_of_b) * params.ld_scale_b;
    if constexpr (Shape::kGroups) scale_b += offset.group * params.group_stride_scale_b;
    int blocks_left = num_blocks - first_block;
    // Without the pragma the compiler unrolls depending on the size of the surrounding code.
#pragma unroll 1
    for (int i = 0; i < slice.num_steps; ++i, ring.Advance()) {
      const int stage = ring.stage;
      float* const scales = shared.BlockScales(stage * Shape::kChunks);
      shared.empty[stage].Wait(ring.parity ^ 1);
      // Chunks beyond the last block of k have zeros for scales, as for elements.
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const int at = copy * 32 + lane;
        const int chunk = at / Shape::kTileM;
        const bool is_inside = chunk < blocks_left;
        CopyAsync(scales + chunk * Shape::kChunkScales + at % Shape::kTileM,
                  is_inside ? scales_a[copy] : params.scale_a, is_inside);
        scales_a[copy] += Shape::kChunks * params.ld_scale_a;
      }
      if (lane < Shape::kChunks * Shape::kScalesOfB) {
        const bool is_inside = chunk_of_b < blocks_left;
        CopyAsync(
            scales + chunk_of_b * Shape::kChunkScales + Shape::kTileM + lane % Shape::kScalesOfB,
            is_inside ? scale_b : params.scale_b, is_inside);
      }
      scale_b += Shape::kChunks * params.ld_scale_b;
      blocks_left -= Shape::kChunks;
      shared.full[stage].ArriveWhenCopied();
    }
  }
}

// The same for large tiles. Their operands keep shared memory busy, so little else may pass through
// it: scales of a and b are multiplied here, the products of a thread lie side by side, and a warp
// arrives once for a stage. There is such a warp for each warp group; each of its lanes serves the
// four threads that have the same rows.
template <class Shape>
class ScaleProducts {
 public:
  template <bool kSplitsK>
  static __device__ void LoadAll(const typename Shape::Params& params,
                                 const SharedMemory<Shape>& shared,
                                 const KSlice<Shape, kSplitsK>& slice) {
    SyncAtNamedBarrier(32 + 32 * Shape::kScaleWarps, kBarriersReadyForScales);
    RingPosition<Shape::kStages> ring;
    const int num_tiles = TilesOfResult(params, shared);
    for (int tile = slice.first_tile; tile < num_tiles; tile += slice.stride) {
      const TileOffset<Shape> offset(params, shared, tile);
      ScaleProducts(params, offset, slice.first_step).Load(shared, ring, slice.num_steps);
    }
  }

 private:
  static constexpr int kOfA = 2 * Shape::kRowSteps;
  static constexpr int kOfB = Shape::kScalesOfB;

  __device__ ScaleProducts(const typename Shape::Params& params, const TileOffset<Shape>& offset,
                           int first_step)
      : ld_a_(params.ld_scale_a), ld_b_(params.ld_scale_b) {
    // A row or a column beyond the last one is not stored: any scale will do.
#pragma unroll
    for (int i = 0; i < kOfA; ++i) {
      const int row = i / 2 * (64 * Shape::kScaleWarps) + lane_ / 8 * 16 + i % 2 * 8 + lane_ % 8;
      const int m = min(offset.m + row, params.m - 1);
      at_a_[i] = params.scale_a + m * params.scale_a_stride + first_step * ld_a_;
    }
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      const int block = min(offset.n / Shape::kScaleBlock + i, (params.n - 1) / Shape::kScaleBlock);
      at_b_[i] = params.scale_b + block * params.scale_b_stride + first_step * ld_b_;
      if constexpr (Shape::kGroups) at_b_[i] += offset.group * params.group_stride_scale_b;
    }
  }

  __device__ void Load(const SharedMemory<Shape>& shared, RingPosition<Shape::kStages>& ring,
                       int num_steps) {
    Read();
    // Without the pragma the compiler unrolls depending on the size of the surrounding code.
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i, ring.Advance()) {
      const int stage = ring.stage;
      shared.empty[stage].Wait(ring.parity ^ 1);
      Write(SharedAddress(shared.BlockScales(stage)));
      __syncwarp();
      if (lane_ % 32 == 0) shared.full[stage].Arrive();
      // While the tile is multiplied.
      if (i + 1 < num_steps) Read();
    }
  }

  // The scales of the next step of k.
  __device__ void Read() {
#pragma unroll
    for (int i = 0; i < kOfA; ++i) {
      scale_a_[i] = __ldg(at_a_[i]);
      at_a_[i] += ld_a_;
    }
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      scale_b_[i] = __ldg(at_b_[i]);
      at_b_[i] += ld_b_;
    }
  }

  // The products in the order in which OverlappedSum reads them: by step, scale of b and row.
  __device__ void Write(std::uint32_t stage) const {
    static_assert(Shape::kScalesOfThread % 4 == 0, "tiles of more than 128x128");
    const std::uint32_t address = stage + lane_ * (Shape::kScalesOfThread * 4);
#pragma unroll
    for (int i = 0; i < Shape::kScalesOfThread; i += 4) {
      float products[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        products[j] = scale_a_[(i + j) / (2 * kOfB) * 2 + j % 2] * scale_b_[(i + j) / 2 % kOfB];
      }
      StoreShared(address + i * 4, products[0], products[1], products[2], products[3]);
    }
  }

  // Among the lanes of all these warps.
  const int lane_ = static_cast<int>(threadIdx.x) - Shape::kConsumerThreads - 32;
  const std::int64_t ld_a_;
  const std::int64_t ld_b_;
  const float* at_a_[kOfA];
  const float* at_b_[kOfB];
  float scale_a_[kOfA];
  float scale_b_[kOfB];
};

}  // namespace stoneware::gemm::sm90
