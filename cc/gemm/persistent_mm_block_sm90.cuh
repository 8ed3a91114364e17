// A block of persistent_mm: its part of the work, and its shared memory.

#pragma once

#include <cstdint>

#include "cc/gemm/grouped_tiles.h"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Named barrier of the first warp group's turn, with kPingpong; the second has the next.
inline constexpr unsigned kTurnOfWarpGroup = 7;
// Named barriers: of the warp groups that multiply, and of these with the warp that loads.
inline constexpr unsigned kAmongConsumers = 9;
inline constexpr unsigned kBarriersReady = 10;
// Between the warps that load.
inline constexpr unsigned kBarriersReadyForScales = 11;
// Within the first warp group that multiplies; each further group has the next barrier.
inline constexpr unsigned kAmongWarpGroup = 12;

// This block's part of the work: some tiles of d, and all or a slice of their k. kSplitsK: the
// blocks of a cluster have slices; with kSharesGrid clusters may. No integer is divided: the
// first load would wait for a chain of some 20 instructions.
template <class Shape, bool kSplitsK>
struct KSlice {
  // Blocks of a cluster that share a slice of k lie side by side.
  static constexpr unsigned kSharing = Shape::kSharingBlocks;
  int splits = static_cast<int>(kSplitsK ? BlocksOfCluster() / kSharing : 1);
  int rank = static_cast<int>(kSplitsK ? BlockInCluster() / kSharing : 0);  // which slice of k
  int first_tile =
      static_cast<int>(kSplitsK || Shape::kSharingBlocks > 1 ? ClusterInGrid() : blockIdx.x);
  // From one tile to the next.
  int stride =
      static_cast<int>(kSplitsK || Shape::kSharingBlocks > 1 ? ClustersOfGrid() : gridDim.x);
  int first_step = 0;
  int num_steps;  // tiles of k

  __device__ explicit KSlice(const typename Shape::Params& params)
      : num_steps(params.num_k_tiles), params_(params) {
    if constexpr (kSplitsK) {
      first_step = Share(params.num_k_tiles * rank);
      num_steps = Share(params.num_k_tiles * (rank + 1)) - first_step;
    }
    if constexpr (Shape::kSharesGrid) {
      params.splits(first_tile, rank, first_tile);
      splits = params.splits.divisor;
      first_step = Share(params.num_k_tiles * rank);
      num_steps = Share(params.num_k_tiles * (rank + 1)) - first_step;
    }
  }

  // The block of the cluster that has slice `other` of this block's tile.
  __device__ int BlockOf(int other) const {
    return kSharing == 1
               ? other
               : other * static_cast<int>(kSharing) + static_cast<int>(BlockInCluster() % kSharing);
  }

  // A number divided by the splits, rounded down.
  __device__ int Share(int number) const {
    if constexpr (Shape::kSharesColumns || Shape::kSharesGrid) {
      int share, left;
      params_.splits(share, left, number);
      return share;
    } else {
      return number >> (31 - __clz(splits));
    }
  }

 private:
  const typename Shape::Params& params_;
};

// Where this block's tile lies among those of its cluster. Blocks run along m first, then along n,
// then along k.
template <class Shape>
struct PlaceInCluster {
  int along_m = 0;
  int along_n = 0;
  int first = 0;  // block of this slice of k

  __device__ PlaceInCluster() {
    if constexpr (Shape::kSharingBlocks > 1) {
      int block = static_cast<int>(BlockInCluster());
      if constexpr (Shape::kMaxSplits > 1) {
        first = block / Shape::kSharingBlocks * Shape::kSharingBlocks;
        block -= first;
      }
      along_m = block % Shape::kBlocksAlongM;
      along_n = block / Shape::kBlocksAlongM;
    }
  }

  // Block `i` of those that load to this one: first those along n.
  static __device__ int Loader(int i) {
    if constexpr (Shape::kBlocksAlongM == 1 && Shape::kMaxSplits == 1) {
      return i;
    } else {
      const PlaceInCluster here;
      if (i < Shape::kBlocksAlongN) return here.first + here.along_m + i * Shape::kBlocksAlongM;
      const int other = i - Shape::kBlocksAlongN;
      return here.first + (other < here.along_m ? other : other + 1) +
             here.along_n * Shape::kBlocksAlongM;
    }
  }

