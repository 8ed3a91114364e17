// Matrix product for small and middling m on Hopper: tiles that are cut to the problem, the k of
// each shared by the blocks of a cluster.
//
//   d[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias[n]
//
//   tensor    shape           stride                 dtype
//   a         [m, k]          [lda, 1]               STONEWARE_A (fp8, bf16 or fp16)
//   b         [k, n]          [1, ldb]               STONEWARE_B, of as many bytes
//   d         [m, n]          [ldd, 1]               STONEWARE_OUT (bf16 or fp16)
//   scale_a   [m] or scalar   [1] or [0]             fp32, or null for 1
//   scale_b   [n] or scalar   [1] or [0]             fp32, or null for 1
//   bias      [n] or null     [1]                    STONEWARE_OUT
//
// With STONEWARE_BLOCK_SCALES the scales stand inside the sum, a pair for each 128 of k:
//
//   d[m, n] = sum_j scale_a[m, j] * scale_b[j, n / 128] * (the sum over block j of k) + bias[n]
//
//   scale_a   [m, k / 128]    any                    fp32
//   scale_b   [k / 128, n / 128, rounded up]  any    fp32
//
// The accumulator is fp32; of fp8, summed by the tensor core over all of a block's k ("fast
// accumulation"), with block scales over 128 of k. The partial sums of a tile's blocks are added in
// an order that is fixed for each element, so the result is the same bit for bit from run to run.
//
// With STONEWARE_SWAP_AB operands are swapped: it computes d^T = b^T a^T, so that n runs along the
// 64 rows of wgmma and m along its columns, of which there may be as few as 16. A tile has
// STONEWARE_TILE_M of n and STONEWARE_TILE_N of m; a cluster holds the `splits` shares of its k. A
// block without splits goes from tile to tile until all are done, any other has one. Without, rows
// are m and columns n, and k is not split: for tiles wider along n than the 64 rows allow, and for
// widths that are no multiples of 64.
//
// What makes it fast: at small m the bytes of b are all that counts, and they arrive at full speed
// only if every SM asks for some, from the first microsecond to the last.
//
// - n = 2112 has 33 tiles of 64, a quarter of an H200's SMs; two or four blocks a tile fill them.
//   Each stores what some warps hold and sends the rest to the shared memory of the others, from
//   registers to registers, so there is no workspace, no second kernel and no atomic.
// - The loads of a block start as soon as its barriers are ready, and nothing before them divides:
//   where a tile begins was a chain of five integer divisions. Without these, and with code that
//   knows whether k is split, an H200 took 7.0 us for 7.5 (fp8, m = 16, n = k = 4096), 10.3 for
//   11.2 (m = 128, n = 6144, k = 4096) and 8.5 for 10.7 (m = 128, n = 2112, k = 7168).
// - Before TMA loads it must fetch the tensor maps, some 0.5 us. Meanwhile the threads that will
//   multiply ask L2 for the first stage of b by its address: on an H200 1 to 3 % of a call with one
//   tile along m (in fp8 with n = 6144, k = 4096 8.74 us to 8.52 at m = 16, 9.55 to 9.28 at m =
//   64). Three stages were no better, nine 6 to 26 % worse.
// - Where there are more tiles than fit the SMs a block does several, and loads the next while one
//   is written.
// - What a tile stores goes through shared memory in whole lines, by TMA, while the next one is
//   multiplied: from registers a warp writes 32 or 64 bytes of a row, at 19 bytes a cycle and SM.
//   On an H200 that was 1 to 6 % of a call: 15.1 us to 14.4 at m = 512, n = 7168, k = 2048.
// - A block's last tile is stored with nothing beside it. Without swapped operands it then has the
//   memory of the stages, so that no box waits for another, and a box's scales are loaded before it
//   is written. On an H200 that was another 1.5 to 2 % with tiles of 128 x 192 to 256 (fp8, six
//   layers, m = 128 to 512). All boxes at once were 1 to 3 % slower than one after the other; a
//   warp that sends them for those that multiply, 1 to 2 %.
// - Tensor maps promote loads in L2 to 128 bytes, not 256: at m = 16 and large n 3 to 4 %.
// - At larger m every SM has to multiply all the time: tiles of 192x176 are 132 of 2112 x 2048, one
//   for each SM of an H200, where 128x128 make two waves and a bit.
//
// Blocks do not load for each other (multicast): on an H200 that gained 1 to 3 % at a few of 102
// problems and lost up to 15 % at others, by the start of a cluster and the coupling of its blocks.
//
// The defines come from gemm_configs.bzl, the only place a config is written.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cutlass/fast_math.h"

