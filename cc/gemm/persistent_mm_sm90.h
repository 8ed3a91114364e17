// Matrix product for Hopper. Blocks go from tile to tile or, if there are few tiles, share the k of
// one.
//
//   d[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias[n]
//
//   tensor    shape           stride                 dtype
//   a         [m, k]          [lda, 1], or with      kA (fp8, bf16 or fp16)
//                             kAIsMMajor [1, lda]
//   b         [k, n]          [1, ldb], or with      kB, as many bytes as kA
//                             kBIsNMajor [ldb, 1]
//   d         [m, n]          [ldd, 1]               kOut (bf16, fp16 or fp32)
//   scale_a   [m] or scalar   [1] or [0]             fp32, or null for 1; of fp8
//   scale_b   [n] or scalar   [1] or [0]             fp32, or null for 1; of fp8
//   bias      [n] or null     [1]                    kOut
//
// A d of fp32 may be added to, d += (`accumulate` of Params): one thread, or one reduction by TMA,
// adds each element once.
//
// With kBlockScales the scales are inside the sum, a pair for each 128 of k:
//
//   d[m, n] = sum_j scale_a[m, j] * scale_b[j, n / 128] * (the sum over block j of k) + bias[n]
//
//   scale_a   [m, k / 128]    any                    fp32
//   scale_b   [k / 128, n / 128, rounded up]  any    fp32
//
// With kGroups the rows of a are in groups, and each has its own b and scale_b (mixture of
// experts): group g has the rows m with offsets[g - 1] <= m < offsets[g], and offsets[-1] is 0.
//
//   b         [groups, k, n]  [group_stride_b, 1, ldb]
//   scale_b   [groups, n] or [groups, k / 128, n / 128, rounded up]
//   offsets   [groups]        [1]                    int32, never decreasing
//
// A group may be empty, or begin and end at any row. Rows of d from the last offset on are not
// written. Only the device knows the tiles: each block makes a table of them in shared memory. A
// tile may also read rows of the next group, whose sums are not stored.
//
// The accumulator is fp32. The tensor core sums fp8 over all of a block's k ("fast accumulation").
// With block scales or kPromotes ("slow accumulation") it sums over 128 of k, and fp32 instructions
// add these sums. The partial sums of a tile's blocks are added in the order of k, so an element's
// bits depend neither on the run nor on where it lies in a tile.
//
// With kSwapAb it computes d^T = b^T a^T: n runs along the 64 rows of wgmma, and m along its
// columns, of which there may be as few as 16. A tile has kTileM of n and kTileN of m. Otherwise
// rows are m, and columns are n.
//
// The grid is one-dimensional, of clusters. With splits the blocks of a cluster share the k of one
// tile; with kSharesGrid, clusters do, through a workspace in global memory. Otherwise a cluster is
// one block, which goes from tile to tile until all are done; or it is kBlocksAlongM times
// kBlocksAlongN blocks, whose tiles lie side by side along m and n. Blocks side by side along n
// each load a part of their rows of a for all of them, or of the k of all rows; blocks along m do
// the same with columns of b. With splits as well, a cluster has as many blocks for each slice of
// k.
//
// With kPingpong each warp group has tiles of its own: two take turns, and one multiplies while the
// other stores.
//
// What makes it fast: every SM reads b from the first microsecond to the last. Loads start as soon
// as a block's barriers are ready, and L2 prefetches the first ones before; partial sums go from
// registers to the shared memory of other blocks; TMA stores a tile while the next is multiplied.
// docs/design/persistent_mm_sm90.md and the pages that it names have the measurements.
//
// Beside what every config has (config.h), one of this family has kStages, kWarpGroups,
// kBlockScales, kBlocksAlongM, kBlocksAlongN, kGroups, kMaxSplits, kPromotes, kSchedule,
// kSharesColumns and kSharesGrid. This header is what the device side (persistent_mm_sm90.cuh) and
// the host side (persistent_mm_sm90_host.h) share.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/gemm/config.h"
#include "cc/gemm/epilogue_sm90.h"
#include "cc/gemm/fast_divmod.h"
#include "cc/gemm/grouped_tiles.h"

