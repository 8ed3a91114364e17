// Grouped matrix product for Hopper (mixture of experts), one config per compilation: what the
// device side (grouped_mm_sm90.cu) and the host side (grouped_mm_sm90.cc) share.
//
//   d[m, n] = scale_a[m] * scale_b[g, n] * sum_k a[m, k] * b[g, k, n]
//   for the rows m of group g: offsets[g - 1] <= m < offsets[g], with offsets[-1] = 0
//
//   tensor    shape           stride                      dtype
//   a         [m, k]          [lda, 1]                    STONEWARE_OPERAND (e4m3, bf16 or fp16)
//   b         [groups, k, n]  [batch_stride_b, 1, ldb]    STONEWARE_OPERAND
//   d         [m, n]          [ldd, 1]                    STONEWARE_OUT (bf16 or fp16)
//   offsets   [groups]        [1]                         int32, never decreasing
//   scale_a   [m]             [1]                         fp32; null: 1
//   scale_b   [groups, n]     [n, 1]                      fp32; null: 1
//
// The accumulator is fp32, summed by the tensor core over all of k; scales are applied to it in
// fp32. Rows of d from the last offset on are not written. A group may be empty or end at any row.
//
// The grid is persistent, at most one block per SM, each walking over output tiles. Which tiles
// there are is known on the device alone, from the offsets: each block makes a table of them in
// shared memory, so that there is no set-up kernel, no workspace and no tensor map but two, one for
// all of a and one for all of b. A tile of a begins at any row, which TMA allows; it reads rows of
// the group after its own, which are not stored.
//
// What makes it fast: one thread keeps TMA loads in flight, across the ends of tiles and groups,
// while the other warp groups run wgmma and store straight from registers; and with
// STONEWARE_SWAP_AB the weights take wgmma's side of 64 rows and the tokens the side that may be as
// narrow as 16, so that few tokens a group cost little beside the bytes of the weights.
//
// The defines come from gemm_configs.bzl, the only place a config is written.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#if !defined(STONEWARE_KERNEL_ID) || !defined(STONEWARE_OPERAND) || !defined(STONEWARE_OUT) || \
    !defined(STONEWARE_TILE_M) || !defined(STONEWARE_TILE_N) || !defined(STONEWARE_TILE_K) ||  \
    !defined(STONEWARE_SCHEDULE) || !defined(STONEWARE_SWAP_AB)
#error "compile with the defines of one grouped_mm_config() of gemm_configs.bzl"
#endif

// The walk over the tiles also runs on the host, in its test.
#if defined(__CUDACC__)
#define STONEWARE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STONEWARE_HOST_DEVICE inline
#endif

