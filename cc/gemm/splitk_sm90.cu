// The device side of one config; splitk_sm90.cuh says what it computes.

#include "cc/gemm/splitk_sm90.cuh"

// Without, CuTe has wgmma of a few widths alone, and makes 176 of eleven times 16; with all of them
// it takes twice as long to compile.
#if STONEWARE_TILE_N > 32 && STONEWARE_TILE_N != 96 && STONEWARE_TILE_N % 64 != 0
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include "cc/gemm/ring_position_sm90.cuh"
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
}  // namespace element

using RowOperand = cute::conditional_t<kSwapAb, element::STONEWARE_B, element::STONEWARE_A>;
using ColumnOperand = cute::conditional_t<kSwapAb, element::STONEWARE_A, element::STONEWARE_B>;
using Out = element::STONEWARE_OUT;

template <class Operand, int kExtent>
using StageLayout = decltype(cute::tile_to_shape(
    cute::GMMA::Layout_K_SW128_Atom<Operand>{},
    cute::make_shape(cute::Int<kExtent>{}, cute::Int<kChunkElements>{},
                     cute::Int<kStages * kChunks>{})));

using Mma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<RowOperand, ColumnOperand, float,
                               cute::Shape<cute::_64, cute::Int<kColumns>,
                                           cute::Int<kChunkElements>>>(),
    cute::Layout<cute::Shape<cute::Int<STONEWARE_WARP_GROUPS>, cute::_1, cute::_1>>{}));

// Writes 16 bytes to the shared memory of a block of the cluster, and tells its barrier.
[[maybe_unused]] __device__ void StoreToBlock(std::uint32_t address, std::uint32_t barrier,
                                              float x, float y, float z, float w) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
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

// Waits for the barrier's first phase, and sees what other blocks of the cluster wrote before.
[[maybe_unused]] __device__ void WaitForCluster(Full* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred is_done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_done, [%0], 0;\n"
      "@is_done bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(cute::cast_smem_ptr_to_uint(barrier))
      : "memory");
}

// Who has arrived at the cluster's barrier must not leave before it is complete, or is counted as
// one more that arrives. Unlike cute::cluster_wait, for threads of a warp that are apart.
[[maybe_unused]] __device__ void WaitForClusterToArrive() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

using cutlass::arch::NamedBarrier;

// Barriers of the consumers, alone or with the warp that loads.
constexpr unsigned kAmongConsumers = 1;
constexpr unsigned kBarriersReady = 2;
// Of the two warps that load.
constexpr unsigned kBarriersReadyForScales = 3;
// Among a warp group that multiplies; of the next ones those after it.
constexpr unsigned kAmongWarpGroup = 4;

// This block's part of the work. Nothing is divided: that is a chain of some 20 instructions, for
// which the first load would wait.
template <bool kSplitsK>
struct Share {
  int splits = kSplitsK ? static_cast<int>(cute::cluster_shape().x) : 1;
  int rank = kSplitsK ? static_cast<int>(cute::block_rank_in_cluster()) : 0;  // which share of k
  int first_tile = static_cast<int>(kSplitsK ? cute::cluster_id_in_grid().x : blockIdx.x);
  // From one tile to the next.
  int stride = static_cast<int>(kSplitsK ? cute::cluster_grid_dims().x : gridDim.x);
  int first_step = 0;
  int num_steps;  // tiles of k

  __device__ explicit Share(const Params& params) : num_steps(params.num_k_tiles) {
    if constexpr (kSplitsK) {
      const int log_splits = 31 - __clz(splits);  // a power of two
      first_step = params.num_k_tiles * rank >> log_splits;
      num_steps = (params.num_k_tiles * (rank + 1) >> log_splits) - first_step;
    }
  }
};

// Where a tile begins. Bands of m, so that the operands of tiles of one time fit L2.
struct Place {
  int first_n;
  int first_m;

  __device__ Place(const Params& params, int tile) {
    int band, in_band, n_tile, m_tile;
    params.tiles_of_band(band, in_band, tile);
    const auto& height =
        band == params.last_band ? params.height_of_last_band : params.height_of_band;
    height(n_tile, m_tile, in_band);
    first_n = n_tile * kTileN;
    first_m = (band * params.height_of_band.divisor + m_tile) * kTileM;
  }
};

struct Shared {
  RowOperand* rows;
  ColumnOperand* columns;
  char* boxes;
  float* partial;
  float* vectors;
  float* block_scales;  // [stage][chunk]: one for each column, then that of the rows
  Full* full;
  Empty* empty;
  Full* summed;  // partial sums of the other blocks have arrived

