// The device side of persistent_mm; persistent_mm_sm90.h says what it computes.
//
// The first warp groups multiply; then a warp loads tiles, and one block scales. They meet at two
// barriers for each stage in shared memory: `full` (its bytes have arrived) and `empty` (the warps
// that multiply have read it).

#pragma once

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_load_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/persistent_mm_store_sm90.cuh"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/ring_position_sm90.cuh"
#include "cc/gemm/wgmma_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Prefetches the first stage of b to L2, if no other block reads it. A row that begins inside a
// line of L2 has the first line of each chunk prefetched.
template <class Shape, bool kSplitsK>
__device__ void FetchAhead(const typename Shape::Params& params,
                           const KSlice<Shape, kSplitsK>& slice) {
  if (params.num_m_tiles > 1) return;
  for (int line = static_cast<int>(threadIdx.x); line < Shape::kTileN * Shape::kChunks;
       line += Shape::kConsumerThreads) {
    const int n = slice.first_tile * Shape::kTileN + line / Shape::kChunks;
    const int k = slice.first_step * Shape::kTileK + line % Shape::kChunks * Shape::kChunkElements;
    if (n < params.n && k < params.k) {
      PrefetchToL2(static_cast<const char*>(params.b) + n * params.ldb_bytes +
                   static_cast<unsigned>(k * Shape::kOperandBytes));
    }
  }
}

// A thread's sums, for each 64 rows of its warp group.
template <class Shape>
using Sums = float[Shape::kRowSteps][Shape::kSums];

// Matrix descriptors of the rows of this thread's warp group and of the columns.
template <class Shape>
struct Operands {
  std::uint64_t rows;
  std::uint64_t columns;

  __device__ explicit Operands(const SharedMemory<Shape>& shared)
      : rows(OperandDescriptor(shared.rows + WarpGroup() * (64 * Shape::kChunkElements))),
        columns(OperandDescriptor(shared.columns)) {}

 private:
  static __device__ int WarpGroup() {
    return static_cast<int>(threadIdx.x) / 128 % Shape::kWarpGroups;
  }
};

// Multiplies a chunk of the stages. Adds the products to the sums if `is_added` is 1, otherwise
// overwrites them; sets `is_added` to 1.
template <class Shape>
__device__ void MultiplyChunk(const Operands<Shape>& operands, int chunk, int& is_added,
                              Sums<Shape>& sums) {
  using Instruction = Wgmma<Shape::kRowOperand, Shape::kColumnOperand, Shape::kColumns>;
  // In the units of a matrix descriptor: from one wgmma to the next along k, and from row to row.
  constexpr int kWgmmaOffset = kWgmmaBytes / kDescriptorBytes;
  constexpr int kRowOffset = Shape::kChunkBytes / kDescriptorBytes;
#pragma unroll
  for (int at = 0; at < Shape::kChunkBytes / kWgmmaBytes; ++at) {
    const std::uint64_t rows =
        Advance(operands.rows, at * kWgmmaOffset + chunk * (Shape::kRows * kRowOffset));
    const std::uint64_t columns =
        Advance(operands.columns, at * kWgmmaOffset + chunk * (Shape::kColumns * kRowOffset));
#pragma unroll
    for (int step = 0; step < Shape::kRowSteps; ++step) {
      Instruction::Multiply(sums[step],
                            Advance(rows, step * (Shape::kWarpGroups * 64 * kRowOffset)),
                            Advance(columns, 0), is_added);
    }
    is_added = 1;
  }
}

// Tells the loaders that a stage has been read: block scales by each thread, tiles by wgmma.
template <class Shape>
__device__ void Release(const SharedMemory<Shape>& shared, int stage) {
  if (Shape::kBlockScales || threadIdx.x % 32 == 0) shared.empty[stage].Arrive();
}

// Sums a tile over k. On return the last products are still being summed; returns their stage,
// which the caller must release.
template <class Shape>
__device__ int SumTile(const SharedMemory<Shape>& shared, const Operands<Shape>& operands,
                       RingPosition<Shape::kStages>& ring, int num_steps, Sums<Shape>& sums) {
  int is_added = 0;
  int last_stage = 0;
  for (int i = 0; i < num_steps; ++i, ring.Advance()) {
    const int stage = ring.stage;
    shared.full[stage].Wait(ring.parity);
    FenceSums(sums);
    FenceWgmma();
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      MultiplyChunk<Shape>(operands, stage * Shape::kChunks + chunk, is_added, sums);
    }
    CommitWgmma();
    // The stage before this one has been read.
    WaitForWgmma<1>();
    FenceSums(sums);
    if (i > 0) Release(shared, last_stage);
    last_stage = stage;
  }
  return last_stage;
}

// Scales the sums of a chunk and adds them.
template <class Shape>
__device__ void AddScaled(const SharedMemory<Shape>& shared, int chunk, const Sums<Shape>& of_chunk,
                          Sums<Shape>& sums) {
  const float* const scales = shared.BlockScales(chunk);
  const float row_scale = scales[Shape::kColumns];
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int step = 0; step < Shape::kRowSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) {
      sums[step][i] += of_chunk[step][i] * (scales[i / 4 * 8 + column + i % 2] * row_scale);
    }
  }
}

// The products of each chunk of a stage.
template <class Shape>
using Products = Sums<Shape>[Shape::kChunks];

// Adds chunk after chunk, each as soon as it is there, from kChunk on.
template <class Shape, int kChunk = 0>
__device__ void AddProducts(const SharedMemory<Shape>& shared, int stage, Products<Shape>& products,
                            Sums<Shape>& sums) {
  WaitForWgmma<Shape::kChunks - 1 - kChunk>();
  FenceSums(products[kChunk]);
  AddScaled<Shape>(shared, stage * Shape::kChunks + kChunk, products[kChunk], sums);
  if constexpr (kChunk + 1 < Shape::kChunks) {
    AddProducts<Shape, kChunk + 1>(shared, stage, products, sums);
  }
}

