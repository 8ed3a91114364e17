// How a block of persistent_mm sums a tile over k.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/wgmma_sm90.cuh"

namespace stoneware::gemm::sm90 {

// A thread's sums, for each 64 rows of its warp group.
template <class Shape>
using Sums = float[Shape::kRowSteps][Shape::kSums];

// Matrix descriptors of the rows of this thread's warp group and of the columns.
template <class Shape>
struct Operands {
  std::uint64_t rows;
  std::uint64_t columns;

  __device__ explicit Operands(const SharedMemory<Shape>& shared)
      : rows(OperandDescriptor(shared.rows + WarpGroup() * (64 * Shape::kChunkElements),
                               Shape::kContiguousRows)),
        columns(OperandDescriptor(shared.columns, Shape::kContiguousColumns)) {
    // In uniform registers, where a thread has no others left.
    if constexpr (Shape::kOverlapsSums || Shape::kPingpong ||
                  (Shape::kGroups && Shape::kWarpGroups > 1)) {
      rows = SameInWarp(rows);
      columns = SameInWarp(columns);
    }
  }

 private:
  static __device__ int WarpGroup() {
    return static_cast<int>(threadIdx.x) / 128 % Shape::kGroupsOfTile;
  }
};

// Multiplies a chunk of the stages: kSteps times 64 rows of each warp group, from `first_step` on,
// by as many columns as there are sums, from `first_column` on. Adds the products to the sums if
// `is_added` is 1, otherwise overwrites them; sets `is_added` to 1.
template <class Shape, int kSteps, int kSums>
__device__ void MultiplyChunk(const Operands<Shape>& operands, int chunk, int& is_added,
                              float (&sums)[kSteps][kSums], int first_step = 0,
                              int first_column = 0) {
  using Instruction = Wgmma<Shape::kRowOperand, Shape::kColumnOperand, 2 * kSums,
                            (Shape::kContiguousRows > 0), (Shape::kContiguousColumns > 0)>;
  // In the units of a matrix descriptor: from one wgmma to the next along k, and from row to row.
  constexpr int kRowsOffset = WgmmaOffset(Shape::kContiguousRows);
  constexpr int kColumnsOffset = WgmmaOffset(Shape::kContiguousColumns);
  constexpr int kRowOffset = Shape::kChunkBytes / kDescriptorBytes;
#pragma unroll
  for (int at = 0; at < Shape::kChunkBytes / kWgmmaBytes; ++at) {
    const std::uint64_t rows =
        Advance(operands.rows, at * kRowsOffset + chunk * (Shape::kRows * kRowOffset));
    const std::uint64_t columns =
        Advance(operands.columns,
                at * kColumnsOffset + (chunk * Shape::kColumns + first_column) * kRowOffset);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Instruction::Multiply(
          sums[step], Advance(rows, (first_step + step) * (Shape::kGroupsOfTile * 64 * kRowOffset)),
          Advance(columns, 0), is_added);
    }
    is_added = 1;
  }
}

// Tells the loaders that a stage has been read: block scales by each thread, tiles by wgmma.
template <class Shape>
class StageRelease {
 public:
  __device__ explicit StageRelease(std::uint32_t empty) : empty_(empty) {
    if constexpr (kKeepsAddress) empty_ = AddressOfLoader();
  }

  __device__ void operator()(int stage) const {
    if constexpr (Shape::kSharingBlocks > 1) {
      if (lane_ < Shape::kLoadingBlocks) {
        Mbarrier::ArriveInClusterAt((kKeepsAddress ? empty_ : AddressOfLoader()) + stage * 8);
      }
    } else if (kReadsByEachThread || lane_ == 0) {
      Mbarrier::ArriveAt(empty_ + stage * 8);
    }
  }

 private:
  static constexpr bool kReadsByEachThread = Shape::kBlockScales && !Shape::kOverlapsSums;
  // With kPingpong a thread has no register for it.
  static constexpr bool kKeepsAddress = Shape::kSharingBlocks > 1 && !Shape::kPingpong;