  __device__ explicit Shared(char* base)
      : rows(reinterpret_cast<RowOperand*>(base)),
        columns(reinterpret_cast<ColumnOperand*>(base + SharedLayout::kColumnsAt)),
        boxes(base + SharedLayout::kBoxesAt),
        partial(reinterpret_cast<float*>(base + SharedLayout::kBoxesAt)),
        vectors(reinterpret_cast<float*>(base + SharedLayout::kVectorsAt)),
        block_scales(reinterpret_cast<float*>(base + SharedLayout::kBlockScalesAt)),
        full(reinterpret_cast<Full*>(base + SharedLayout::kBarriersAt)),
        empty(reinterpret_cast<Empty*>(full + kStages)),
        summed(full + 2 * kStages) {}

  // Of a tile by how many the block had before it.
  __device__ float* ScalesOfB(int tile_idx) const { return vectors + tile_idx % 2 * kVectors; }
  __device__ float* Biases(int tile_idx) const { return ScalesOfB(tile_idx) + kTileN; }
  __device__ float* ScalesOfA(int tile_idx) const { return Biases(tile_idx) + kTileN; }

  __device__ float* BlockScales(int stage, int chunk) const {
    return block_scales + (stage * kChunks + chunk) * (kColumns + 4);
  }
};

template <bool kSplitsK>
__device__ void LoadTiles(const Params& params, const Shared& shared,
                          const Share<kSplitsK>& share) {
  const bool is_loader = threadIdx.x % 32 == 0;
  if (is_loader) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.b_map));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.a_map));
    if constexpr (kStoresBoxes && (!kSplitsK || kSplitsStoreBoxes)) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.d_map));
    }
#if STONEWARE_NARROW_BOXES
    cute::prefetch_tma_descriptor(
        reinterpret_cast<const cute::TmaDescriptor*>(&params.narrow_d_map));
#endif
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kBlockScales ? 1 + 32 : 1);
      shared.empty[stage].init(kBlockScales ? kConsumerThreads : kConsumerThreads / 32);
    }
    if constexpr (kSplitsK) {
      shared.summed->init(1);
      shared.summed->arrive_and_expect_tx(kRows * kColumns * 4 / share.splits *
                                          (share.splits - 1));
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
  if constexpr (kSplitsK) cute::cluster_arrive_relaxed();
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
    RingPosition<kStages> ring;
    for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride) {
      const Place place(params, tile);
      for (int i = 0; i < share.num_steps; ++i, ring.Advance()) {
        const int stage = ring.stage;
        auto* const barrier = reinterpret_cast<std::uint64_t*>(&shared.full[stage]);
        // In the first round it is empty: the parity before the first counts as passed.
        shared.empty[stage].wait(ring.parity ^ 1);
        shared.full[stage].arrive_and_expect_tx(kRowStageBytes + kColumnStageBytes);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int at_k = (share.first_step + i) * kTileK + chunk * kChunkElements;
          const int position = stage * kChunks + chunk;
          void* const rows = shared.rows + position * kRows * kChunkElements;
          void* const columns = shared.columns + position * kColumns * kChunkElements;
          cute::SM90_TMA_LOAD_2D::copy(&params.b_map, barrier, b_hint, kSwapAb ? rows : columns,
                                       at_k, place.first_n);
          cute::SM90_TMA_LOAD_2D::copy(&params.a_map, barrier, a_hint, kSwapAb ? columns : rows,
                                       at_k, place.first_m);
        }
      }
    }
  }
}