// Sums a tile over k with block scales, all of it.
template <class Shape>
__device__ void SumScaledTile(const SharedMemory<Shape>& shared, const Operands<Shape>& operands,
                              RingPosition<Shape::kStages>& ring, int num_steps,
                              Sums<Shape>& sums) {
#pragma unroll
  for (int step = 0; step < Shape::kRowSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[step][i] = 0.0f;
  }
  Products<Shape> products = {};
  for (int i = 0; i < num_steps; ++i, ring.Advance()) {
    const int stage = ring.stage;
    shared.full[stage].Wait(ring.parity);
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) FenceSums(products[chunk]);
    FenceWgmma();
#pragma unroll
    for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
      int is_added = 0;
      MultiplyChunk<Shape>(operands, stage * Shape::kChunks + chunk, is_added, products[chunk]);
      CommitWgmma();
    }
    AddProducts<Shape>(shared, stage, products, sums);
    Release(shared, stage);
  }
}

// Runs on the warp groups that multiply.
template <class Shape, bool kSplitsK>
__device__ void MultiplyTiles(const typename Shape::Params& params,
                              const SharedMemory<Shape>& shared,
                              const KSlice<Shape, kSplitsK>& slice) {
  if constexpr (Shape::kFetchesAhead) FetchAhead<Shape>(params, slice);
  // Together with the loader, which has initialised the barriers.
  SyncAtNamedBarrier(Shape::kConsumerThreads + 32, kBarriersReady);

  const Operands<Shape> operands(shared);
  Sums<Shape> sums = {};
  RingPosition<Shape::kStages> ring;
  int tile_idx = 0;
  for (int tile = slice.first_tile; tile < params.num_tiles; tile += slice.stride, ++tile_idx) {
    const TileOffset<Shape> offset(params, tile);
    const TileVectors<Shape> vectors(params, offset.n, offset.m);
    if constexpr (Shape::kBlockScales) {
      SumScaledTile<Shape>(shared, operands, ring, slice.num_steps, sums);
      vectors.Share(shared, tile_idx);
    } else {
      const int last_stage = SumTile<Shape>(shared, operands, ring, slice.num_steps, sums);
      vectors.Share(shared, tile_idx);  // while the last products are summed
      WaitForWgmma<0>();
      FenceSums(sums);
      Release(shared, last_stage);
    }

    const bool is_last_tile = tile + slice.stride >= params.num_tiles;
    if constexpr (kSplitsK && Shape::kSharesColumns) {
      const PartialColumns<Shape> partial(shared, slice);
      partial.Exchange(shared, sums);
      TileStore<Shape, false>(params, shared, offset, tile_idx, is_last_tile)
          .RunShare(partial, slice);
      partial.End();
    } else if constexpr (!kSplitsK) {
      TileStore<Shape, Shape::kStoresBoxes>(params, shared, offset, tile_idx, is_last_tile)
          .Run(sums);
    } else if (AddPartialSums(shared, slice, sums)) {
      TileStore<Shape, Shape::kSplitsStoreBoxes>(params, shared, offset, tile_idx, is_last_tile)
          .Run(sums);
    }
  }
  if constexpr (Shape::kStoresBoxes) Boxes<Shape>::End();
}

template <class Config>
struct PersistentMmKernel {
  using Shape = PersistentMmShape<Config>;
  using Params = typename Shape::Params;

  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kSharedBytes = Shape::kSharedBytes;
  // Swizzle atoms begin at multiples of it.
  static constexpr int kSharedAlignment = 1024;

  static __device__ void Run(const Params& params, char* shared_bytes) {
    const SharedMemory<Shape> shared(shared_bytes);
    if (Shape::kMaxSplits > 1 && BlocksOfCluster() > 1) {
      RunBlock<(Shape::kMaxSplits > 1)>(params, shared);
    } else {
      RunBlock<false>(params, shared);
    }
  }

 private:
  template <bool kSplitsK>
  static __device__ void RunBlock(const Params& params, const SharedMemory<Shape>& shared) {
    const KSlice<Shape, kSplitsK> slice(params);
    const int thread = static_cast<int>(threadIdx.x);
    // Every warp arrives at the cluster's barrier before its loads and products, and so waits for
    // nothing there. The loader arrives when its barriers are initialised; with kSharesColumns the
    // warps that multiply arrive when they have read the stages.
    const bool is_loader = thread / 32 == Shape::kConsumerThreads / 32;
    const bool arrives_late = Shape::kSharesColumns && thread < Shape::kConsumerThreads;
    if (kSplitsK && !is_loader && !arrives_late) ArriveAtCluster();
    if (thread < Shape::kConsumerThreads) {
      if constexpr (Shape::kMovesRegisters) TakeRegisters<Shape::kConsumerRegisters>();
      MultiplyTiles<Shape>(params, shared, slice);
    } else {
      if constexpr (Shape::kMovesRegisters) GiveRegisters<Shape::kLoaderRegisters>();
      if (thread < Shape::kConsumerThreads + 32) {
        LoadTiles<Shape>(params, shared, slice);
      } else if (thread < Shape::kConsumerThreads + 64) {
        if constexpr (Shape::kBlockScales) LoadBlockScales<Shape>(params, shared, slice);
      }
      // A thread that has arrived at the cluster's barrier must not exit before the barrier is
      // complete: it would be counted as arriving once more.
      if constexpr (kSplitsK) WaitForClusterToArriveApart();
    }
  }
};

}  // namespace stoneware::gemm::sm90
