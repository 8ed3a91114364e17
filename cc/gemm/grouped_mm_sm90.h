// Grouped matrix product for Hopper (mixture of experts).
//
//   d[m, n] = scale_a[m] * scale_b[g, n] * sum_k a[m, k] * b[g, k, n]
//   for the rows m of group g: offsets[g - 1] <= m < offsets[g], with offsets[-1] = 0
//
//   tensor    shape           stride                      dtype
//   a         [m, k]          [lda, 1]                    kA (e4m3, bf16 or fp16)
//   b         [groups, k, n]  [batch_stride_b, 1, ldb]    kA
//   d         [m, n]          [ldd, 1]                    kOut (bf16 or fp16)
//   offsets   [groups]        [1]                         int32, never decreasing
//   scale_a   [m]             [1]                         fp32; null: 1
//   scale_b   [groups, n]     [n, 1]                      fp32; null: 1
//
// The accumulator is fp32, summed by the tensor core over all of k; scales are applied to it in
// fp32. Rows of d from the last offset on are not written. A group may be empty or end at any row.
//
// The grid is persistent: at most one block per SM, and each block goes from output tile to output
// tile. Only the device knows the tiles, from the offsets: each block makes a table of them in
// shared memory. So neither a set-up kernel nor a workspace is needed, and two tensor maps are
// enough, one for all of a and one for all of b. A tile of a begins at any row, which TMA allows;
// it also reads rows of the next group, whose results are not stored.
//
// What makes it fast: one thread keeps TMA loads in flight, across the ends of tiles and groups,
// while the other warp groups run wgmma and store straight from registers. With kSwapAb the weights
// are wgmma's 64 rows and the tokens its columns, of which there may be as few as 16: few tokens a
// group cost little more than reading the weights.
//
// Beside what every config has (config.h), one of this family has kSchedule. This header is what
// the device side (grouped_mm_sm90.cuh) and the host side (grouped_mm_sm90_host.h) share.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/gemm/config.h"
#include "cc/gemm/epilogue_sm90.h"
#include "cc/gemm/grouped_tiles.h"

namespace stoneware::gemm::sm90 {

// What follows from a config alone.
template <class Config>
struct GroupedMmShape {
  static constexpr DType kOperand = Config::kA;
  static_assert(kOperand == Config::kB);
  static constexpr DType kOut = Config::kOut;
  static constexpr bool kIsOpen = sm90::kIsOpen<Config>;
  static constexpr int kOperandBytes = BytesOf(kOperand);
  static_assert(BytesOf(kOut) == 2);

  // "Rows" are those of wgmma's first operand, 64 a step, "columns" those of its second: the
  // caller's m and n, or with kSwapAb n and m.
  static constexpr bool kSwapAb = Config::kSwapAb;
  static constexpr int kTileRows = Config::kTileM;
  static constexpr int kTileColumns = Config::kTileN;
  static constexpr int kTileK = Config::kTileK;
  static constexpr int kTileM = kSwapAb ? kTileColumns : kTileRows;
  static constexpr int kTileN = kSwapAb ? kTileRows : kTileColumns;

  // With pingpong each of two warp groups multiplies a tile of its own; otherwise both share one.
  static constexpr bool kIsPingpong = Config::kSchedule == Schedule::kPingpong;
  static_assert(kIsPingpong || Config::kSchedule == Schedule::kCooperative);
  static constexpr int kNumConsumers = 2;
  static constexpr int kConsumersPerTile = kIsPingpong ? 1 : kNumConsumers;
  static constexpr int kThreadsPerGroup = 128;
  static constexpr int kThreads = (1 + kNumConsumers) * kThreadsPerGroup;
  static_assert(kTileRows % (64 * kConsumersPerTile) == 0);
  // Steps of 64 rows of each of them, and the sums of a thread for one step.
  static constexpr int kRowSteps = kTileRows / (64 * kConsumersPerTile);
  static constexpr int kSums = kTileColumns / 2;

  // A row of a TMA box is one row of the 128-byte swizzle.
  static constexpr int kSlabBytes = 128;
  static constexpr int kSlabK = kSlabBytes / kOperandBytes;
  static constexpr int kNumSlabs = kTileK / kSlabK;
  static_assert(kTileK % kSlabK == 0);

  static constexpr int kRowStageBytes = kTileRows * kTileK * kOperandBytes;
  static constexpr int kColumnStageBytes = kTileColumns * kTileK * kOperandBytes;
  static constexpr int kStageBytes = kRowStageBytes + kColumnStageBytes;

  // Shared memory: the stages, then barriers and table.
  static constexpr int kMaxStages = 16;
  static constexpr int kBarrierBytes = 2 * kMaxStages * 8;
  static constexpr int kTableBytes = 2 * kMaxGroups * 4;
  static constexpr int kStagesThatFit =
      (kMaxSharedBytesSm90 - kBarrierBytes - kTableBytes) / kStageBytes;
  static constexpr int kStages = kStagesThatFit < kMaxStages ? kStagesThatFit : kMaxStages;
  static_assert(kStages >= 2);
  static constexpr int kSharedBytes = kStages * kStageBytes + kBarrierBytes + kTableBytes;
};

// The kernel's only parameter.
struct GroupedMmParams {
  CUtensorMap rows;     // of wgmma's first operand
  CUtensorMap columns;  // of its second
  void* d;
  const float* scale_a;
  const float* scale_b;
  const std::int32_t* offsets;
  std::int64_t ldd;
  int m;
  int n;
  int k;
  int num_groups;
  int band;  // tiles along m that run together, so that their operands fit L2
};

}  // namespace stoneware::gemm::sm90