// Copies the block scales of each stage.
template <bool kSplitsK>
__device__ void LoadBlockScales(const Params& params, const Shared& shared,
                                const Share<kSplitsK>& share) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  NamedBarrier::sync(64, kBarriersReadyForScales);
  RingPosition<kStages> ring;
  for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride) {
    const auto [first_n, first_m] = Place(params, tile);
    const float* const scales_b = params.scale_b + first_n / kScaleBlock * params.scale_b_stride;
    for (int i = 0; i < share.num_steps; ++i, ring.Advance()) {
      const int stage = ring.stage;
      shared.empty[stage].wait(ring.parity ^ 1);
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

// The boxes of a warp group: parts of its tile in shared memory, on their way to d, one after the
// other. All its threads call together.
class Boxes {
 public:
  // With `uses_stages`, for a block's last tile, when nothing is left to be loaded or multiplied:
  // each box has a place where this warp group alone has read its rows of a stage.
  __device__ Boxes(const Shared& shared, int warp_group, int tile_idx, bool uses_stages)
      : uses_stages_(uses_stages), barrier_(kAmongWarpGroup + warp_group) {
    static_assert(kSwapAb ||
                      (kBoxBytes == 64 * kChunkBytes && kBoxesWanted <= kStages * kChunks),
                  "gemm_configs.bzl refuses such a config");
    if (uses_stages) {
      // All have read them.
      NamedBarrier::sync(128, barrier_);
      address_ = cute::cast_smem_ptr_to_uint(shared.rows) + warp_group * kBoxBytes;
      place_bytes_ = kRows * kChunkBytes;
    } else {
      address_ = cute::cast_smem_ptr_to_uint(shared.boxes) + warp_group * kGroupBoxesBytes;
      place_ = tile_idx * kBoxesWanted % kNumPlaces;
    }
  }

  // Waits until what the next place held has been read.
  __device__ void Begin() const {
    if (uses_stages_) return;
    if (IsSender()) cute::tma_store_wait<kNumPlaces - 1>();
    NamedBarrier::sync(128, barrier_);
  }

  // Writes four 8 x 8 matrices of 16 bits, whose words the threads of a warp hold as wgmma leaves
  // them. Lane l says where row l % 8 of matrix l / 8 goes; with kTransposes column l % 8. `chunk`
  // counts 16 bytes.
  template <int kColumnsOfBox, bool kTransposes>
  __device__ void Write(const unsigned (&words)[4], int row, int chunk) const {
    constexpr int kRowBytes = kColumnsOfBox * 2;
    const std::uint32_t address = address_ + place_ * place_bytes_ + row * kRowBytes +
                                  ChunkAt<kRowBytes>(row, chunk) * 16;
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

  // Stores it, as far as it lies in d, and waits for nothing.
  __device__ void Send(const CUtensorMap* d_map, int first_m, int first_n) {
    cute::tma_store_fence();
    NamedBarrier::sync(128, barrier_);
    if (IsSender()) {
      asm volatile(
          "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
              d_map),
          "r"(address_ + place_ * place_bytes_), "r"(first_n), "r"(first_m)
          : "memory");
      cute::tma_store_arrive();
    }
    ++place_;
    if (!uses_stages_) place_ %= kNumPlaces;
  }

  // No block leaves before its last boxes have been read.
  static __device__ void End() {
    if (IsSender()) cute::tma_store_wait<0>();
  }

 private:
  static __device__ bool IsSender() { return threadIdx.x % 128 == 0; }

  // Rows of 128 and 64 bytes have their 16-byte chunks permuted as the swizzles of a tensor map do,
  // so that a matrix meets each bank once; of others, one after the other, it meets some twice.
  template <int kRowBytes>
  static __device__ int ChunkAt(int row, int chunk) {
    if constexpr (kRowBytes == 128) return chunk ^ (row % 8);
    if constexpr (kRowBytes == 64) return chunk ^ (row / 2 % 4);
    return chunk;
  }

  static constexpr int kNumPlaces = kBoxes > 0 ? kBoxes : 1;

  bool uses_stages_;
  unsigned barrier_;
  std::uint32_t address_;
  int place_ = 0;
  int place_bytes_ = kBoxBytes;
};

// Scales, rounds and stores a tile. A thread holds, of each 64 x 8 block, columns 2 * (lane % 4)
// and the next of row 16 * warp + lane / 4 and of the row 8 later (PTX ISA, "wgmma: Register
// Fragments and Shared Memory Matrix Layouts", accumulator D). With kUsesBoxes it goes by way of
// shared memory, else 8 neighbours in n at a time.
template <bool kUsesBoxes, class Sums>
__device__ void StoreRegisters(const Params& params, const Shared& shared, const Sums& sums,
                               int tile_idx, bool is_last_tile, int first_n, int first_m) {
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
  Boxes boxes(shared, warp_group, tile_idx, !kSwapAb && is_last_tile);
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
      if constexpr (kUsesBoxes) boxes.Begin();
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
        if constexpr (kUsesBoxes) {
          boxes.template Write<kBoxColumns, true>(words, (block + lane_matrix / 2) * 8 + lane_row,
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
      if constexpr (kUsesBoxes) boxes.Send(&params.d_map, first_m, first_n + row - warp * 16);
    } else {
      static_assert(kUsesBoxes);
      const float scale_a[2] = {scales_a[row + lane / 4], scales_a[row + lane / 4 + 8]};
      const auto store_box = [&](const CUtensorMap* d_map, auto first_column, auto num_columns) {
        constexpr int kFirst = decltype(first_column)::value / 8;
        constexpr int kBlocks = decltype(num_columns)::value / 8;
        // All of them before the box is written: no load passes a write to shared memory.
        float2 scale_b[kBlocks];
        float2 bias[kBlocks];
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          scale_b[block] = pair(scales_b, (kFirst + block) * 8 + 2 * quad_lane);
          bias[block] = pair(biases, (kFirst + block) * 8 + 2 * quad_lane);
        }
        // Two n of a block of eight, in row lane / 4 or the one 8 later.
        const auto word = [&](int block, int half) {
          return Pack<Out>(scale_a[half] * sum(kFirst + block, half, 0) * scale_b[block].x +
                               bias[block].x,
                           scale_a[half] * sum(kFirst + block, half, 1) * scale_b[block].y +
                               bias[block].y);
        };
        boxes.Begin();
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; block += 2) {
          const unsigned words[4] = {word(block, 0), word(block, 1), word(block + 1, 0),
                                     word(block + 1, 1)};
          boxes.template Write<kBlocks * 8, false>(
              words, warp * 16 + lane_matrix % 2 * 8 + lane_row, block + lane_matrix / 2);
        }
        boxes.Send(d_map, first_m + row - warp * 16, first_n + kFirst * 8);
      };
      cute::for_each(cute::make_int_sequence<kColumns / kBoxColumns>{}, [&](auto box) {
        store_box(&params.d_map, box * cute::Int<kBoxColumns>{}, cute::Int<kBoxColumns>{});
      });
#if STONEWARE_NARROW_BOXES
      store_box(&params.narrow_d_map, cute::Int<kColumns - kLastBoxColumns>{},
                cute::Int<kLastBoxColumns>{});
#endif
    }
  }
}

