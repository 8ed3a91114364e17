// The device side of one config; splitk_sm90.cuh says what it computes.

#include "cc/gemm/splitk_sm90.cuh"

#include "cute/algorithm/gemm.hpp"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
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

__device__ float4 LoadFromBlock(std::uint32_t shared_address, std::uint32_t rank) {
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

// Barriers of the consumers, alone or with one warp more.
constexpr unsigned kAmongConsumers = 1;
constexpr unsigned kVectorsWritten = 2;
constexpr unsigned kVectorsRead = 3;
constexpr unsigned kBarriersReady = 4;
// Of the warps that load and that read scales.
constexpr unsigned kBarriersReadyForScales = 5;

// This block's part of the work.
struct Share {
  int cluster_size = static_cast<int>(cute::cluster_shape().x);
  int splits = cluster_size / kShare;
  int block = static_cast<int>(cute::block_rank_in_cluster());
  int rank = block / kShare;       // which share of k
  int neighbour = block % kShare;  // which of the tiles
  int first_cluster = static_cast<int>(blockIdx.x) / cluster_size;
  int num_clusters = static_cast<int>(gridDim.x) / cluster_size;
  int first_step;
  int num_steps;  // tiles of k

  __device__ explicit Share(const Params& params) {
    first_step = static_cast<int>(std::int64_t{params.num_k_tiles} * rank / splits);
    num_steps = static_cast<int>(std::int64_t{params.num_k_tiles} * (rank + 1) / splits) -
                first_step;
  }
  __device__ int FirstN(const Params& params, int tile) const {
    return (tile / params.num_m_tiles * kShare + neighbour) * kRows;
  }
  __device__ int FirstM(const Params& params, int tile) const {
    return tile % params.num_m_tiles * kColumns;
  }
};

struct Shared {
  Operand* rows;
  Operand* columns;
  float* partial;
  float* row_scales;
  float* biases;
  float* column_scales;
  float* block_scales;  // [stage][chunk]: one for each column, then that of the rows
  Full* full;
  Empty* empty;

  __device__ explicit Shared(char* base)
      : rows(reinterpret_cast<Operand*>(base)),
        columns(reinterpret_cast<Operand*>(base + SharedLayout::kColumnsAt)),
        partial(reinterpret_cast<float*>(base + SharedLayout::kPartialAt)),
        row_scales(reinterpret_cast<float*>(base + SharedLayout::kVectorsAt)),
        biases(row_scales + kRows),
        column_scales(biases + kRows),
        block_scales(reinterpret_cast<float*>(base + SharedLayout::kBlockScalesAt)),
        full(reinterpret_cast<Full*>(base + SharedLayout::kBarriersAt)),
        empty(reinterpret_cast<Empty*>(full + kStages)) {}

  __device__ float* BlockScales(int stage, int chunk) const {
    return block_scales + (stage * kChunks + chunk) * (kColumns + 4);
  }
};

__device__ void ClusterSync() {
  cute::cluster_arrive();
  cute::cluster_wait();
}

// What a warp that does not multiply does last, so that the barriers of the cluster match.
__device__ void Finish(const Share& share) {
  if (share.splits > 1) {
    ClusterSync();  // partial sums are written
    ClusterSync();  // and read
  } else if (kShare > 1) {
    ClusterSync();  // no block leaves while another may signal its barriers
  }
}

// Barriers are ready from here on, those of the neighbours too.
__device__ void StartTogether() {
  if constexpr (kShare > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    NamedBarrier::sync(kConsumerThreads + 32, kBarriersReady);
  }
}

__device__ void LoadTiles(const Params& params, const Shared& shared, const Share& share) {
  const bool is_loader = threadIdx.x % 32 == 0;
  if (is_loader) {
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kBlockScales ? 1 + 32 : 1);
      shared.empty[stage].init(kConsumerThreads / 32 * kShare);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
  if constexpr (kShare > 1) {
    StartTogether();  // neighbours write to each other's stages
  } else {
    NamedBarrier::arrive(kConsumerThreads + 32, kBarriersReady);
    if constexpr (kBlockScales) NamedBarrier::arrive(64, kBarriersReadyForScales);
  }

  if (is_loader) {
    constexpr auto kOnce = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
    constexpr auto kKept = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    const std::uint64_t row_hint = params.num_m_tiles == 1 ? kOnce : kKept;
    int loaded = 0;
    for (int tile = share.first_cluster; tile < params.num_tiles; tile += share.num_clusters) {
      const int first_n = share.FirstN(params, tile);
      const int first_m = share.FirstM(params, tile) + share.neighbour * kLoadedColumns;
      for (int i = 0; i < share.num_steps; ++i, ++loaded) {
        const int stage = loaded % kStages;
        shared.empty[stage].wait(1 - loaded / kStages % 2);
        shared.full[stage].arrive_and_expect_tx(kRowStageBytes + kColumnStageBytes);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int at_k = (share.first_step + i) * kTileK + chunk * kChunkElements;
          const int position = stage * kChunks + chunk;
          auto* const barrier = reinterpret_cast<std::uint64_t*>(&shared.full[stage]);
          cute::SM90_TMA_LOAD_2D::copy(&params.row_map, barrier, row_hint,
                                       shared.rows + position * kRows * kChunkElements, at_k,
                                       first_n);
          auto* const part =
              shared.columns +
              (position * kColumns + share.neighbour * kLoadedColumns) * kChunkElements;
          if constexpr (kShare == 1) {
            cute::SM90_TMA_LOAD_2D::copy(&params.column_map, barrier, kKept, part, at_k, first_m);
          } else {
            const auto neighbours =
                static_cast<std::uint16_t>(((1u << kShare) - 1) << (share.rank * kShare));
            cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.column_map, barrier, neighbours, kKept,
                                                   part, at_k, first_m);
          }
        }
      }
    }
  }
  __syncwarp();
  Finish(share);
}