namespace stoneware::gemm::sm90 {

// The kernel's parameter is made of base classes: one that a config does not need takes no space.
struct PersistentMmMaps {
  CUtensorMap a_map;  // [m, k]
  CUtensorMap b_map;  // of b^T: [n, k]
  CUtensorMap d_map;  // [m, n], of boxes
};

struct PersistentMmScalars {
  void* d;
  const float* scale_a;
  const float* scale_b;
  const void* bias;
  std::int64_t ldd;
  std::int64_t scale_a_stride;  // from one row of a to the next
  std::int64_t scale_b_stride;  // from one column of b, or 128 of them, to the next
  std::int64_t ld_scale_a;      // of block scales: from one 128 of k to the next
  std::int64_t ld_scale_b;
  int m;
  int n;
  int k;
  int stage_bytes;  // that are loaded for a stage of a whole tile
  int rows_of_a_box;
  int rows_of_b_box;
  int num_k_tiles;
  int num_m_tiles;
  int num_tiles;  // of d
  // Tiles go band by band: a band has some tiles in m and all in n, and m runs first.
  int last_band;
  FastDivmod tiles_of_band;
  FastDivmod height_of_band;  // tiles in m
  FastDivmod height_of_last_band;
};

template <bool kFetchesAhead>
struct PersistentMmAheadParams {};

template <>
struct PersistentMmAheadParams<true> {
  const void* b;
  std::int64_t ldb_bytes;
};

template <bool kGroups>
struct PersistentMmGroupParams {};

template <>
struct PersistentMmGroupParams<true> {
  const std::int32_t* offsets;
  std::int64_t group_stride_scale_b;
  int num_groups;
};

template <bool kFloatOut>
struct PersistentMmAddParams {};

template <>
struct PersistentMmAddParams<true> {
  bool accumulate;  // d += instead of d =
};

template <bool kSplitsAnywhere>
struct PersistentMmShareParams {};

template <>
struct PersistentMmShareParams<true> {
  FastDivmod splits;
};

template <bool kSharesGrid>
struct PersistentMmGridParams {};

template <>
struct PersistentMmGridParams<true> {
  unsigned*
      arrivals;  // for each block of d: how many of its parts are in the workspace, 0 at first
  void* partial_sums;  // the workspace, of each block of the grid: word after word
};

template <bool kSmallerBoxes>
struct PersistentMmSmallerParams {};

template <>
struct PersistentMmSmallerParams<true> {
  CUtensorMap smaller_d_map;
};

// The boxes in which `kBlocks` blocks of a cluster load the `kRows` rows of an operand for each
// other, a chunk of k at a time. If k runs fastest, each block loads one box, of its part of the
// rows. If the operand has fewer rows, so have the boxes: TMA can take longer to fill a row with
// zeros than to load one, and what the rows beyond hold is never stored. If rows run fastest, a box
// has `kContiguousRows` of them; each block loads some boxes or, if these cannot be divided, a part
// of the k of all.
template <int kRows, int kContiguousRows, int kBlocks>
struct OperandBoxes {
  static constexpr int kChunkBytes = 128;  // of k, of a row
  static constexpr int kContiguous = kContiguousRows;
  static constexpr int kContiguousK = kChunkBytes / 2;  // elements of 16 bits
  static constexpr bool kDividesK = kContiguous > 0 && kRows / kContiguous % kBlocks != 0;

  // What the tensor map's box has, at most.
  static constexpr int kRowsOfBox = kContiguous > 0 ? kContiguous : kRows / kBlocks;
  static constexpr int kKOfBox = kDividesK ? kContiguousK / kBlocks : kContiguousK;