// Adds to this block's share of a tile what the other blocks of the cluster have summed of it, and
// sends them theirs. Returns whether this warp has some to store. All threads that multiply call.
template <class Share, class Sums>
__device__ bool AddPartialSums(const Shared& shared, const Share& share, Sums& sums) {
  constexpr int kWords = cute::size(Sums{}) / 4;  // of four sums
  const int thread = static_cast<int>(threadIdx.x);
  const int num_warps = kConsumerThreads / 32 / share.splits;  // that store, of a block
  const int warp = thread / 32 % num_warps;
  const int rank = thread / 32 / num_warps;  // of the block that stores what this warp has
  // Of each sender the words of each warp, lane by lane.
  const int sender_bytes = num_warps * kWords * 32 * 16;
  const std::uint32_t partial = cute::cast_smem_ptr_to_uint(shared.partial) +
                                static_cast<std::uint32_t>((warp * kWords * 32 + thread % 32) * 16);
  cute::cluster_wait();
  if (rank != share.rank) {
    const int slot = share.rank - (share.rank > rank);
    const std::uint32_t address = cute::set_block_rank(partial + slot * sender_bytes, rank);
    const std::uint32_t barrier =
        cute::set_block_rank(cute::cast_smem_ptr_to_uint(shared.summed), rank);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      StoreToBlock(address + i * 32 * 16, barrier, sums(4 * i), sums(4 * i + 1), sums(4 * i + 2),
                   sums(4 * i + 3));
    }
    return false;
  }
  WaitForCluster(shared.summed);
  for (int slot = 0; slot + 1 < share.splits; ++slot) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i) {
      float4 word;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(word.x), "=f"(word.y), "=f"(word.z), "=f"(word.w)
                   : "r"(partial + slot * sender_bytes + i * 32 * 16)
                   : "memory");
      sums(4 * i) += word.x;
      sums(4 * i + 1) += word.y;
      sums(4 * i + 2) += word.z;
      sums(4 * i + 3) += word.w;
    }
  }
  return true;
}

#if STONEWARE_FETCHES_AHEAD
// Asks L2 for what b has in the block's first stage, where no other block reads it; of rows that
// begin between two lines of L2, for the first line of each chunk.
template <bool kSplitsK>
__device__ void FetchAhead(const Params& params, const Share<kSplitsK>& share) {
  if (params.num_m_tiles > 1) return;
  for (int line = static_cast<int>(threadIdx.x); line < kTileN * kChunks;
       line += kConsumerThreads) {
    const int n = share.first_tile * kTileN + line / kChunks;
    const int k = share.first_step * kTileK + line % kChunks * kChunkElements;
    if (n < params.n && k < params.k) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(params.b) +
                                                    n * params.ldb_bytes + k * kOperandBytes));
    }
  }
}
#endif

