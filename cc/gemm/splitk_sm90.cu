// The device side of one config; splitk_sm90.cuh says what it computes.

#include "cc/gemm/splitk_sm90.cuh"

// Without, CuTe has wgmma of a few widths alone, and makes 176 of eleven times 16; with all of them
// it takes twice as long to compile.
#if STONEWARE_TILE_N > 32 && STONEWARE_TILE_N != 96 && STONEWARE_TILE_N % 64 != 0
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include "cc/gemm/transpose_sm90.cuh"
#include "cute/algorithm/gemm.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

namespace stoneware::gemm::sm90 {
namespace {

namespace element {
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
using fp32 = float;
}  // namespace element

using Operand = element::STONEWARE_A;
using Out = element::STONEWARE_OUT;

using SwizzleAtom = cute::GMMA::Layout_K_SW128_Atom<Operand>;
template <int kExtent>
using StageLayout = decltype(cute::tile_to_shape(
    SwizzleAtom{},
    cute::make_shape(cute::Int<kExtent>{}, cute::Int<kChunkElements>{},
                     cute::Int<kStages * kChunks>{})));

using Mma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Operand, Operand, float,
                               cute::Shape<cute::_64, cute::Int<kColumns>,
                                           cute::Int<kChunkElements>>>(),
    cute::Layout<cute::Shape<cute::Int<STONEWARE_WARP_GROUPS>, cute::_1, cute::_1>>{}));

// What one thread stores at a time: 8 neighbours in n, 16 bytes of a 16-bit output.
constexpr int kRun = 8;

struct alignas(16) OutRun {
  Out values[kRun];
};

[[maybe_unused]] __device__ float4 LoadFromBlock(std::uint32_t shared_address, std::uint32_t rank) {
  const std::uint32_t address = cute::set_block_rank(shared_address, rank);
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Copies 4 bytes to shared memory, or zeros if `is_inside` is false.
__device__ void CopyAsync(float* shared, const float* global, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                   cute::cast_smem_ptr_to_uint(shared)),
               "l"(global), "r"(is_inside ? 4 : 0)
               : "memory");
}

// The barrier gets one arrival of this thread once its copies so far have been written.
__device__ void ArriveWhenCopied(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cute::cast_smem_ptr_to_uint(barrier))
               : "memory");
}

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
using cutlass::arch::NamedBarrier;

// Barriers of the consumers, alone or with the warp that loads.
constexpr unsigned kAmongConsumers = 1;
constexpr unsigned kBarriersReady = 2;
// Of the two warps that load.
constexpr unsigned kBarriersReadyForScales = 3;
// Among a warp group that multiplies; of the next ones those after it.
constexpr unsigned kAmongWarpGroup = 4;

// This block's part of the work.
struct Share {
  int splits = static_cast<int>(cute::cluster_shape().x);
  int rank = static_cast<int>(cute::block_rank_in_cluster());  // which share of k
  int first_tile = static_cast<int>(blockIdx.x) / splits;
  int stride = static_cast<int>(gridDim.x) / splits;  // from one tile to the next
  int first_step;
  int num_steps;  // tiles of k

  __device__ explicit Share(const Params& params) {
    first_step = static_cast<int>(std::int64_t{params.num_k_tiles} * rank / splits);
    num_steps = static_cast<int>(std::int64_t{params.num_k_tiles} * (rank + 1) / splits) -
                first_step;
  }
};

// Where a tile begins. Bands of m, so that the operands of tiles of one time fit L2.
struct Place {
  int first_n;
  int first_m;

  __device__ Place(const Params& params, int tile) {
    const int num_n_tiles = params.num_tiles / params.num_m_tiles;
    const int first_of_band = tile / (params.band * num_n_tiles) * params.band;
    const int in_band = tile - first_of_band * num_n_tiles;
    const int band = min(params.band, params.num_m_tiles - first_of_band);
    first_n = in_band / band * kTileN;
    first_m = (first_of_band + in_band % band) * kTileM;
  }
};