  static constexpr int kNumber = kRows / (kDividesK ? kRowsOfBox : kRowsOfBox * kBlocks);
  static constexpr int kBytesFromBoxToBox = kRowsOfBox * kChunkBytes;
  static constexpr int kKFromPartToPart = kDividesK ? kKOfBox : 0;

  // What it has of an operand of `rows` rows.
  static constexpr int RowsOfBox(int rows) {
    return kContiguous > 0 || rows >= kRows ? kRowsOfBox : (rows - 1) / kBlocks + 1;
  }

  // What all blocks load of a chunk.
  static constexpr int BytesOfChunk(int rows) {
    return (kContiguous > 0 ? kRows : RowsOfBox(rows) * kBlocks) * kChunkBytes;
  }
};

// What follows from a config alone.
template <class Config>
struct PersistentMmShape {
  static constexpr DType kA = Config::kA;
  static constexpr DType kB = Config::kB;
  static constexpr DType kOut = Config::kOut;
  static constexpr int kOperandBytes = BytesOf(kA);
  static_assert(kOperandBytes == BytesOf(kB));
  static constexpr int kOutBytes = BytesOf(kOut);

  static constexpr bool kGroups = Config::kGroups;

  static constexpr bool kIsOpen = sm90::kIsOpen<Config>;

  // Rows and columns are those of what is computed: with swapped operands d^T.
  static constexpr bool kSwapAb = Config::kSwapAb;
  static constexpr DType kRowOperand = kSwapAb ? kB : kA;
  static constexpr DType kColumnOperand = kSwapAb ? kA : kB;
  static constexpr int kRows = Config::kTileM;
  static constexpr int kColumns = Config::kTileN;
  // The tile's share of m and of n.
  static constexpr int kTileM = kSwapAb ? kColumns : kRows;
  static constexpr int kTileN = kSwapAb ? kRows : kColumns;
  static constexpr int kTileK = Config::kTileK;
  // The rows, or columns, of a swizzle atom (wgmma_sm90.cuh) if they run fastest in memory instead
  // of k, else 0: of an M-major a or an N-major b. A chunk of k has the atoms of these rows one
  // after the other: they take as many bytes, at the same place, as rows in which k runs fastest.
  static constexpr int kContiguousRows =
      (kSwapAb ? Config::kBIsNMajor : Config::kAIsMMajor) ? 64 : 0;
  static constexpr int kContiguousColumns = !(kSwapAb ? Config::kAIsMMajor : Config::kBIsNMajor) ? 0
                                            : kColumns % 64 == 0 ? 64
                                                                 : 32;
  static constexpr bool kAIsMMajor = Config::kAIsMMajor;
  static constexpr bool kBIsNMajor = Config::kBIsNMajor;
  static_assert(kOperandBytes == 2 || !(kAIsMMajor || kBIsNMajor),
                "wgmma takes fp8 with k fastest");
  static_assert(kContiguousColumns == 0 || kColumns % kContiguousColumns == 0,
                "persistent_mm_sm90.bzl refuses such a config");
  static constexpr int kStages = Config::kStages;
  static constexpr int kWarpGroups = Config::kWarpGroups;
  static constexpr bool kPingpong = Config::kSchedule == Schedule::kPingpong;
  static_assert(!kPingpong || (kWarpGroups == 2 && Config::kMaxSplits == 1 && !Config::kPromotes),
                "persistent_mm_sm90.bzl refuses such a config");
  // Warp groups that share a tile.
  static constexpr int kGroupsOfTile = kPingpong ? 1 : kWarpGroups;
  // Whether the warp that loads hands over where each tile of a group begins. With kPingpong the
  // stage of a tile's first step may be gone when a warp group asks.
  static constexpr bool kHandsOverTiles = kGroups && !kPingpong;
  // Steps of 64 rows of each warp group.
  static constexpr int kRowSteps = kRows / (64 * kGroupsOfTile);
  // Sums of a thread for one step.
  static constexpr int kSums = kColumns / 2;

