// The tiles of persistent_mm where the rows of a are in groups.

#pragma once

#include <cstdint>

#include "cc/gemm/grouped_tiles.h"
#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"

namespace stoneware::gemm::sm90 {

// Where a tile begins, and which group it belongs to.
template <class Shape>
struct TileOffset<Shape, true> {
  int n;
  int m;
  int group;
  int group_end;  // the row after its last
  // Whether the tile's first half has all rows that are left of the group: the second is not
  // multiplied.
  bool is_half = false;

  // A tile of 64 rows twice for each warp group can be halved.
  static constexpr bool kHasHalves = Shape::kOverlapsSums && Shape::kRowSteps == 2;

  template <class Params>
  __device__ TileOffset(const Params& params, const SharedMemory<Shape>& shared, int tile) {
    const GroupTile found =
        TileAt(tile, shared.m_tile_ends, params.num_groups, TilesAlongN(params), params.band);
    const GroupRows rows = RowsOfGroup(shared.offsets, found.group, params.m);
    group = found.group;
    group_end = rows.end;
    int n_tile = found.n_idx;
    if constexpr (Shape::kBlocksAlongN > 1) {
      n_tile = n_tile * Shape::kBlocksAlongN + static_cast<int>(BlockInCluster());
    }
    n = FirstOfTile<Shape::kTileN, Shape::kFullAlongN>(n_tile, params.n);
    m = rows.begin + found.m_idx * Shape::kTileM;
    int extent = Shape::kTileM;
    if constexpr (kHasHalves) {
      is_half = rows.end - m <= Shape::kTileM / 2;
      if (is_half) extent = Shape::kTileM / 2;
    }
    m = min(m, max(rows.end - extent, rows.begin));
  }

  // Tiles of a cluster, whose blocks lie side by side.
  template <class Params>
  static __device__ int TilesAlongN(const Params& params) {
    return NumTiles(params.n, Shape::kTileN * Shape::kBlocksAlongN);
  }

  __device__ bool HasRowsOfOthers() const { return m + Shape::kTileM > group_end; }
};

// Fills the block's table: the offsets, and for each group how many tiles along m it and the groups
// before it have. Called by the whole block, before anything reads the table.
template <class Shape>
__device__ void MakeTable(const typename Shape::Params& params, const SharedMemory<Shape>& shared) {
  for (int group = static_cast<int>(threadIdx.x); group < params.num_groups;
       group += Shape::kThreads) {
    shared.offsets[group] = params.offsets[group];
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Each lane counts a run of groups, the lanes sum up to their run, each writes its run.
    const int lane = static_cast<int>(threadIdx.x);
    const int run = (params.num_groups + 31) / 32;
    const int begin = min(lane * run, params.num_groups);
    const int end = min(begin + run, params.num_groups);
    int count = 0;
    for (int group = begin; group < end; ++group) {
      const GroupRows rows = RowsOfGroup(shared.offsets, group, params.m);
      count += NumTiles(rows.end - rows.begin, Shape::kTileM);
      shared.m_tile_ends[group] = count;
    }
    int sum = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    for (int group = begin; group < end; ++group) shared.m_tile_ends[group] += sum - count;
  }
  __syncthreads();
}

// How many tiles d has, of a cluster.
template <class Shape>
__device__ int TilesOfResult(const typename Shape::Params& params,
                             const SharedMemory<Shape>& shared) {
  if constexpr (Shape::kGroups) {
    return shared.m_tile_ends[params.num_groups - 1] * TileOffset<Shape>::TilesAlongN(params);
  } else {
    return params.num_tiles;
  }
}

}  // namespace stoneware::gemm::sm90