// Of each tile the vectors that its epilogue needs, and of each stage its block scales.
__device__ void ReadScales(const Params& params, const Shared& shared, const Share& share) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.row_map));
    cute::prefetch_tma_descriptor(
        reinterpret_cast<const cute::TmaDescriptor*>(&params.column_map));
  }
  __syncwarp();
  if constexpr (kShare > 1) {
    StartTogether();
  } else if constexpr (kBlockScales) {
    NamedBarrier::sync(64, kBarriersReadyForScales);
  }
  const auto* const bias = static_cast<const Out*>(params.bias);
  int num_read = 0;
  bool is_first = true;
  for (int tile = share.first_cluster; tile < params.num_tiles; tile += share.num_clusters) {
    const int first_n = share.FirstN(params, tile);
    const int first_m = share.FirstM(params, tile);
    if constexpr (kBlockScales) {
      const float* const row_scale =
          params.row_scale + first_n / kScaleBlock * params.row_scale_stride;
      for (int i = 0; i < share.num_steps; ++i, ++num_read) {
        const int stage = num_read % kStages;
        shared.empty[stage].wait(1 - num_read / kStages % 2);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int block = (share.first_step + i) * kChunks + chunk;
          const bool is_inside = block * kScaleBlock < params.k;
          float* const scales = shared.BlockScales(stage, chunk);
          for (int column = lane; column < kColumns; column += 32) {
            const int m = first_m + column;
            const bool has_scale = is_inside && m < params.m;
            CopyAsync(scales + column,
                      has_scale ? params.column_scale + m * params.column_scale_stride +
                                      block * params.ld_column_scale
                                : params.column_scale,
                      has_scale);
          }
          if (lane == 0) {
            CopyAsync(scales + kColumns,
                      is_inside ? row_scale + block * params.ld_row_scale : row_scale, is_inside);
          }
        }
        ArriveWhenCopied(reinterpret_cast<std::uint64_t*>(&shared.full[stage]));
      }
    }
    float row_values[kRows / 32];
    float bias_values[kRows / 32];
    float column_values[(kColumns + 31) / 32];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 32; ++i) {
      const int n = first_n + i * 32 + lane;
      const bool is_inside = n < params.n;
      row_values[i] = !kBlockScales && is_inside && params.row_scale != nullptr
                          ? params.row_scale[n * params.row_scale_stride]
                          : 1.0f;
      bias_values[i] = is_inside && bias != nullptr ? static_cast<float>(bias[n]) : 0.0f;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < (kColumns + 31) / 32; ++i) {
      const int m = first_m + i * 32 + lane;
      column_values[i] = !kBlockScales && m < params.m && params.column_scale != nullptr
                             ? params.column_scale[m * params.column_scale_stride]
                             : 1.0f;
    }
    if (!is_first) NamedBarrier::sync(kConsumerThreads + 32, kVectorsRead);
    is_first = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows / 32; ++i) {
      shared.row_scales[i * 32 + lane] = row_values[i];
      shared.biases[i * 32 + lane] = bias_values[i];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < (kColumns + 31) / 32; ++i) {
      if (i * 32 + lane < kColumns) shared.column_scales[i * 32 + lane] = column_values[i];
    }
    NamedBarrier::arrive(kConsumerThreads + 32, kVectorsWritten);
  }
  Finish(share);
}