struct Shared {
  Operand* rows;
  Operand* columns;
  char* boxes;
  float* partial;
  float* vectors;
  float* block_scales;  // [stage][chunk]: one for each column, then that of the rows
  Full* full;
  Empty* empty;

  __device__ explicit Shared(char* base)
      : rows(reinterpret_cast<Operand*>(base)),
        columns(reinterpret_cast<Operand*>(base + SharedLayout::kColumnsAt)),
        boxes(base + SharedLayout::kBoxesAt),
        partial(reinterpret_cast<float*>(base + SharedLayout::kPartialAt)),
        vectors(reinterpret_cast<float*>(base + SharedLayout::kVectorsAt)),
        block_scales(reinterpret_cast<float*>(base + SharedLayout::kBlockScalesAt)),
        full(reinterpret_cast<Full*>(base + SharedLayout::kBarriersAt)),
        empty(reinterpret_cast<Empty*>(full + kStages)) {}

  // Of a tile by how many the block had before it.
  __device__ float* ScalesOfB(int tile_idx) const { return vectors + tile_idx % 2 * kVectors; }
  __device__ float* Biases(int tile_idx) const { return ScalesOfB(tile_idx) + kTileN; }
  __device__ float* ScalesOfA(int tile_idx) const { return Biases(tile_idx) + kTileN; }

  __device__ float* BlockScales(int stage, int chunk) const {
    return block_scales + (stage * kChunks + chunk) * (kColumns + 4);
  }
};

// Everything that the cluster wrote before is visible after.
[[maybe_unused]] __device__ void ClusterSync() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

// Orders no memory, and so waits for no store.
__device__ void ClusterMeet() {
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}

// What a warp that does not multiply does last, so that the barriers of the cluster match.
__device__ void Finish(const Share& share) {
  if (share.splits == 1) return;
  ClusterMeet();  // partial sums are written
  ClusterMeet();  // and read
}

__device__ void LoadTiles(const Params& params, const Shared& shared, const Share& share) {
  const bool is_loader = threadIdx.x % 32 == 0;
  if (is_loader) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.b_map));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.a_map));
    if constexpr (kStoresBoxes) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.d_map));
    }
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kBlockScales ? 1 + 32 : 1);
      shared.empty[stage].init(kBlockScales ? kConsumerThreads : kConsumerThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
  NamedBarrier::arrive(kConsumerThreads + 32, kBarriersReady);
  if constexpr (kBlockScales) NamedBarrier::arrive(64, kBarriersReadyForScales);

  if (is_loader) {
    // With one tile along m, b is read once, and a by all blocks.
    using Hint = cute::TMA::CacheHintSm90;
    const bool is_once = params.num_m_tiles == 1;
    const auto a_hint =
        static_cast<std::uint64_t>(is_once ? Hint::EVICT_LAST : Hint::EVICT_NORMAL);
    const auto b_hint =
        static_cast<std::uint64_t>(is_once ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
    int loaded = 0;
    for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride) {
      const Place place(params, tile);
      for (int i = 0; i < share.num_steps; ++i, ++loaded) {
        const int stage = loaded % kStages;
        auto* const barrier = reinterpret_cast<std::uint64_t*>(&shared.full[stage]);
        shared.empty[stage].wait(1 - loaded / kStages % 2);
        shared.full[stage].arrive_and_expect_tx(kRowStageBytes + kColumnStageBytes);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int at_k = (share.first_step + i) * kTileK + chunk * kChunkElements;
          const int position = stage * kChunks + chunk;
          Operand* const rows = shared.rows + position * kRows * kChunkElements;
          Operand* const columns = shared.columns + position * kColumns * kChunkElements;
          cute::SM90_TMA_LOAD_2D::copy(&params.b_map, barrier, b_hint, kSwapAb ? rows : columns,
                                       at_k, place.first_n);
          cute::SM90_TMA_LOAD_2D::copy(&params.a_map, barrier, a_hint, kSwapAb ? columns : rows,
                                       at_k, place.first_m);
        }
      }
    }
  }
  __syncwarp();
  Finish(share);
}