  // A swizzle atom of shared memory is 128 bytes wide: that much of k is loaded at a time.
  static constexpr int kChunkBytes = 128;
  static constexpr int kChunkElements = kChunkBytes / kOperandBytes;
  static constexpr int kChunks = kTileK / kChunkElements;
  static_assert(kChunks * kChunkElements == kTileK);

  static constexpr int kRowStageBytes = kRows * kTileK * kOperandBytes;
  static constexpr int kColumnStageBytes = kColumns * kTileK * kOperandBytes;

  // Elements of k, and columns of b, that share a block scale.
  static constexpr int kScaleBlock = 128;
  static constexpr bool kBlockScales = Config::kBlockScales;
  // The tensor core sums over a chunk.
  static constexpr bool kPromotes = kBlockScales || Config::kPromotes;
  static_assert(!kPromotes || kChunkElements == kScaleBlock,
                "persistent_mm_sm90.bzl refuses such a config");
  // Scales of b that a tile meets in one chunk: tiles begin at multiples of their width.
  static constexpr int kScalesOfB = kScaleBlock % kTileN == 0 ? 1 : 2;
  static_assert(!kBlockScales ||
                    (kSwapAb ? kScalesOfB == 1 : kTileN - (kTileN & -kTileN) <= kScaleBlock),
                "persistent_mm_sm90.bzl refuses such a config");
  // While one warp group adds the sums of a chunk, another multiplies: they do not wait for each
  // other, at the end of a tile neither.
  static constexpr bool kOverlapsSums = kPromotes && kWarpGroups > 1;
  static_assert(kPromotes ? kSwapAb != kOverlapsSums && (kBlockScales || kOverlapsSums) : true,
                "persistent_mm_sm90.bzl refuses such a config");
  // The products are in two parts, of which a warp group adds one while the other is multiplied:
  // halves of a stage's columns, of 80 and more each, or two
  // stages, whose products registers must have place for. docs/design/block_scales_sm90.md has the
  // times of both, and of narrow tiles, which are slower with parts.
  static constexpr bool kHasParts =
      kOverlapsSums && kWarpGroups == 2 && kRowSteps == 1 && kColumns >= 128 && kColumns % 32 == 0;
  static constexpr int kColumnParts = kHasParts && kColumns > 128 ? 2 : 1;
  static constexpr int kStageParts = kHasParts && kColumns == 128 && kStages > 1 ? 2 : 1;

  // Blocks of a cluster that load operands for each other.
  static constexpr int kBlocksAlongM = Config::kBlocksAlongM;
  static constexpr int kBlocksAlongN = Config::kBlocksAlongN;
  static constexpr int kSharingBlocks = kBlocksAlongM * kBlocksAlongN;
  // Whether the halves of a tile's rows of a are loaded and multiplied separately, so that a group
  // with few rows left skips the second: tiles with two steps of 64 rows of each warp group.
  static constexpr bool kHasHalves = kGroups && kOverlapsSums && kRowSteps == 2;
  static constexpr int kPartsOfA = kHasHalves ? 2 : 1;
  using BoxesOfA = OperandBoxes<kTileM / kPartsOfA, kSwapAb ? kContiguousColumns : kContiguousRows,
                                kBlocksAlongN>;
  using BoxesOfB =
      OperandBoxes<kTileN, kSwapAb ? kContiguousRows : kContiguousColumns, kBlocksAlongM>;
  // Those that load to one block: along m and along n, itself counted once.
  static constexpr int kLoadingBlocks = kBlocksAlongM + kBlocksAlongN - 1;
  static_assert(kSharingBlocks == 1 ||
                    ((Config::kMaxSplits == 1 || Config::kSharesColumns || Config::kSharesGrid) &&
                     (!kBlockScales || kOverlapsSums) && (!kGroups || kBlocksAlongM == 1)),
                "persistent_mm_sm90.bzl refuses such a config");

