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

// Multiplies a chunk of the stages: kSteps times 64 rows of each warp group, from `first_step` on.
// Adds the products to the sums if `is_added` is 1, otherwise overwrites them; sets `is_added`
// to 1.
template <class Shape, int kSteps>
__device__ void MultiplyChunk(const Operands<Shape>& operands, int chunk, int& is_added,
                              float (&sums)[kSteps][Shape::kSums], int first_step = 0) {
  using Instruction = Wgmma<Shape::kRowOperand, Shape::kColumnOperand, Shape::kColumns,
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
        Advance(operands.columns, at * kColumnsOffset + chunk * (Shape::kColumns * kRowOffset));
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

// Sums tiles chunk by chunk where several warp groups multiply: while one adds the sums of a chunk,
// another multiplies. A warp group multiplies 64 of its rows at a time, so that it has one set of
// products. What stands between two products is short: addresses are in uniform registers, scales
// are read before, and it looks whether the next stage is full while it multiplies. It sums
// 64 rows of each warp group kRowSteps times.
template <class Shape, int kRowSteps = Shape::kRowSteps>
class OverlappedSum {
 public:
  __device__ explicit OverlappedSum(const SharedMemory<Shape>& shared)
      : operands_(shared),
        full_(SameInWarp(shared.full->Address())),
        release_(SameInWarp(shared.empty->Address())),
        scales_(SameInWarp(SharedAddress(shared.block_scales))) {}

  // `first_n`: of the tile. Its columns from a multiple of kAlignment on may have the next scale of
  // b. There is a loop for each such column, since a choice for each sum would take as long as the
  // sums.
  template <int kNextScale = Shape::kTileN & -Shape::kTileN>
  __device__ void Run(RingPosition<Shape::kStages>& ring, int num_steps, int first_n,
                      Sums<Shape>& sums) const {
    constexpr int kAlignment = Shape::kTileN & -Shape::kTileN;
    constexpr int kLast = Shape::kTileN < Shape::kScaleBlock ? Shape::kTileN : Shape::kScaleBlock;
    if constexpr (!Shape::kBlockScales || Shape::kScalesOfB == 1) {
      Sum<Shape::kTileN>(ring, num_steps, sums);
    } else if constexpr (kNextScale == kLast) {
      Sum<kLast>(ring, num_steps, sums);
    } else if (Shape::kScaleBlock - first_n % Shape::kScaleBlock == kNextScale) {
      Sum<kNextScale>(ring, num_steps, sums);
    } else {
      Run<kNextScale + kAlignment>(ring, num_steps, first_n, sums);
    }
  }

 private:
  using Products = float[1][Shape::kSums];

  // Stages that one turn of the loop over k takes, as the size of the code allows.
  static constexpr int kUnroll = Shape::kScalesOfB == 1 ? 4 : 1;

  // The scales of a stage: of this thread's rows of a, and of b.
  template <int kNextScale, bool kMultiplied = Shape::kMultipliesScales>
  struct StageScales {
    static constexpr int kOfB = kNextScale < Shape::kTileN ? 2 : 1;

    float of_rows[kRowSteps][2];
    float of_b[kOfB];

    // `address`: of the first.
    __device__ explicit StageScales(std::uint32_t address) {
      if constexpr (Shape::kBlockScales) {
        const int thread = static_cast<int>(threadIdx.x);
        const int row = thread / 128 * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < kOfB; ++i) {
          of_b[i] = LoadSharedFloat(address + (Shape::kTileM + i) * 4);
        }
#pragma unroll
        for (int i = 0; i < 2 * kRowSteps; ++i) {
          of_rows[i / 2][i % 2] =
              LoadSharedFloat(address + (i / 2 * (Shape::kWarpGroups * 64) + i % 2 * 8 + row) * 4);
        }
      }
    }

    __device__ float Product(int step, int row, int scale_of_b) const {
      return of_rows[step][row] * of_b[scale_of_b];
    }
  };

  // Their products: for this thread's two rows of each step, with the first scale of b and the
  // last.
  template <int kNextScale>
  struct StageScales<kNextScale, true> {
    static constexpr int kOfB = kNextScale < Shape::kTileN ? 2 : 1;
    static constexpr int kNumber = 2 * kRowSteps * kOfB;

    float factors[kRowSteps][kOfB][2];

    // `address`: of the first.
    __device__ explicit StageScales(std::uint32_t address) {
      const int thread = static_cast<int>(threadIdx.x);
      address += (thread / 32 * 8 + thread % 32 / 4) * (Shape::kScalesOfThread * 4);
      if constexpr (kNumber == 4 && kNumber == Shape::kScalesOfThread) {
        const float4 all = LoadShared(address);
        factors[0][0][0] = all.x;
        factors[0][0][1] = all.y;
        factors[kRowSteps - 1][kOfB - 1][0] = all.z;
        factors[kRowSteps - 1][kOfB - 1][1] = all.w;
      } else {
#pragma unroll
        for (int i = 0; i < kNumber / 2; ++i) {
          const int at = (i / kOfB * Shape::kScalesOfB + i % kOfB) * 2;
          const float2 pair = LoadSharedPair(address + at * 4);
          factors[i / kOfB][i % kOfB][0] = pair.x;
          factors[i / kOfB][i % kOfB][1] = pair.y;
        }
      }
    }

    __device__ float Product(int step, int row, int scale_of_b) const {
      return factors[step][scale_of_b][row];
    }
  };

  template <int kNextScale>
  __device__ void Sum(RingPosition<Shape::kStages>& ring, int num_steps, Sums<Shape>& sums) const {
    using Scales = StageScales<kNextScale>;
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) sums[step][i] = 0.0f;
    }
    Products products = {};
    bool is_full = false;
#pragma unroll kUnroll
    for (int i = 0; i < num_steps; ++i) {
      const int stage = ring.stage;
      if (!is_full) Mbarrier::WaitAt(full_ + stage * 8, ring.parity);
      const Scales scales(scales_ + stage * (Shape::kChunkScales * 4));
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step) {
        FenceSums(products);
        FenceWgmma();
        int is_added = 0;
        MultiplyChunk<Shape>(operands_, stage, is_added, products, step);
        CommitWgmma();
        const bool is_last = step + 1 == kRowSteps;
        if (is_last) {
          ring.Advance();
          is_full = Mbarrier::IsCompleteAt(full_ + ring.stage * 8, ring.parity);
        }
        float scale[2][Scales::kOfB];
        if constexpr (Shape::kBlockScales) {
#pragma unroll
          for (int j = 0; j < 2 * Scales::kOfB; ++j) {
            scale[j % 2][j / 2] = scales.Product(step, j % 2, j / 2);
          }
        }
        WaitForWgmma<0>();
        FenceSums(products);
        if (is_last) {
          __syncwarp();
          release_(stage);
        }
#pragma unroll
        for (int j = 0; j < Shape::kSums; ++j) {
          if constexpr (Shape::kBlockScales) {
            // Sum j is of column j / 4 * 8 and the seven after it.
            sums[step][j] +=
                products[0][j] * scale[j / 2 % 2][j / 4 * 8 < kNextScale ? 0 : Scales::kOfB - 1];
          } else {
            sums[step][j] += products[0][j];
          }
        }
      }
    }
  }

  const Operands<Shape> operands_;
  const std::uint32_t full_;
  const StageRelease<Shape> release_;
  const std::uint32_t scales_;
};

}  // namespace stoneware::gemm::sm90