namespace stoneware::gemm::sm90 {

// Groups that a block's table in shared memory has room for.
inline constexpr int kMaxGroups = 1024;

// The rows of one group: begin <= row < end.
struct GroupRows {
  int begin;
  int end;
};

// The rows of group `group`. Offsets that decrease or lie outside of [0, m] break the caller's
// promise; they are cut, so that no row beyond d is ever written, and no count is negative.
STONEWARE_HOST_DEVICE GroupRows RowsOfGroup(const std::int32_t* offsets, int group, int m) {
  int begin = group == 0 ? 0 : offsets[group - 1];
  int end = offsets[group];
  begin = begin < 0 ? 0 : begin;
  begin = begin > m ? m : begin;
  end = end > m ? m : end;
  end = end < begin ? begin : end;
  return {begin, end};
}

STONEWARE_HOST_DEVICE int NumTiles(int extent, int tile) { return (extent + tile - 1) / tile; }

// Which tile along m of which group, and which along n.
struct GroupTile {
  int group;
  int m_idx;  // within the group
  int n_idx;
};

// The tile at position `tile` of the order: group after group; in a group, bands of `band` tiles
// along m; in a band, n after n, and for each n the band's tiles along m, which share b.
//
// m_tile_ends[g]: tiles along m of the groups 0 to g together. 0 <= tile < (the last of them) *
// num_n_tiles.
STONEWARE_HOST_DEVICE GroupTile TileAt(int tile, const int* m_tile_ends, int num_groups,
                                       int num_n_tiles, int band) {
  // The first group whose end lies after the tile; empty groups end where they begin, so that none
  // is ever found.
  const int position = tile / num_n_tiles;
  int low = 0;
  int high = num_groups - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (m_tile_ends[middle] > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int first = low == 0 ? 0 : m_tile_ends[low - 1];
  const int num_m_tiles = m_tile_ends[low] - first;
  int rest = tile - first * num_n_tiles;
  const int band_tiles = band * num_n_tiles;
  const int band_begin = rest / band_tiles * band;
  rest -= band_begin * num_n_tiles;
  const int left = num_m_tiles - band_begin;
  const int width = left < band ? left : band;
  return {low, band_begin + rest % width, rest / width};
}

// wgmma exists on exactly this architecture.
inline constexpr char kArch[] = "sm_90a";

inline constexpr bool kSwapAb = STONEWARE_SWAP_AB;

// The config's words for what both sides need to know of them.
namespace operand_bytes {
inline constexpr int e4m3 = 1;
inline constexpr int bf16 = 2;
inline constexpr int fp16 = 2;
}  // namespace operand_bytes

namespace is_pingpong {
inline constexpr bool cooperative = false;
inline constexpr bool pingpong = true;
}  // namespace is_pingpong

inline constexpr int kOperandBytes = operand_bytes::STONEWARE_OPERAND;
inline constexpr int kOutBytes = 2;

// "Rows" are those of wgmma's first operand, 64 a step, "columns" those of its second: the caller's
// m and n, or with kSwapAb n and m.
inline constexpr int kTileRows = STONEWARE_TILE_M;
inline constexpr int kTileColumns = STONEWARE_TILE_N;
inline constexpr int kTileK = STONEWARE_TILE_K;
inline constexpr int kTileM = kSwapAb ? kTileColumns : kTileRows;
inline constexpr int kTileN = kSwapAb ? kTileRows : kTileColumns;

// With pingpong each of two warp groups multiplies a tile of its own, else both share one.
inline constexpr bool kIsPingpong = is_pingpong::STONEWARE_SCHEDULE;
inline constexpr int kNumConsumers = 2;
inline constexpr int kConsumersPerTile = kIsPingpong ? 1 : kNumConsumers;
inline constexpr int kThreadsPerGroup = 128;
inline constexpr int kNumThreads = (1 + kNumConsumers) * kThreadsPerGroup;
static_assert(kTileRows % (64 * kConsumersPerTile) == 0);

// A row of a TMA box is one row of the 128-byte swizzle.
inline constexpr int kSlabK = 128 / kOperandBytes;
inline constexpr int kNumSlabs = kTileK / kSlabK;
static_assert(kTileK % kSlabK == 0);

inline constexpr int kRowStageBytes = kTileRows * kTileK * kOperandBytes;
inline constexpr int kColumnStageBytes = kTileColumns * kTileK * kOperandBytes;
inline constexpr int kStageBytes = kRowStageBytes + kColumnStageBytes;

// Shared memory: the stages, then what is left. 227 KiB a block (CUDA C++ Programming Guide,
// compute capability 9.0).
inline constexpr int kMaxSharedBytes = 227 * 1024;
inline constexpr int kMaxStages = 16;
inline constexpr int kBarrierBytes = 2 * kMaxStages * static_cast<int>(sizeof(std::uint64_t));
inline constexpr int kTableBytes = 2 * kMaxGroups * static_cast<int>(sizeof(int));
inline constexpr int kStagesThatFit =
    (kMaxSharedBytes - kBarrierBytes - kTableBytes) / kStageBytes;
inline constexpr int kStages = kStagesThatFit < kMaxStages ? kStagesThatFit : kMaxStages;
static_assert(kStages >= 2);
inline constexpr int kSharedBytes = kStages * kStageBytes + kBarrierBytes + kTableBytes;

// The kernel's only parameter.
struct Params {
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
  int band;  // tiles along m that are taken together, for the sake of the L2
};

}  // namespace stoneware::gemm::sm90