  static constexpr int kConsumerThreads = 128 * kWarpGroups;
  // Then a warp that loads, and some for block scales. With several warp groups these are in a warp
  // group of their own, which gives registers to the others.
  static constexpr bool kMovesRegisters = kWarpGroups > 1;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128
                                                      : kBlockScales  ? 64
                                                                      : 32);
  // Registers of a thread. All together at most what the block starts with: 65536 divided by its
  // threads, rounded down to a multiple of 8, for each thread.
  static constexpr bool kNeedsMost = (kOverlapsSums || kGroups || kPingpong) && kWarpGroups == 2;
  static constexpr int kLoaderRegisters = kNeedsMost ? 40 : 56;
  static constexpr int kConsumerRegisters = kNeedsMost ? 232 : kWarpGroups == 2 ? 224 : 152;
  static_assert(!kMovesRegisters ||
                kConsumerRegisters * kConsumerThreads + kLoaderRegisters * 128 <=
                    65536 / kThreads / 8 * 8 * kThreads);

  // Whether a warp asks if the next stage is full before it waits for the products of the last one:
  // where products take so little time that they would be done before the answer.
  static constexpr bool kAsksEarly = kRows * kColumns <= 64 * 96;

  static constexpr int kStagesBytes = kStages * (kRowStageBytes + kColumnStageBytes);
  // Scales and bias of a tile, and of the next one; a copy for each warp group if each stores
  // without the others.
  // Straight groups of 16 bits have some, of 1: without them nvcc compiles the open kernel of one
  // tile differently from the closed one (tests/open_kernels).
  static constexpr bool kHasVectorScales =
      (kOperandBytes == 1 || (kGroups && !kSwapAb)) && !kBlockScales;
  static constexpr int kVectors = kHasVectorScales ? 2 * kTileN + kTileM : kTileN;
  static constexpr int kVectorCopies = kOverlapsSums || kPingpong ? kWarpGroups : 1;
  static constexpr int kVectorThreads = kConsumerThreads / kVectorCopies;
  static constexpr int kVectorBytes = 2 * kVectors * 4 * kVectorCopies;
  // Whether warps store products of the scales of a and b (several warp groups), or one warp copies
  // the scales.
  static constexpr bool kMultipliesScales = kBlockScales && kOverlapsSums;
  static_assert(!kMultipliesScales || kChunks == 1, "persistent_mm_sm90.bzl refuses such a config");
  static constexpr int kScaleWarps = kMultipliesScales ? kWarpGroups : kBlockScales ? 1 : 0;
  // At the barrier of a stage: from each of these warps, or from each thread.
  static constexpr int kScaleArrivals = kMultipliesScales ? kScaleWarps : 32 * kScaleWarps;
  static constexpr int kScalesOfThread = 2 * kRowSteps * kScalesOfB;
  // Scales of a chunk: products, for each four threads; or one for each m, then the one of b,
  // padded to 16 bytes.
  static constexpr int kChunkScales =
      kMultipliesScales ? kConsumerThreads / 4 * kScalesOfThread : kTileM + 4;
  static constexpr int kBlockScaleBytes = kBlockScales ? kStages * kChunks * kChunkScales * 4 : 0;
  // Two barriers per stage, and one for partial sums.
  static constexpr int kBarrierBytes = (2 * kStages + 1) * 8;
  // The table of groups, and a tile for each stage.
  static constexpr int kTableBytes =
      kGroups ? 2 * kMaxGroups * 4 + (kHandsOverTiles ? kStages * 16 : 0) : 0;

  static_assert(kColumns % (kSwapAb ? 8 : 16) == 0, "persistent_mm_sm90.bzl refuses such a config");

  // A result in fp32 may be added to d.
  static constexpr bool kFloatOut = kOutBytes == 4;
  static_assert(!kFloatOut || (!kGroups && !kPromotes),
                "persistent_mm_sm90.bzl refuses such a config");

