// How a block of persistent_mm sums a tile over k, chunk by chunk, where several warp groups
// multiply.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/persistent_mm_sum_sm90.cuh"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/wgmma_sm90.cuh"

namespace stoneware::gemm::sm90 {

// The factors of a stage's sums, scale_a * scale_b: for two rows of this thread in each 64 of its
// warp group. Columns before kNextScale have the first scale of b, the others the last.
template <class Shape, int kRowSteps, int kNextScale, bool kBlockScales = Shape::kBlockScales>
struct StageScales {
  static constexpr int kOfB = kNextScale < Shape::kTileN ? 2 : 1;
  static constexpr int kNumber = 2 * kRowSteps * kOfB;

  float factors[kRowSteps][kOfB][2];

  // `address`: of the first.
  __device__ __forceinline__ void Load(std::uint32_t address) {
    const int thread = static_cast<int>(threadIdx.x);
    address += (thread / 32 * 8 + thread % 32 / 4) * (Shape::kScalesOfThread * 4);
    if constexpr (kOfB == Shape::kScalesOfB && kNumber % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kNumber / 2; i += 2) {
        const float4 pairs = LoadShared(address + i * 8);
        factors[i / kOfB][i % kOfB][0] = pairs.x;
        factors[i / kOfB][i % kOfB][1] = pairs.y;
        factors[(i + 1) / kOfB][(i + 1) % kOfB][0] = pairs.z;
        factors[(i + 1) / kOfB][(i + 1) % kOfB][1] = pairs.w;
      }
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

  // For the eight columns from `first_column` on.
  __device__ float Factor(int step, int row, int first_column) const {
    return factors[step][first_column < kNextScale ? 0 : kOfB - 1][row];
  }
};

template <class Shape, int kRowSteps, int kNextScale>
struct StageScales<Shape, kRowSteps, kNextScale, false> {
  __device__ void Load(std::uint32_t) {}
};

// Sums tiles chunk by chunk where several warp groups multiply: while one adds the sums of a chunk,
// another multiplies. A warp group multiplies 64 of its rows at a time. With kHasParts the
// products are in two parts: it adds one while the other is multiplied. What stands between two
// products is short: addresses are in uniform registers, scales are read before a
// product or during it, and so is the barrier of the next stage. It sums 64 rows of each warp group
// kRowSteps times.
template <class Shape, int kRowSteps = Shape::kRowSteps>
class OverlappedSum {
 public:
  __device__ explicit OverlappedSum(const SharedMemory<Shape>& shared)
      : operands_(shared),
        full_(InUniformRegister(shared.full->Address())),
        release_(InUniformRegister(shared.empty->Address())),
        scales_(InUniformRegister(SharedAddress(shared.block_scales))) {}

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
  // The columns of a product, and a thread's numbers of it.
  static constexpr int kPartColumns = Shape::kColumns / Shape::kColumnParts;
  static constexpr int kPartSums = kPartColumns / 2;
  using Products = float[1][kPartSums];

  // Stages that one turn of the loop over k takes without parts, as the size of the code allows.
  static constexpr int kUnroll = Shape::kScalesOfB == 1 ? 4 : 1;

  template <int kNextScale>
  using Scales = StageScales<Shape, kRowSteps, kNextScale>;

  template <int kNextScale>
  __device__ void Sum(RingPosition<Shape::kStages>& ring, int num_steps, Sums<Shape>& sums) const {
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) sums[step][i] = 0.0f;
    }
    bool is_full = false;
    if constexpr (Shape::kHasParts) {
      Products products[2] = {};
      int left = num_steps;
#pragma unroll 1
      for (; left >= Shape::kStageParts; left -= Shape::kStageParts) {
        SumStages<kNextScale, Shape::kStageParts>(ring, is_full, products, sums);
      }
      if constexpr (Shape::kStageParts > 1) {
        if (left > 0) SumStages<kNextScale, 1>(ring, is_full, products, sums);
      }
    } else {
      Products products = {};
#pragma unroll kUnroll
      for (int i = 0; i < num_steps; ++i) SumSteps<kNextScale>(ring, is_full, products, sums);
    }
  }

