// The order of grouped_mm's output tiles. This code runs on the device, and on the host in its
// test.

#pragma once

#include <cstdint>

#include "cc/gemm/fast_divmod.h"

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

// The group of the tile at position `tile` of the order, which goes group after group.
//
// tile_ends[g]: tiles of the groups 0 to g together. 0 <= tile < the last of them.
STONEWARE_HOST_DEVICE int GroupAt(int tile, const int* tile_ends, int num_groups) {
  // The first group whose end lies after the tile. An empty group ends where it begins, so it is
  // never found.
  int low = 0;
  int high = num_groups - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tile_ends[middle] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Where a tile lies in its group.
struct TileOfGroup {
  int m_idx;
  int n_idx;
};

// The tile at position `tile` of its group: bands of `band` tiles along m; in a band, n after n,
// and for each n the band's tiles along m, which share b.
//
// num_m_tiles: of the group, along m. tiles_of_band: divides by the tiles of a whole band.
STONEWARE_HOST_DEVICE TileOfGroup TileAt(int tile, int num_m_tiles, const FastDivmod& tiles_of_band,
                                         int band) {
  int band_idx, in_band;
  tiles_of_band(band_idx, in_band, tile);
  const int left = num_m_tiles - band_idx * band;
  const auto width = static_cast<unsigned>(left < band ? left : band);
  const auto position = static_cast<unsigned>(in_band);
  return {band_idx * band + static_cast<int>(position % width), static_cast<int>(position / width)};
}

}  // namespace stoneware::gemm::sm90