template <bool kSplitsK>
__device__ void MultiplyTiles(const Params& params, const Shared& shared,
                              const Share<kSplitsK>& share) {
  const int thread = static_cast<int>(threadIdx.x);
#if STONEWARE_FETCHES_AHEAD
  FetchAhead(params, share);
#endif
  // With the loader, which has made the barriers.
  NamedBarrier::sync(kConsumerThreads + 32, kBarriersReady);

  auto row_stages =
      cute::make_tensor(cute::make_smem_ptr(shared.rows), StageLayout<RowOperand, kRows>{});
  auto column_stages = cute::make_tensor(cute::make_smem_ptr(shared.columns),
                                         StageLayout<ColumnOperand, kColumns>{});
  Mma mma;
  auto thread_mma = mma.get_thread_slice(thread);
  auto row_fragments = thread_mma.make_fragment_A(thread_mma.partition_A(row_stages));
  auto column_fragments = thread_mma.make_fragment_B(thread_mma.partition_B(column_stages));
  const auto tile_shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{};
  auto places = thread_mma.partition_C(cute::make_identity_tensor(tile_shape));
  auto sums = cute::partition_fragment_C(mma, tile_shape);

  // Tells who loads that a stage has been read: block scales by each thread, tiles by wgmma.
  const auto release = [&](int stage) {
    if (kBlockScales || thread % 32 == 0) shared.empty[stage].arrive();
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

  RingPosition<kStages> ring;
  int tile_idx = 0;
  for (int tile = share.first_tile; tile < params.num_tiles; tile += share.stride, ++tile_idx) {
    const auto [first_n, first_m] = Place(params, tile);
    const TileVectors vectors(params, first_n, first_m);
    const auto share_vectors = [&] {
      vectors.Store(shared, tile_idx);
      NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
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
      for (int i = 0; i < share.num_steps; ++i, ring.Advance()) {
        const int stage = ring.stage;
        shared.full[stage].wait(ring.parity);
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
        release(stage);
      }
      share_vectors();
    } else {
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      int last_stage = 0;
      for (int i = 0; i < share.num_steps; ++i, ring.Advance()) {
        const int stage = ring.stage;
        shared.full[stage].wait(ring.parity);
        cute::warpgroup_fence_operand(sums);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) multiply(chunk, stage, sums);
        cute::warpgroup_commit_batch();
        // The stage before this one has been read.
        cute::warpgroup_wait<1>();
        cute::warpgroup_fence_operand(sums);
        if (i > 0) release(last_stage);
        last_stage = stage;
      }
      share_vectors();  // while the last products are summed
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(sums);
      release(last_stage);
    }

    const bool is_last_tile = tile + share.stride >= params.num_tiles;
    if constexpr (!kSplitsK) {
      StoreRegisters<kStoresBoxes>(params, shared, sums, tile_idx, is_last_tile, first_n, first_m);
    } else if (AddPartialSums(shared, share, sums)) {
      StoreRegisters<kSplitsStoreBoxes>(params, shared, sums, tile_idx, is_last_tile, first_n,
                                        first_m);
    }
  }
  if constexpr (kStoresBoxes) Boxes::End();
}

template <bool kSplitsK>
__device__ void Run(const Params& params, const Shared& shared) {
  const Share<kSplitsK> share(params);
  const int thread = static_cast<int>(threadIdx.x);
  // Every warp arrives at the cluster's barrier before its loads and products, and so waits for
  // nothing there: who loads when its barriers are made.
  const bool is_loader = thread / 32 == kConsumerThreads / 32;
  if (kSplitsK && !is_loader) cute::cluster_arrive_relaxed();
  if (thread < kConsumerThreads) {
    if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    MultiplyTiles(params, shared, share);
  } else {
    if constexpr (kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (thread < kConsumerThreads + 32) {
      LoadTiles(params, shared, share);
    } else if (kBlockScales && thread < kConsumerThreads + 64) {
      LoadBlockScales(params, shared, share);
    }
    if constexpr (kSplitsK) WaitForClusterToArrive();
  }
}

}  // namespace
}  // namespace stoneware::gemm::sm90

using namespace stoneware::gemm::sm90;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    STONEWARE_KERNEL_ID(__grid_constant__ const Params params) {
  // A swizzle atom begins at a multiple of 1024 bytes.
  extern __shared__ __align__(1024) char shared_storage[];
  const Shared shared(shared_storage);
  if (kMaxSplits > 1 && cute::cluster_shape().x > 1) {
    Run<(kMaxSplits > 1)>(params, shared);
  } else {
    Run<false>(params, shared);
  }
}