// Copies the block scales of each stage.
__device__ void LoadBlockScales(const Params& params, const Shared& shared, const Share& share) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  NamedBarrier::sync(64, kBarriersReadyForScales);
  int loaded = 0;
  for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride) {
    const auto [first_n, first_m] = Place(params, tile);
    const float* const scales_b = params.scale_b + first_n / kScaleBlock * params.scale_b_stride;
    for (int i = 0; i < share.num_steps; ++i, ++loaded) {
      const int stage = loaded % kStages;
      shared.empty[stage].wait(1 - loaded / kStages % 2);
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int block = (share.first_step + i) * kChunks + chunk;
        const bool is_inside = block * kScaleBlock < params.k;
        float* const scales = shared.BlockScales(stage, chunk);
        for (int column = lane; column < kColumns; column += 32) {
          const int m = first_m + column;
          const bool has_scale = is_inside && m < params.m;
          CopyAsync(scales + column,
                    has_scale ? params.scale_a + m * params.scale_a_stride +
                                    block * params.ld_scale_a
                              : params.scale_a,
                    has_scale);
        }
        if (lane == 0) {
          CopyAsync(scales + kColumns,
                    is_inside ? scales_b + block * params.ld_scale_b : scales_b, is_inside);
        }
      }
      ArriveWhenCopied(reinterpret_cast<std::uint64_t*>(&shared.full[stage]));
    }
  }
  Finish(share);
}

// A thread's part of the vectors that a tile's epilogue needs. They are read from global memory
// before the tile is multiplied, and shared after it.
struct TileVectors {
  static constexpr int kOfN = (kTileN + kConsumerThreads - 1) / kConsumerThreads;
  static constexpr int kOfM = (kTileM + kConsumerThreads - 1) / kConsumerThreads;

  float scale_a[kOfM];
  float scale_b[kOfN];
  float bias[kOfN];

  __device__ TileVectors(const Params& params, int first_n, int first_m) {
    const int thread = static_cast<int>(threadIdx.x);
    const auto* const biases = static_cast<const Out*>(params.bias);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOfN; ++i) {
      const int n = first_n + thread + i * kConsumerThreads;
      const bool is_inside = n < params.n;
      bias[i] = is_inside && biases != nullptr ? static_cast<float>(biases[n]) : 0.0f;
      scale_b[i] = !kBlockScales && is_inside && params.scale_b != nullptr
                       ? params.scale_b[n * params.scale_b_stride]
                       : 1.0f;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOfM; ++i) {
      const int m = first_m + thread + i * kConsumerThreads;
      scale_a[i] = !kBlockScales && m < params.m && params.scale_a != nullptr
                       ? params.scale_a[m * params.scale_a_stride]
                       : 1.0f;
    }
  }

  // They may be read after the next barrier among who multiplies. Their place is that of the tile
  // before the last, of which the last one's barrier says that it has been read.
  __device__ void Store(const Shared& shared, int tile_idx) const {
    const int thread = static_cast<int>(threadIdx.x);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOfN; ++i) {
      const int at = thread + i * kConsumerThreads;
      if (at < kTileN) {
        shared.ScalesOfB(tile_idx)[at] = scale_b[i];
        shared.Biases(tile_idx)[at] = bias[i];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOfM; ++i) {
      const int at = thread + i * kConsumerThreads;
      if (at < kTileM) shared.ScalesOfA(tile_idx)[at] = scale_a[i];
    }
  }
};

