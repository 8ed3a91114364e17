// The order of grouped_mm's output tiles. This code runs on the device, and on the host in its
// test.

#pragma once

#include <cstdint>

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

// The rows of group `group`. Offsets must not decrease nor lie outside of [0, m]. If they do, they
// are clamped: no row beyond d is ever written, and no count is negative.
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
  // The first group whose end lies after the tile. An empty group ends where it begins, so it is
  // never found.
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

}  // namespace stoneware::gemm::sm90