  // A lane has a block of those that load to this one: the barriers there.
  __device__ std::uint32_t AddressOfLoader() const {
    return AddressInBlock(empty_,
                          PlaceInCluster<Shape>::Loader(min(lane_, Shape::kLoadingBlocks - 1)));
  }

  const int lane_ = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t empty_;
};

// Sums a tile over k. On return the last products are still being summed; returns their stage,
// which the caller must release.
template <class Shape>
__device__ int SumTile(const SharedMemory<Shape>& shared, const Operands<Shape>& operands,
                       const StageRelease<Shape>& release, RingPosition<Shape::kStages>& ring,
                       int num_steps, Sums<Shape>& sums) {
  int is_added = 0;
  int last_stage = 0;
  bool is_full = false;
  for (int i = 0; i < num_steps; ++i) {
    const int stage = ring.stage;
    if (!is_full) shared.full[stage].Wait(ring.parity);
    FenceSums(sums);
    FenceWgmma();
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      MultiplyChunk<Shape>(operands, stage * Shape::kChunks + chunk, is_added, sums);
    }
    CommitWgmma();
    ring.Advance();
    if constexpr (Shape::kAsksEarly) {
      is_full = Mbarrier::IsCompleteAt(shared.full[ring.stage].Address(), ring.parity);
    }
    // The stage before this one has been read.
    WaitForWgmma<1>();
    FenceSums(sums);
    if (i > 0) release(last_stage);
    last_stage = stage;
  }
  return last_stage;
}

// Scales the sums of a chunk and adds them.
template <class Shape>
__device__ void AddScaled(const SharedMemory<Shape>& shared, int chunk, const Sums<Shape>& of_chunk,
                          Sums<Shape>& sums) {
  const float* const scales = shared.BlockScales(chunk);
  const float row_scale = scales[Shape::kColumns];
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int step = 0; step < Shape::kRowSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; i += 2) {
      // One load of both: libNVVM combines two loads in some compilations only.
      const auto of_columns = *reinterpret_cast<const float2*>(scales + i / 4 * 8 + column);
      sums[step][i] += of_chunk[step][i] * (of_columns.x * row_scale);
      sums[step][i + 1] += of_chunk[step][i + 1] * (of_columns.y * row_scale);
    }
  }
}

// The products of each chunk of a stage.
template <class Shape>
using Products = Sums<Shape>[Shape::kChunks];

// Adds chunk after chunk, each as soon as it is there, from kChunk on.
template <class Shape, int kChunk = 0>
__device__ void AddProducts(const SharedMemory<Shape>& shared, int stage, Products<Shape>& products,
                            Sums<Shape>& sums) {
  WaitForWgmma<Shape::kChunks - 1 - kChunk>();
  FenceSums(products[kChunk]);
  AddScaled<Shape>(shared, stage * Shape::kChunks + kChunk, products[kChunk], sums);
  if constexpr (kChunk + 1 < Shape::kChunks) {
    AddProducts<Shape, kChunk + 1>(shared, stage, products, sums);
  }
}

// Sums a tile over k with block scales, all of it, on one warp group.
template <class Shape>
__device__ void SumScaledTile(const SharedMemory<Shape>& shared, const Operands<Shape>& operands,
                              const StageRelease<Shape>& release,
                              RingPosition<Shape::kStages>& ring, int num_steps,
                              Sums<Shape>& sums) {
#pragma unroll
  for (int step = 0; step < Shape::kRowSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[step][i] = 0.0f;
  }
  Products<Shape> products = {};
  for (int i = 0; i < num_steps; ++i, ring.Advance()) {
    const int stage = ring.stage;
    shared.full[stage].Wait(ring.parity);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) FenceSums(products[chunk]);
    FenceWgmma();
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      int is_added = 0;
      MultiplyChunk<Shape>(operands, stage * Shape::kChunks + chunk, is_added, products[chunk]);
      CommitWgmma();
    }
    AddProducts<Shape>(shared, stage, products, sums);
    release(stage);
  }
}

}  // namespace stoneware::gemm::sm90