// Eight neighbours in n of one row of d.
__device__ void StoreRun(const Params& params, int m, int n, const unsigned (&words)[4]) {
  if (m < params.m && n < params.n) {
    *reinterpret_cast<uint4*>(static_cast<Out*>(params.d) + m * params.ldd + n) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The boxes of a warp group: parts of its tile in shared memory, on their way to d. Each has
// kBoxRows rows of 128 bytes, whose 16-byte chunks are permuted as CU_TENSOR_MAP_SWIZZLE_128B has
// them. All threads of the warp group call together.
class Boxes {
 public:
  __device__ Boxes(const Shared& shared, int warp_group)
      : address_(cute::cast_smem_ptr_to_uint(shared.boxes) + warp_group * kBoxes * kBoxBytes),
        barrier_(kAmongWarpGroup + warp_group) {}

  // Waits until what they held has been read.
  __device__ void Begin() const {
    if (IsSender()) cute::tma_store_wait<0>();
    NamedBarrier::sync(128, barrier_);
  }

  // Writes four 8 x 8 matrices of 16 bits, whose words the threads of a warp hold as wgmma leaves
  // them. Lane l says where row l % 8 of matrix l / 8 goes; with kTransposes column l % 8.
  template <bool kTransposes>
  __device__ void Write(const unsigned (&words)[4], int box, int row, int chunk) const {
    const std::uint32_t address =
        address_ + box * kBoxBytes + row * (2 * kBoxColumns) + ((chunk ^ (row % 8)) * 16);
    if constexpr (kTransposes) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       address),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    } else {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       address),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    }
  }

  // Stores the first `count`, of neighbours along n, as far as they lie in d; waits for none.
  __device__ void Send(const Params& params, int count, int first_m, int first_n) const {
    cute::tma_store_fence();
    NamedBarrier::sync(128, barrier_);
    if (IsSender()) {
      for (int box = 0; box < count; ++box) {
        asm volatile(
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                &params.d_map),
            "r"(address_ + box * kBoxBytes), "r"(first_n + box * kBoxColumns), "r"(first_m)
            : "memory");
      }
      cute::tma_store_arrive();
    }
  }

  // No block leaves before its last boxes have been read.
  static __device__ void End() {
    if (IsSender()) cute::tma_store_wait<0>();
  }

 private:
  static __device__ bool IsSender() { return threadIdx.x % 128 == 0; }

  std::uint32_t address_;
  unsigned barrier_;
};