#if !defined(STONEWARE_KERNEL_ID) || !defined(STONEWARE_OP) || !defined(STONEWARE_A) ||       \
    !defined(STONEWARE_B) || !defined(STONEWARE_OUT) || !defined(STONEWARE_TILE_M) ||         \
    !defined(STONEWARE_TILE_N) || !defined(STONEWARE_TILE_K) || !defined(STONEWARE_STAGES) || \
    !defined(STONEWARE_WARP_GROUPS) || !defined(STONEWARE_BLOCK_SCALES) ||                    \
    !defined(STONEWARE_SWAP_AB) || !defined(STONEWARE_MAX_SPLITS)
#error "compile with the defines of one splitk_config() of gemm_configs.bzl"
#endif

namespace stoneware::gemm::sm90 {

// The config's words for what the host must know of a type.
namespace dtype {
struct e4m3 {
  static constexpr unsigned kBytes = 1;
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
};
using e5m2 = e4m3;
struct bf16 {
  static constexpr unsigned kBytes = 2;
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};
struct fp16 {
  static constexpr unsigned kBytes = 2;
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};
}  // namespace dtype

inline constexpr unsigned kOperandBytes = dtype::STONEWARE_A::kBytes;
static_assert(kOperandBytes == dtype::STONEWARE_B::kBytes);
inline constexpr unsigned kOutBytes = dtype::STONEWARE_OUT::kBytes;

// Rows and columns are those of what is computed: with swapped operands d^T.
inline constexpr bool kSwapAb = STONEWARE_SWAP_AB;
inline constexpr int kRows = STONEWARE_TILE_M;
inline constexpr int kColumns = STONEWARE_TILE_N;
// The tile's share of m and of n.
inline constexpr int kTileM = kSwapAb ? kColumns : kRows;
inline constexpr int kTileN = kSwapAb ? kRows : kColumns;
inline constexpr int kTileK = STONEWARE_TILE_K;
inline constexpr int kStages = STONEWARE_STAGES;

// A swizzle atom of shared memory is 128 bytes wide: that much of k is loaded at a time.
inline constexpr int kChunkBytes = 128;
inline constexpr int kChunkElements = kChunkBytes / kOperandBytes;
inline constexpr int kChunks = kTileK / kChunkElements;
static_assert(kChunks * kChunkElements == kTileK);

inline constexpr int kRowStageBytes = kRows * kTileK * kOperandBytes;
inline constexpr int kColumnStageBytes = kColumns * kTileK * kOperandBytes;

// Elements of k, and columns of b, that share a block scale.
inline constexpr int kScaleBlock = 128;
inline constexpr bool kBlockScales = STONEWARE_BLOCK_SCALES;
static_assert(!kBlockScales || (kSwapAb && kChunkElements == kScaleBlock &&
                                kScaleBlock % kRows == 0),
              "a chunk of a tile has one scale of b");

inline constexpr int kConsumerThreads = 128 * STONEWARE_WARP_GROUPS;
// Then a warp that loads, and one for block scales. Beside several warp groups they are in one of
// their own, which leaves registers to the others.
inline constexpr bool kMovesRegisters = STONEWARE_WARP_GROUPS > 1;
inline constexpr int kThreads =
    kConsumerThreads + (kMovesRegisters ? 128 : kBlockScales ? 64 : 32);
// Registers of a thread. Together at most what the block starts with: of 65536, as many for each
// thread of whole groups of four warps, a multiple of 8.
inline constexpr int kLoaderRegisters = 56;
inline constexpr int kConsumerRegisters = STONEWARE_WARP_GROUPS == 2 ? 224 : 152;
static_assert(!kMovesRegisters || kConsumerRegisters * kConsumerThreads + kLoaderRegisters * 128 <=
                                      65536 / kThreads / 8 * 8 * kThreads);

// What a block may have (CUDA C++ Programming Guide, compute capability 9.0).
inline constexpr int kMaxSharedBytes = 227 * 1024;

inline constexpr int kStagesBytes = kStages * (kRowStageBytes + kColumnStageBytes);
// Scales and bias of a tile, and of the next one.
inline constexpr int kVectors = 2 * kTileN + kTileM;
inline constexpr int kVectorBytes = 2 * kVectors * 4;
inline constexpr int kBlockScaleBytes =
    kBlockScales ? kStages * kChunks * (kColumns + 4) * 4 : 0;
// Of the stages, and one for partial sums.
inline constexpr int kBarrierBytes = (2 * kStages + 1) * 8;

static_assert(kOutBytes == 2 && kColumns % 16 == 0, "gemm_configs.bzl refuses such a config");

// From m = 64 on a tile is stored in boxes of 64 columns of n, 128 bytes: each warp group writes
// them to shared memory, from where TMA stores them. What 64 rows have beyond whole ones is a
// narrower box.
inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxRows = kSwapAb ? kTileM : 64;
inline constexpr int kBoxBytes = kBoxRows * kBoxColumns * 2;
inline constexpr int kLastBoxColumns =
    kSwapAb || kColumns % kBoxColumns == 0 ? kBoxColumns : kColumns % kBoxColumns;
// Of a warp group and a tile.
inline constexpr int kBoxesWanted =
    kSwapAb ? 1 : kRows / (64 * STONEWARE_WARP_GROUPS) * ((kColumns - 1) / kBoxColumns + 1);
inline constexpr int kWantedBytes =
    (kBoxesWanted - 1) * kBoxBytes + kBoxRows * kLastBoxColumns * 2;
// Beside the stages there is a place for each, if there is room, or as many as fit, in turn: so the
// next tile is multiplied while they are stored. If none fits, registers are stored.
inline constexpr int kBoxSpace =
    (kMaxSharedBytes - kStagesBytes - kVectorBytes - kBlockScaleBytes - kBarrierBytes) /
    STONEWARE_WARP_GROUPS;
inline constexpr bool kHasPlaceForEach = kWantedBytes <= kBoxSpace;
inline constexpr int kBoxes = kTileM < 64        ? 0
                              : kHasPlaceForEach ? kBoxesWanted
                                                 : kBoxSpace / kBoxBytes;
inline constexpr bool kStoresBoxes = kBoxes > 0;
static_assert(kSwapAb || kStoresBoxes, "gemm_configs.bzl refuses such a config");
inline constexpr int kGroupBoxesBytes =
    kStoresBoxes && kHasPlaceForEach ? kWantedBytes : kBoxes * kBoxBytes;
inline constexpr int kBoxesBytes = STONEWARE_WARP_GROUPS * kGroupBoxesBytes;

// The blocks of a cluster share the warps of a tile: what a warp has summed goes to the block that
// stores it. Of several warp groups a whole one stores, so that boxes stay whole.
inline constexpr int kMaxSplits = STONEWARE_MAX_SPLITS;
static_assert(kMaxSplits == 1 || kMaxSplits == (STONEWARE_WARP_GROUPS == 1 ? 4 : 2));
inline constexpr bool kSplitsStoreBoxes = kStoresBoxes && kMaxSplits <= STONEWARE_WARP_GROUPS;
inline constexpr int kPartialBytes = kRows * kColumns * 4 / kMaxSplits * (kMaxSplits - 1);

struct SharedLayout {
  static constexpr int kColumnsAt = kStages * kRowStageBytes;
  static constexpr int kBoxesAt = kStagesBytes;
  static_assert(kBoxesAt % 1024 == 0, "a swizzle atom of 8 rows");
  // Partial sums arrive where the boxes are, before there are any.
  static constexpr int kVectorsAt =
      kBoxesAt + (kPartialBytes < kBoxesBytes ? kBoxesBytes : kPartialBytes);
  static constexpr int kBlockScalesAt = kVectorsAt + kVectorBytes;
  static constexpr int kBarriersAt = kBlockScalesAt + kBlockScaleBytes;
  static constexpr int kBytes = kBarriersAt + kBarrierBytes;
  static_assert(kBytes <= kMaxSharedBytes, "gemm_configs.bzl refuses such a config");
};

// Tiles whose last boxes are narrower than the others.
#define STONEWARE_NARROW_BOXES (!STONEWARE_SWAP_AB && STONEWARE_TILE_N % 64 != 0)

// Tiles of few m, for which reading b is all that counts.
#define STONEWARE_FETCHES_AHEAD \
  (STONEWARE_SWAP_AB && STONEWARE_WARP_GROUPS == 1 && STONEWARE_TILE_N <= 64)

struct Params {
  CUtensorMap a_map;  // [m, k]
  CUtensorMap b_map;  // of b^T: [n, k]
  CUtensorMap d_map;  // [m, n], of boxes
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
  int num_k_tiles;
  int num_m_tiles;
  int num_tiles;  // of d
  // Tiles go band by band, each of some tiles in m and all in n, and in it by m first.
  int last_band;
  cutlass::FastDivmod tiles_of_band;
  cutlass::FastDivmod height_of_band;  // tiles in m
  cutlass::FastDivmod height_of_last_band;
#if STONEWARE_FETCHES_AHEAD
  const void* b;
  std::int64_t ldb_bytes;
#endif
#if STONEWARE_NARROW_BOXES
  CUtensorMap narrow_d_map;
#endif
};

}  // namespace stoneware::gemm::sm90
