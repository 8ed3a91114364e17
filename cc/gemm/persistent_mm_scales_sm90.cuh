// The warps of persistent_mm that load block scales.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Copies the block scales of each stage, where one warp group multiplies. Runs on a warp. Its loop
// must be short, or the warps that multiply wait for scales: addresses are advanced, and the only
// branch is for the scale of b.
template <class Shape, bool kSplitsK>
__device__ void LoadBlockScales(const typename Shape::Params& params,
                                const SharedMemory<Shape>& shared,
                                const KSlice<Shape, kSplitsK>& slice) {
  // The scales of a for a stage, chunk after chunk: each lane copies every 32nd.
  constexpr int kScales = Shape::kChunks * Shape::kTileM;
  constexpr int kCopies = kScales / 32;
  static_assert(kCopies * 32 == kScales, "persistent_mm_sm90.bzl refuses such a config");
  static_assert(Shape::kScalesOfB == 1 && Shape::kSharingBlocks == 1);
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
    // The scales of b: a lane for each chunk.
    const float* scale_b = params.scale_b + offset.n / Shape::kScaleBlock * params.scale_b_stride +
                           (first_block + lane) * params.ld_scale_b;
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
      if (lane < Shape::kChunks) {
        const bool is_inside = lane < blocks_left;
        CopyAsync(scales + lane * Shape::kChunkScales + Shape::kTileM,
                  is_inside ? scale_b : params.scale_b, is_inside);
      }
      scale_b += Shape::kChunks * params.ld_scale_b;
      blocks_left -= Shape::kChunks;
      shared.full[stage].ArriveWhenCopied();
    }
  }
}

// The same where several warp groups multiply. Their operands keep shared memory busy, so little
// else may pass through it: scales of a and b are multiplied here, the products of a thread lie
// side by side, and a warp arrives once for a stage. There is such a warp for each warp group; each
// of its lanes serves the four threads that have the same rows.
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
      ScaleProducts(params, offset, slice.first_step, slice.num_steps)
          .Load(shared, ring, slice.num_steps);
    }
  }

 private:
  static constexpr int kOfA = 2 * Shape::kRowSteps;
  static constexpr int kOfB = Shape::kScalesOfB;
  // Steps of k whose scales are read at once, as registers allow: a read takes longer than a step
  // (docs/design/block_scales_sm90.md).
  static constexpr int kSteps = kOfA > 2 ? 2 : kOfB > 1 || Shape::kTileN > 64 ? 4 : 8;
  // Steps whose scales of a row one instruction reads, if they are contiguous and aligned, and
  // num_steps is a multiple: no read passes the end of a row.
  static constexpr int kRun = kSteps < 4 ? kSteps : 4;

  __device__ ScaleProducts(const typename Shape::Params& params, const TileOffset<Shape>& offset,
                           int first_step, int num_steps)
      : ld_a_(params.ld_scale_a), ld_b_(params.ld_scale_b) {
    const auto first = reinterpret_cast<std::uintptr_t>(params.scale_a + first_step);
    reads_runs_ = ld_a_ == 1 && params.scale_a_stride % kRun == 0 && first % (kRun * 4) == 0 &&
                  num_steps % kRun == 0;
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
    // Without the pragma the compiler unrolls depending on the size of the surrounding code.
#pragma unroll 1
    for (int left = num_steps; left > 0; left -= kSteps) {
      Read(left);  // while the stages before are multiplied
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= left) continue;
        const int stage = ring.stage;
        shared.empty[stage].Wait(ring.parity ^ 1);
        Write(step, SharedAddress(shared.BlockScales(stage)));
        __syncwarp();
        if (lane_ % 32 == 0) shared.full[stage].Arrive();
        ring.Advance();
      }
    }
  }

  // Reads the scales of the next kSteps steps of k, or of `left` if fewer are left.
  __device__ void Read(int left) {
    if (reads_runs_) {
#pragma unroll
      for (int step = 0; step < kSteps; step += kRun) {
        if (step >= left) continue;
#pragma unroll
        for (int i = 0; i < kOfA; ++i) {
          if constexpr (kRun == 4) {
            const float4 run = __ldg(reinterpret_cast<const float4*>(at_a_[i]));
            scale_a_[step][i] = run.x;
            scale_a_[step + 1][i] = run.y;
            scale_a_[step + 2][i] = run.z;
            scale_a_[step + 3][i] = run.w;
          } else {
            const float2 run = __ldg(reinterpret_cast<const float2*>(at_a_[i]));
            scale_a_[step][i] = run.x;
            scale_a_[step + 1][i] = run.y;
          }
          at_a_[i] += kRun;
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= left) continue;
#pragma unroll
        for (int i = 0; i < kOfA; ++i) {
          scale_a_[step][i] = __ldg(at_a_[i]);
          at_a_[i] += ld_a_;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= left) continue;
#pragma unroll
      for (int i = 0; i < kOfB; ++i) {
        scale_b_[step][i] = __ldg(at_b_[i]);
        at_b_[i] += ld_b_;
      }
    }
  }

  // The products in the order in which OverlappedSum reads them: by 64 rows, scale of b and row.
  __device__ void Write(int step, std::uint32_t stage) const {
    const std::uint32_t address = stage + lane_ * (Shape::kScalesOfThread * 4);
    float products[Shape::kScalesOfThread];
#pragma unroll
    for (int i = 0; i < Shape::kScalesOfThread; ++i) {
      products[i] = scale_a_[step][i / (2 * kOfB) * 2 + i % 2] * scale_b_[step][i / 2 % kOfB];
    }
    if constexpr (Shape::kScalesOfThread == 2) {
      StoreShared(address, products[0], products[1]);
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kScalesOfThread; i += 4) {
        StoreShared(address + i * 4, products[i], products[i + 1], products[i + 2],
                    products[i + 3]);
      }
    }
  }

  // Among the lanes of all these warps.
  const int lane_ = static_cast<int>(threadIdx.x) - Shape::kConsumerThreads - 32;
  const std::int64_t ld_a_;
  const std::int64_t ld_b_;
  const float* at_a_[kOfA];
  const float* at_b_[kOfB];
  bool reads_runs_;
  float scale_a_[kSteps][kOfA];
  float scale_b_[kSteps][kOfB];
};

}  // namespace stoneware::gemm::sm90