// Scales, rounds and stores a tile. A thread holds, of each 64 x 8 block, columns 2 * (lane % 4)
// and the next of row 16 * warp + lane / 4 and of the row 8 later (PTX ISA, "wgmma: Register
// Fragments and Shared Memory Matrix Layouts", accumulator D). Whole boxes go by way of shared
// memory; of the rest it stores 8 neighbours in n at a time.
template <class Sums>
__device__ void StoreRegisters(const Params& params, const Shared& shared, const Sums& sums,
                               int tile_idx, int first_n, int first_m) {
  const float* const scales_a = shared.ScalesOfA(tile_idx);
  const float* const scales_b = shared.ScalesOfB(tile_idx);
  const float* const biases = shared.Biases(tile_idx);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int quad_lane = lane % 4;
  const int warp = thread / 32 % 4;
  const int warp_group = thread / 128;
  const auto pair = [&](const float* vector, int at) {
    return *reinterpret_cast<const float2*>(vector + at);
  };
  const Boxes boxes(shared, warp_group);
  // Of the matrices that stmatrix writes, the one and the row whose address this lane gives.
  const int lane_matrix = lane / 8;
  const int lane_row = lane % 8;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < kRows / (64 * STONEWARE_WARP_GROUPS); ++step) {
    const int row = (step * STONEWARE_WARP_GROUPS + warp_group) * 64 + warp * 16;
    const auto sum = [&](int block, int half, int column) {
      return sums(cute::make_coord(column, half, block), step, 0);
    };
    if constexpr (kSwapAb) {
      float scale_b[2];
      float bias[2];
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        scale_b[half] = scales_b[row + lane / 4 + 8 * half];
        bias[half] = biases[row + lane / 4 + 8 * half];
      }
      if constexpr (kStoresBoxes) boxes.Begin();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kColumns / 8; block += 2) {
        unsigned words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float2 scale_a = pair(scales_a, (block + i) * 8 + 2 * quad_lane);
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < 2; ++half) {
            // Two m of one n.
            words[2 * i + half] =
                Pack<Out>(scale_a.x * sum(block + i, half, 0) * scale_b[half] + bias[half],
                          scale_a.y * sum(block + i, half, 1) * scale_b[half] + bias[half]);
          }
        }
        if constexpr (kStoresBoxes) {
          boxes.template Write<true>(words, 0, (block + lane_matrix / 2) * 8 + lane_row,
                                     warp * 2 + lane_matrix % 2);
          continue;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = TransposeInWarp(words[i]);
        // Word 2 * i + half holds row lane / 4 of block + i, n of `half`. Lane q of the quad gets
        // the eight n of half q % 2 of that row of block + q / 2.
        TransposeInQuad(words, quad_lane);
        StoreRun(params, first_m + (block + quad_lane / 2) * 8 + lane / 4,
                 first_n + row + quad_lane % 2 * 8, words);
      }
      if constexpr (kStoresBoxes) boxes.Send(params, 1, first_m, first_n + row - warp * 16);
    } else {
      const int m = row + lane / 4;
      const float scale_a[2] = {scales_a[m], scales_a[m + 8]};
      // Two n of a block of eight, in row m or the one 8 later.
      const auto word = [&](int block, int half) {
        const float2 scale_b = pair(scales_b, block * 8 + 2 * quad_lane);
        const float2 bias = pair(biases, block * 8 + 2 * quad_lane);
        return Pack<Out>(scale_a[half] * sum(block, half, 0) * scale_b.x + bias.x,
                         scale_a[half] * sum(block, half, 1) * scale_b.y + bias.y);
      };
      constexpr int kBlocks = kColumns / 8;
      constexpr int kBoxBlocks = kBoxColumns / 8;
      constexpr int kBlocksInBoxes = kStoresBoxes ? kBlocks / kBoxBlocks * kBoxBlocks : 0;
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kBlocksInBoxes; first += kBoxes * kBoxBlocks) {
        const int end = min(first + kBoxes * kBoxBlocks, kBlocksInBoxes);
        boxes.Begin();
        CUTLASS_PRAGMA_UNROLL
        for (int block = first; block < end; block += 2) {
          const unsigned words[4] = {word(block, 0), word(block, 1), word(block + 1, 0),
                                     word(block + 1, 1)};
          boxes.template Write<false>(words, (block - first) / kBoxBlocks,
                                      warp * 16 + lane_matrix % 2 * 8 + lane_row,
                                      block % kBoxBlocks + lane_matrix / 2);
        }
        boxes.Send(params, (end - first) / kBoxBlocks, first_m + row - warp * 16,
                   first_n + first * 8);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int block = kBlocksInBoxes; block + 4 <= kBlocks; block += 4) {
        unsigned words[2][4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[0][i] = word(block + i, 0);
          words[1][i] = word(block + i, 1);
        }
        // Lane q of the quad gets all eight n of block + q.
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          TransposeInQuad(words[half], quad_lane);
          StoreRun(params, first_m + m + 8 * half, first_n + (block + quad_lane) * 8, words[half]);
        }
      }
      if constexpr (kBlocks % 4 == 2) {
        constexpr int kBlock = kBlocks - 2;
        unsigned words[4] = {word(kBlock, 0), word(kBlock + 1, 0), word(kBlock, 1),
                             word(kBlock + 1, 1)};
        // Lane q of the quad gets those of kBlock + q % 2, in the row of half q / 2.
        TransposeInQuad(words, quad_lane);
        StoreRun(params, first_m + m + quad_lane / 2 * 8, first_n + (kBlock + quad_lane % 2) * 8,
                 words);
      }
    }
  }
}