__device__ void MultiplyTiles(const Params& params, const Shared& shared, const Share& share) {
  const int thread = static_cast<int>(threadIdx.x);
  StartTogether();

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

  // Tells those who load a stage that it has been read.
  const auto release = [&](int step) {
    if constexpr (kShare == 1) {
      if (thread % 32 == 0) shared.empty[step % kStages].arrive();
    } else {
      // To each neighbour, whose part of a has been read.
      shared.empty[step % kStages].arrive(share.rank * kShare + thread % 32,
                                          thread % 32 < kShare);
    }
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

  const std::uint32_t partial_address = cute::cast_smem_ptr_to_uint(shared.partial);

  int step = 0;
  for (int tile = share.first_cluster; tile < params.num_tiles; tile += share.num_clusters) {
    const int first_n = share.FirstN(params, tile);
    const int first_m = share.FirstM(params, tile);
    const int num_columns = min(kColumns, params.m - first_m);

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
        __syncwarp();
        release(step);
      }
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
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(sums);
      release(step - 1);
    }

    if constexpr (kReusesStages) {
      // Every warp has read the last stages: partial sums may take their place.
      NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) {
      shared.partial[cute::get<1>(places(i)) * kPartialStride + cute::get<0>(places(i))] = sums(i);
    }
    NamedBarrier::sync(kConsumerThreads + 32, kVectorsWritten);
    if (share.splits > 1) ClusterSync();

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
          const std::uint32_t holder = split * kShare + share.neighbour;
          add(LoadFromBlock(address, holder), LoadFromBlock(address + sizeof(float4), holder));
        }
      }

      const float column_scale = shared.column_scales[column];
      OutRun result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) {
        result.values[i] = static_cast<Out>(
            column_scale * values[i] * shared.row_scales[row + i] + shared.biases[row + i]);
      }
      *reinterpret_cast<OutRun*>(static_cast<Out*>(params.d) +
                                 std::int64_t{first_m + column} * params.ldd + n) = result;
    }
    if (tile + share.num_clusters < params.num_tiles) {
      NamedBarrier::arrive(kConsumerThreads + 32, kVectorsRead);
      NamedBarrier::sync(kConsumerThreads, kAmongConsumers);
    }
  }
  if (share.cluster_size > 1) ClusterSync();  // no block leaves while another reads or signals
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
    MultiplyTiles(params, shared, share);
  } else if (thread < kConsumerThreads + 32) {
    LoadTiles(params, shared, share);
  } else {
    ReadScales(params, shared, share);
  }
}