  // Sums a stage, one step of rows after the other.
  template <int kNextScale>
  __device__ __forceinline__ void SumSteps(RingPosition<Shape::kStages>& ring, bool& is_full,
                                           Products& products, Sums<Shape>& sums) const {
    const int stage = ring.stage;
    if (!is_full) Mbarrier::WaitAt(full_ + stage * 8, ring.parity);
    Scales<kNextScale> scales;
    scales.Load(ScalesOf(stage));
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
      Multiply(stage, products, step, 0);
      const bool is_last = step + 1 == kRowSteps;
      if (is_last) {
        ring.Advance();
        is_full = Mbarrier::IsCompleteAt(full_ + ring.stage * 8, ring.parity);
      }
      WaitForWgmma<0>();
      FenceSums(products);
      if (is_last) Release(stage);
      Add<kNextScale>(products, scales, step, 0, sums[step]);
    }
  }

  // Multiplies kNumber stages, two parts at most, and adds each part when it is complete. No wgmma
  // is in flight on return: ptxas serialises those whose sums are read in the next turn of a loop.
  template <int kNextScale, int kNumber>
  __device__ __forceinline__ void SumStages(RingPosition<Shape::kStages>& ring, bool& is_full,
                                            Products (&products)[2], Sums<Shape>& sums) const {
    constexpr int kParts = kNumber * Shape::kColumnParts;
    static_assert(kParts <= 2);
    int stages[kNumber];
    Scales<kNextScale> scales[kNumber];
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      stages[i] = ring.stage;
      if (i > 0 || !is_full) Mbarrier::WaitAt(full_ + stages[i] * 8, ring.parity);
#pragma unroll
      for (int part = 0; part < Shape::kColumnParts; ++part) {
        Multiply(stages[i], products[i * Shape::kColumnParts + part], 0, part * kPartColumns);
      }
      scales[i].Load(ScalesOf(stages[i]));
      ring.Advance();
    }
    is_full = Mbarrier::IsCompleteAt(full_ + ring.stage * 8, ring.parity);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column_part = part % Shape::kColumnParts;
      const int i = part / Shape::kColumnParts;
      if (part + 1 < kParts) {
        WaitForWgmma<1>();
      } else {
        WaitForWgmma<0>();
      }
      FenceSums(products[part]);
      if (column_part + 1 == Shape::kColumnParts) Release(stages[i]);
      Add<kNextScale>(products[part], scales[i], 0, column_part * kPartColumns, sums[0]);
    }
  }

  // Starts the products of 64 rows of each warp group with some columns.
  __device__ __forceinline__ void Multiply(int stage, Products& products, int step,
                                           int first_column) const {
    FenceSums(products);
    FenceWgmma();
    int is_added = 0;
    MultiplyChunk<Shape>(operands_, stage, is_added, products, step, first_column);
    CommitWgmma();
  }

  __device__ __forceinline__ void Release(int stage) const {
    __syncwarp();
    release_(stage);
  }

  __device__ __forceinline__ std::uint32_t ScalesOf(int stage) const {
    return scales_ + stage * (Shape::kChunkScales * 4);
  }

  // Scales the products of the columns from `first_column` on, and adds them.
  template <int kNextScale>
  static __device__ __forceinline__ void Add(const Products& products,
                                             const Scales<kNextScale>& scales, int step,
                                             int first_column, float (&sums)[Shape::kSums]) {
#pragma unroll
    for (int i = 0; i < kPartSums; ++i) {
      const int at = first_column / 2 + i;
      if constexpr (Shape::kBlockScales) {
        // Sum `at` is of column at / 4 * 8 and the seven after it.
        sums[at] += products[0][i] * scales.Factor(step, at / 2 % 2, at / 4 * 8);
      } else {
        sums[at] += products[0][i];
      }
    }
  }

  const Operands<Shape> operands_;
  const std::uint32_t full_;
  const StageRelease<Shape> release_;
  const std::uint32_t scales_;
};

}  // namespace stoneware::gemm::sm90