// Scales, rounds and stores a tile of swapped operands by way of shared memory, where the partial
// sums of the cluster's blocks meet; each block stores some columns.
template <class Sums, class Places>
__device__ void StoreFromShared(const Params& params, const Shared& shared, const Share& share,
                                const Sums& sums, const Places& places, int tile_idx, int first_n,
                                int first_m) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint32_t partial_address = cute::cast_smem_ptr_to_uint(shared.partial);
  if constexpr (kReusesStages) {
    // Every warp has read the last stages: partial sums may take their place.
    NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(sums); ++i) {
    shared.partial[cute::get<1>(places(i)) * kPartialStride + cute::get<0>(places(i))] = sums(i);
  }
  NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
  if (share.splits > 1) ClusterSync();

  const float* const scales_a = shared.ScalesOfA(tile_idx);
  const float* const scales_b = shared.ScalesOfB(tile_idx);
  const float* const biases = shared.Biases(tile_idx);
  const int num_columns = min(kColumns, params.m - first_m);
  constexpr int kRunsPerColumn = kRows / kRun;
  for (int run = share.rank * kConsumerThreads + thread; run < num_columns * kRunsPerColumn;
       run += share.splits * kConsumerThreads) {
    const int column = run / kRunsPerColumn;
    const int row = run % kRunsPerColumn * kRun;
    const int n = first_n + row;
    if (n >= params.n) continue;

    float values[kRun] = {};
    const std::uint32_t address =
        partial_address + static_cast<std::uint32_t>((column * kPartialStride + row) * 4);
    const auto add = [&](const float4& low, const float4& high) {
      values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
      values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
    };
    if (share.splits == 1) {
      const auto* const from =
          reinterpret_cast<const float4*>(shared.partial + column * kPartialStride + row);
      add(from[0], from[1]);
    } else {
      for (int split = 0; split < share.splits; ++split) {
        add(LoadFromBlock(address, split), LoadFromBlock(address + sizeof(float4), split));
      }
    }

    const float scale_a = scales_a[column];
    OutRun result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRun; ++i) {
      result.values[i] = static_cast<Out>(
          scale_a * values[i] * scales_b[row + i] + biases[row + i]);
    }
    *reinterpret_cast<OutRun*>(static_cast<Out*>(params.d) +
                               std::int64_t{first_m + column} * params.ldd + n) = result;
  }
}