  // The last tile along m, and along n, begins so early that it is full: one with rows beyond an
  // operand takes longer. What is in several tiles has the same bits in all, but must not be added
  // to d. A tile with block scales begins at a multiple of its n.
  static constexpr bool kFullAlongM = !kFloatOut;
  static constexpr bool kFullAlongN = !kFloatOut && !kBlockScales;

  // From m = 64 on a tile is stored in boxes of 64 of m by 128 bytes of n: each warp group writes
  // them to shared memory, from where TMA stores them. Columns beyond the whole boxes are a smaller
  // one. Of fp32 with swapped operands, threads store their registers: eight of them a whole
  // sector.
  static constexpr int kBoxM = 64;
  static constexpr int kBoxN = 128 / kOutBytes;
  static constexpr int kBoxBytes = kBoxM * kBoxN * kOutBytes;
  static constexpr int kBoxColumns = kSwapAb ? kBoxM : kBoxN;
  static constexpr int kLastBoxColumns = (kColumns - 1) % kBoxColumns + 1;
  static constexpr bool kSmallerBoxes =
      (kTileM >= kBoxM && !(kSwapAb && kFloatOut)) && kLastBoxColumns != kBoxColumns;
  // The boxes of a warp group for one tile.
  static constexpr int kBoxesWanted = kRowSteps * ((kColumns - 1) / kBoxColumns + 1);
  // A block's last tile has its boxes where its stages were, if each has a place there, and no warp
  // group multiplies another tile.
  static constexpr bool kBoxesFitStages = !kPingpong && kBoxesWanted <= kStages * kChunks;
  static constexpr int kWantedBytes =
      (kBoxesWanted - 1) * kBoxBytes + kBoxBytes / kBoxColumns * kLastBoxColumns;
  // Beside the stages each box has a place, or as many as fit are used in turn, so that the next
  // tile is multiplied while boxes are stored. If none fits, threads store their registers.
  static constexpr int kBoxSpace = (kMaxSharedBytesSm90 - kStagesBytes - kVectorBytes -
                                    kBlockScaleBytes - kBarrierBytes - kTableBytes) /
                                   kWarpGroups;
  static constexpr bool kHasPlaceForEach = kWantedBytes <= kBoxSpace;
  static constexpr bool kStoresAtOnce = kOverlapsSums && kHasPlaceForEach;
  // With groups they do so as well unless each box has a place.
  static constexpr int kBoxes = kTileM < kBoxM || (kSwapAb && kFloatOut) ? 0
                                : kHasPlaceForEach                       ? kBoxesWanted
                                : kGroups                                ? 0
                                                                         : kBoxSpace / kBoxBytes;
  static constexpr bool kStoresBoxes = kBoxes > 0;
  static_assert(kSwapAb || kStoresBoxes || kGroups, "persistent_mm_sm90.bzl refuses such a config");
  static constexpr int kGroupBoxesBytes =
      kStoresBoxes && kHasPlaceForEach ? kWantedBytes : kBoxes * kBoxBytes;
  static constexpr int kBoxesBytes = kWarpGroups * kGroupBoxesBytes;

  // With kSharesGrid clusters that lie side by side in the grid share the k of a tile. The block
  // that is the last to have its sums adds those of all, and stores them.
  static constexpr bool kSharesGrid = Config::kSharesGrid;
  static_assert(!kSharesGrid || !(kGroups || kBlockScales || Config::kSharesColumns),
                "persistent_mm_sm90.bzl refuses such a config");