  // The blocks that share rows of a, and those that share rows of b^T, as masks.
  __device__ unsigned short SharingA() const {
    unsigned mask = 0;
    for (int i = 0; i < Shape::kBlocksAlongN; ++i) mask |= 1U << (i * Shape::kBlocksAlongM);
    return static_cast<unsigned short>(mask << (first + along_m));
  }
  __device__ unsigned short SharingB() const {
    return static_cast<unsigned short>(((1U << Shape::kBlocksAlongM) - 1)
                                       << (first + along_n * Shape::kBlocksAlongM));
  }
};

// The groups of columns of a tile that block `rank` of a cluster stores.
template <class Shape>
struct ColumnShare {
  int begin;
  int end;

  __device__ ColumnShare(const KSlice<Shape, true>& slice, int rank)
      : begin(slice.Share(Shape::kColumnGroups * rank)),
        end(slice.Share(Shape::kColumnGroups * (rank + 1))) {}
};

// The block's shared memory. Chunks are numbered across stages: stage * kChunks + chunk in the
// stage.
template <class Shape>
struct SharedMemory {
  // An element of an operand; only its address matters here.
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
  int* offsets;      // of groups
  int* tile_ends;    // of each group: tiles of all groups up to it

  __device__ explicit SharedMemory(char* base)
      : rows(reinterpret_cast<Element*>(base)),
        columns(reinterpret_cast<Element*>(base + Shape::kColumnsAt)),
        boxes(base + Shape::kBoxesAt),
        partial(reinterpret_cast<float*>(base + Shape::kPartialAt)),
        vectors(reinterpret_cast<float*>(base + Shape::kVectorsAt)),
        block_scales(reinterpret_cast<float*>(base + Shape::kBlockScalesAt)),
        full(reinterpret_cast<Mbarrier*>(base + Shape::kBarriersAt)),
        empty(full + Shape::kStages),
        summed(full + 2 * Shape::kStages),
        offsets(reinterpret_cast<int*>(base + Shape::kTableAt)),
        tile_ends(offsets + kMaxGroups) {}

  // What TileOffset shares of the tile whose first stage is `stage`: two int2.
  __device__ int2* TileOfStage(int stage) const {
    return reinterpret_cast<int2*>(tile_ends + kMaxGroups) + 2 * stage;
  }

  // `tile_idx`: how many tiles the block had before this one.
  __device__ float* ScalesOfB(int tile_idx) const {
    float* const of_tile = vectors + tile_idx % 2 * Shape::kVectors;
    if constexpr (Shape::kVectorCopies == 1) {
      return of_tile;
    } else {
      return of_tile + threadIdx.x / Shape::kVectorThreads * (2 * Shape::kVectors);
    }
  }
  __device__ float* Biases(int tile_idx) const {
    return ScalesOfB(tile_idx) + (Shape::kHasVectorScales ? Shape::kTileN : 0);
  }
  __device__ float* ScalesOfA(int tile_idx) const { return Biases(tile_idx) + Shape::kTileN; }

  // See Shape::kChunkScales.
  __device__ float* BlockScales(int chunk) const {
    return block_scales + chunk * Shape::kChunkScales;
  }
};

// Where tile `idx` begins along m or n, of which there are `extent`.
template <int kTile, bool kIsFull>
__device__ int FirstOfTile(int idx, int extent) {
  return kIsFull ? min(idx * kTile, max(extent - kTile, 0)) : idx * kTile;
}

// Where a tile begins. Tiles go in bands of m, so that the operands of those that run at one time
// fit L2.
template <class Shape, bool kGroups = Shape::kGroups>
struct TileOffset {
  int n;
  int m;

  __device__ TileOffset(const PersistentMmScalars& params, const SharedMemory<Shape>&, int tile) {
    int band, in_band, n_tile, m_tile;
    params.tiles_of_band(band, in_band, tile);
    const auto& height =
        band == params.last_band ? params.height_of_last_band : params.height_of_band;
    height(n_tile, m_tile, in_band);
    const PlaceInCluster<Shape> place;
    n_tile = n_tile * Shape::kBlocksAlongN + place.along_n;
    n = FirstOfTile<Shape::kTileN, Shape::kFullAlongN>(n_tile, params.n);
    m_tile = (band * params.height_of_band.divisor + m_tile) * Shape::kBlocksAlongM + place.along_m;
    m = FirstOfTile<Shape::kTileM, Shape::kFullAlongM>(m_tile, params.m);
  }
};

}  // namespace stoneware::gemm::sm90
