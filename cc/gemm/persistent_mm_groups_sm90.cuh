// The tiles of persistent_mm where the rows of a are in groups.

#pragma once

#include <cstdint>
#include <type_traits>

#include "cc/gemm/grouped_tiles.h"
#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Where a tile begins, and which group it belongs to.
template <class Shape>
struct TileOffset<Shape, true> {
  int n;
  int m;
  int group;
  int group_end;  // the row after its last
  // Whether the tile's first half has all rows that are left of the group: the second is not
  // loaded, and not multiplied.
  bool is_half = false;

  TileOffset() = default;

  template <class Params>
  __device__ TileOffset(const Params& params, const SharedMemory<Shape>& shared, int tile) {
    group = GroupAt(tile, shared.tile_ends, params.num_groups);
    const GroupRows rows = RowsOfGroup(shared.offsets, group, params.m);
    group_end = rows.end;
    const TileOfGroup found = TileAt(group == 0 ? tile : tile - shared.tile_ends[group - 1],
                                     NumTiles(rows.end - rows.begin, Shape::kTileM),
                                     params.tiles_of_band, params.height_of_band.divisor);
    int n_tile = found.n_idx;
    if constexpr (Shape::kBlocksAlongN > 1) {
      n_tile = n_tile * Shape::kBlocksAlongN + static_cast<int>(BlockInCluster());
    }
    n = FirstOfTile<Shape::kTileN, Shape::kFullAlongN>(n_tile, params.n);
    m = rows.begin + found.m_idx * Shape::kTileM;
    if constexpr (Shape::kHasHalves) is_half = rows.end - m <= Shape::kTileM / 2;
    m = min(m, max(rows.end - Extent(), rows.begin));
  }

  // Before the stage is full.
  __device__ void Share(const SharedMemory<Shape>& shared, int stage) const {
    shared.TileOfStage(stage)[0] = make_int2(m, n);
    shared.TileOfStage(stage)[1] = make_int2(group_end, group * 2 + (is_half ? 1 : 0));
    FenceCompiler();
  }

  __device__ bool HasRowsOfOthers() const { return m + Extent() > group_end; }

 private:
  // The number of its rows.
  __device__ int Extent() const { return is_half ? Shape::kTileM / 2 : Shape::kTileM; }
};

// What Share stored for the tile that begins at a stage, which is full. To find it again would take
// as long as a step of k.
template <class Shape>
struct HandedOverTile : TileOffset<Shape> {
  template <class Params>
  __device__ HandedOverTile(const Params&, const SharedMemory<Shape>& shared, int stage) {
    FenceCompiler();
    const int2 begin = shared.TileOfStage(stage)[0];
    const int2 rest = shared.TileOfStage(stage)[1];
    __syncwarp();  // a lane may release the stage
    this->m = begin.x;
    this->n = begin.y;
    this->group_end = rest.x;
    this->group = rest.y / 2;
    if constexpr (Shape::kHasHalves) this->is_half = rest.y % 2 != 0;
  }
};

// Where a tile begins that is multiplied. The same type without groups: another would make the
// LTO-IR of each open kernel larger.
template <class Shape>
using TileToMultiply =
    std::conditional_t<Shape::kHandsOverTiles, HandedOverTile<Shape>, TileOffset<Shape>>;

// Fills the block's table: the offsets, and for each group how many tiles it and the groups before
// it have. Called by the whole block, before anything reads the table.
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
    // Tiles along n, counted per cluster.
    const int num_n_tiles = NumTiles(params.n, Shape::kTileN * Shape::kBlocksAlongN);
    // Offsets that decrease may count rows many times.
    const auto tiles_of = [&](int group) -> std::int64_t {
      const GroupRows rows = RowsOfGroup(shared.offsets, group, params.m);
      return std::int64_t{NumTiles(rows.end - rows.begin, Shape::kTileM)} * num_n_tiles;
    };
    std::int64_t count = 0;
    for (int group = begin; group < end; ++group) count += tiles_of(group);
    std::int64_t sum = count;
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    sum -= count;
    for (int group = begin; group < end; ++group) {
      sum += tiles_of(group);
      shared.tile_ends[group] = static_cast<int>(min(sum, std::int64_t{params.num_tiles}));
    }
  }
  __syncthreads();
}

// How many tiles d has, of a cluster.
template <class Shape>
__device__ int TilesOfResult(const typename Shape::Params& params,
                             const SharedMemory<Shape>& shared) {
  if constexpr (Shape::kGroups) {
    return shared.tile_ends[params.num_groups - 1];
  } else {
    return params.num_tiles;
  }
}

}  // namespace stoneware::gemm::sm90