__device__ void MultiplyTiles(const Params& params, const Shared& shared, const Share& share) {
  const int thread = static_cast<int>(threadIdx.x);
  // With the loader, which has made the barriers.
  NamedBarrier::sync(kConsumerThreads + 32, kBarriersReady);

  auto row_stages = cute::make_tensor(cute::make_smem_ptr(shared.rows), StageLayout<kRows>{});
  auto column_stages =
      cute::make_tensor(cute::make_smem_ptr(shared.columns), StageLayout<kColumns>{});
  Mma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  auto row_fragments = thread_mma.make_fragment_A(thread_mma.partition_A(row_stages));
  auto column_fragments = thread_mma.make_fragment_B(thread_mma.partition_B(column_stages));
  const auto tile_shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{};
  auto places = thread_mma.partition_C(cute::make_identity_tensor(tile_shape));
  auto sums = cute::partition_fragment_C(mma, tile_shape);

  // Tells who loads that a stage has been read: block scales by each thread, tiles by wgmma.
  const auto release = [&](int step) {
    if (kBlockScales || thread % 32 == 0) shared.empty[step % kStages].arrive();
  };
  const auto multiply = [&](int chunk, int stage, auto& into) {
    const int position = stage * kChunks + chunk;
    CUTLASS_PRAGMA_UNROLL
    for (int at = 0; at < cute::size<2>(row_fragments); ++at) {
      cute::gemm(mma, row_fragments(cute::_, cute::_, at, position),
                 column_fragments(cute::_, cute::_, at, position), into);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
  };

  int step = 0;
  int tile_idx = 0;
  for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride, ++tile_idx) {
    const auto [first_n, first_m] = Place(params, tile);
    const TileVectors vectors(params, first_n, first_m);
    const bool stores_registers = kStoresRegisters && (!kSwapAb || share.splits == 1);
    const auto share_vectors = [&] {
      vectors.Store(shared, tile_idx);
      // From shared memory tiles are stored after more barriers.
      if (stores_registers) NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
    };

    if constexpr (kBlockScales) {
      cute::clear(sums);
      auto first = cute::make_fragment_like(sums);
      auto second = cute::make_fragment_like(sums);
      static_assert(kChunks <= 2);
      const auto add = [&](int chunk, int stage, auto& of_block) {
        const float* const scales = shared.BlockScales(stage, chunk);
        const float row_scale = scales[kColumns];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(sums); ++i) {
          sums(i) += of_block(i) * (scales[cute::get<1>(places(i))] * row_scale);
        }
      };
      for (int i = 0; i < share.num_steps; ++i, ++step) {
        const int stage = step % kStages;
        shared.full[stage].wait(step / kStages % 2);
        cute::warpgroup_fence_operand(first);
        cute::warpgroup_fence_operand(second);
        cute::warpgroup_arrive();
        mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
        multiply(0, stage, first);
        cute::warpgroup_commit_batch();
        if constexpr (kChunks == 2) {
          mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
          multiply(1, stage, second);
          cute::warpgroup_commit_batch();
          cute::warpgroup_wait<1>();
          cute::warpgroup_fence_operand(first);
          add(0, stage, first);
          cute::warpgroup_wait<0>();
          cute::warpgroup_fence_operand(second);
          add(1, stage, second);
        } else {
          cute::warpgroup_wait<0>();
          cute::warpgroup_fence_operand(first);
          add(0, stage, first);
        }
        release(step);
      }
      share_vectors();
    } else {
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      for (int i = 0; i < share.num_steps; ++i, ++step) {
        const int stage = step % kStages;
        shared.full[stage].wait(step / kStages % 2);
        cute::warpgroup_fence_operand(sums);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) multiply(chunk, stage, sums);
        cute::warpgroup_commit_batch();
        // The stage before this one has been read.
        cute::warpgroup_wait<1>();
        cute::warpgroup_fence_operand(sums);
        if (i > 0) release(step - 1);
      }
      share_vectors();  // while the last products are summed
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(sums);
      release(step - 1);
    }

    if constexpr (kStoresRegisters) {
      if (stores_registers) StoreRegisters(params, shared, sums, tile_idx, first_n, first_m);
    }
    if constexpr (kSwapAb) {
      if (!stores_registers) {
        StoreFromShared(params, shared, share, sums, places, tile_idx, first_n, first_m);
        if (tile + share.stride < params.num_tiles) {
          NamedBarrier::sync(kConsumerThreads, kAmongConsumers);  // partial sums have been read
        }
      }
    }
  }
  if constexpr (kStoresBoxes) Boxes::End();
  if (share.splits > 1) ClusterMeet();  // no block leaves while another reads its partial sums
}

}  // namespace
}  // namespace stoneware::gemm::sm90

using namespace stoneware::gemm::sm90;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    STONEWARE_KERNEL_ID(__grid_constant__ const Params params) {
  extern __shared__ char unaligned_shared[];
  const std::uint32_t unaligned = cute::cast_smem_ptr_to_uint(unaligned_shared);
  // The same offset in every block of a cluster, whose launches are alike.
  const Shared shared(unaligned_shared + (kAlignment - unaligned % kAlignment) % kAlignment);
  const Share share(params);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kConsumerThreads) {
    if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    MultiplyTiles(params, shared, share);
  } else {
    if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (thread < kConsumerThreads + 32) {
      LoadTiles(params, shared, share);
    } else if (kBlockScales && thread < kConsumerThreads + 64) {
      LoadBlockScales(params, shared, share);
    } else {
      Finish(share);
    }
  }
}
