// What a block of persistent_mm has: its part of the work, and its shared memory.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Named barriers of the consumers, alone or with the warp that loads.
inline constexpr unsigned kAmongConsumers = 9;
inline constexpr unsigned kBarriersReady = 10;
// Of the two warps that load.
inline constexpr unsigned kBarriersReadyForScales = 11;
// Among a warp group that multiplies; of the next ones those after it.
inline constexpr unsigned kAmongWarpGroup = 12;

// This block's part of the work: some tiles of d, and of their k all or a slice. Nothing is
// divided: that is a chain of some 20 instructions, for which the first load would wait.
template <bool kSplitsK>
struct KSlice {
  int splits = static_cast<int>(kSplitsK ? BlocksOfCluster() : 1);
  int rank = static_cast<int>(kSplitsK ? BlockInCluster() : 0);  // which slice of k
  int first_tile = static_cast<int>(kSplitsK ? ClusterInGrid() : blockIdx.x);
  // From one tile to the next.
  int stride = static_cast<int>(kSplitsK ? ClustersOfGrid() : gridDim.x);
  int first_step = 0;
  int num_steps;  // tiles of k

  __device__ explicit KSlice(const PersistentMmScalars& params) : num_steps(params.num_k_tiles) {
    if constexpr (kSplitsK) {
      const int log_splits = 31 - __clz(splits);  // a power of two
      first_step = params.num_k_tiles * rank >> log_splits;
      num_steps = (params.num_k_tiles * (rank + 1) >> log_splits) - first_step;
    }
  }
};

// Where a tile begins. Bands of m, so that the operands of tiles of one time fit L2.
template <class Shape>
struct TileOffset {
  int n;
  int m;

  __device__ TileOffset(const PersistentMmScalars& params, int tile) {
    int band, in_band, n_tile, m_tile;
    params.tiles_of_band(band, in_band, tile);
    const auto& height =
        band == params.last_band ? params.height_of_last_band : params.height_of_band;
    height(n_tile, m_tile, in_band);
    n = n_tile * Shape::kTileN;
    m = (band * params.height_of_band.divisor + m_tile) * Shape::kTileM;
  }
};

// The block's shared memory. `chunk` counts those of all stages: stage * kChunks + the chunk in it.
template <class Shape>
struct SharedMemory {
  // An element of an operand, of which nothing but its place counts here.
  struct Element {
    char bytes[Shape::kOperandBytes];
  };

  // Chunk after chunk, stage after stage.
  Element* rows;
  Element* columns;
  char* boxes;
  float* partial;
  float* vectors;
  float* block_scales;
  Mbarrier* full;
  Mbarrier* empty;
  Mbarrier* summed;  // partial sums of the other blocks have arrived

  __device__ explicit SharedMemory(char* base)
      : rows(reinterpret_cast<Element*>(base)),
        columns(reinterpret_cast<Element*>(base + Shape::kColumnsAt)),
        boxes(base + Shape::kBoxesAt),
        partial(reinterpret_cast<float*>(base + Shape::kBoxesAt)),
        vectors(reinterpret_cast<float*>(base + Shape::kVectorsAt)),
        block_scales(reinterpret_cast<float*>(base + Shape::kBlockScalesAt)),
        full(reinterpret_cast<Mbarrier*>(base + Shape::kBarriersAt)),
        empty(full + Shape::kStages),
        summed(full + 2 * Shape::kStages) {}

  // Of a tile by how many the block had before it.
  __device__ float* ScalesOfB(int tile_idx) const {
    return vectors + tile_idx % 2 * Shape::kVectors;
  }
  __device__ float* Biases(int tile_idx) const { return ScalesOfB(tile_idx) + Shape::kTileN; }
  __device__ float* ScalesOfA(int tile_idx) const { return Biases(tile_idx) + Shape::kTileN; }

  // One for each column, then that of the rows.
  __device__ float* BlockScales(int chunk) const {
    return block_scales + chunk * Shape::kChunkScales;
  }
};

}  // namespace stoneware::gemm::sm90