  // Otherwise each block of a cluster stores a part of the tile, and the others send it their sums
  // of that part. A part is some warps' sums: with several warp groups those of a whole one, so
  // that boxes stay whole. With kSharesColumns it is some groups of 16 columns, and any number of
  // blocks share k.
  static constexpr int kMaxSplits = kSharesGrid ? 1 : Config::kMaxSplits;  // of a cluster
  static constexpr bool kSharesColumns = Config::kSharesColumns;
  static_assert(kMaxSplits == 1 || kMaxSplits == (kSharesColumns || kWarpGroups == 1 ? 4 : 2) ||
                (kSharesColumns && kMaxSplits == 8));
  static_assert(kMaxSplits * kSharingBlocks <= 8, "persistent_mm_sm90.bzl refuses such a config");
  static_assert(kMaxSplits == 1 || !kGroups, "persistent_mm_sm90.bzl refuses such a config");
  static constexpr bool kSplitsStoreBoxes =
      kStoresBoxes && !kSharesColumns && kMaxSplits <= kWarpGroups;

  // Sums of warps arrive in the space of the boxes, before there are any.
  static constexpr int kPartialBytes =
      kSharesColumns ? 0 : kRows * kColumns * 4 / kMaxSplits * (kMaxSplits - 1);

  // Sums of columns have the space of the stages and boxes, when all blocks have read their stages:
  // those of this block, and then those that arrive.
  static constexpr int kColumnGroups = (kColumns + 15) / 16;
  static constexpr int kGroupBytes = kRows * 16 * 4;
  static constexpr int kOwnBytes = kColumnGroups * kGroupBytes;
  static constexpr int ArrivingBytes(int splits) {
    return (kColumnGroups - 1 + splits) / splits * (splits - 1) * kGroupBytes;
  }

  // The sums of a block in the workspace.
  static constexpr int kGridPartBytes = kRows * kColumns * 4;

  // Shared memory: rows of all stages, columns of all stages, and then these.
  static constexpr int kColumnsAt = kStages * kRowStageBytes;
  static constexpr int kBoxesAt = kStagesBytes;
  static_assert(kBoxesAt % 1024 == 0, "a swizzle atom of 8 rows");
  static constexpr int kPartialAt = kSharesColumns ? 0 : kBoxesAt;
  static constexpr int kVectorsAt =
      kBoxesAt + (kPartialBytes < kBoxesBytes ? kBoxesBytes : kPartialBytes);
  // Warps only halve. Columns divide in any way, but where they divide badly, more sums may arrive
  // than have space.
  static constexpr bool CanSplit(int splits) {
    if (kSharesGrid) return splits <= Config::kMaxSplits;
    return splits <= kMaxSplits && (kSharesColumns ? kOwnBytes + ArrivingBytes(splits) <= kVectorsAt
                                                   : (splits & (splits - 1)) == 0);
  }
  static_assert(CanSplit(kMaxSplits), "persistent_mm_sm90.bzl refuses such a config");
  static constexpr int kBlockScalesAt = kVectorsAt + kVectorBytes;
  static_assert(kBlockScalesAt % 16 == 0 && kChunkScales % 4 == 0,
                "four scales are loaded at once");
  static constexpr int kBarriersAt = kBlockScalesAt + kBlockScaleBytes;
  static constexpr int kTableAt = kBarriersAt + kBarrierBytes;
  static constexpr int kSharedBytes = kTableAt + kTableBytes;
  static_assert(kSharedBytes <= kMaxSharedBytesSm90,
                "persistent_mm_sm90.bzl refuses such a config");

  // Tiles of few m, whose time is that of reading b.
  static constexpr bool kFetchesAhead =
      !kGroups && kSwapAb && kSharingBlocks == 1 && kWarpGroups == 1 && kColumns <= 64;

  // The kernel's only parameter.
  struct Params : PersistentMmMaps,
                  PersistentMmScalars,
                  PersistentMmAheadParams<kFetchesAhead>,
                  PersistentMmGroupParams<kGroups>,
                  PersistentMmAddParams<kFloatOut>,
                  PersistentMmShareParams<kSharesColumns || kSharesGrid>,
                  PersistentMmGridParams<kSharesGrid>,
                  PersistentMmSmallerParams<kSmallerBoxes> {};
};

}  // namespace stoneware::gemm::sm90
