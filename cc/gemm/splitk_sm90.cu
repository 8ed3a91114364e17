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

__device__ void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace
}  // namespace stoneware::gemm::sm90

using namespace stoneware::gemm::sm90;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    STONEWARE_KERNEL_ID(__grid_constant__ const Params params) {
  extern __shared__ char unaligned_shared[];
  const std::uint32_t unaligned = cute::cast_smem_ptr_to_uint(unaligned_shared);
  // The same offset in every block of a cluster, whose launches are alike.
  char* const shared = unaligned_shared + (SharedLayout::kAlignment - unaligned %
                                           SharedLayout::kAlignment) % SharedLayout::kAlignment;
  auto* const rows = reinterpret_cast<Operand*>(shared);
  auto* const columns = reinterpret_cast<Operand*>(shared + SharedLayout::kColumnsAt);
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  auto* const full = reinterpret_cast<Full*>(shared + SharedLayout::kBarriersAt);
  auto* const empty = reinterpret_cast<Empty*>(full + kStages);

  // A cluster's blocks: for each share of k, the neighbours that load a's columns together.
  const int splits = static_cast<int>(cute::cluster_shape().x) / kShare;
  const int block = static_cast<int>(cute::block_rank_in_cluster());
  const int rank = block / kShare;
  const int neighbour = block % kShare;
  const int first_n =
      (static_cast<int>(blockIdx.x) / (splits * kShare) * kShare + neighbour) * kRows;
  const int first_m = static_cast<int>(blockIdx.y) * kColumns;
  const int first_tile = static_cast<int>(std::int64_t{params.num_k_tiles} * rank / splits);
  const int num_tiles =
      static_cast<int>(std::int64_t{params.num_k_tiles} * (rank + 1) / splits) - first_tile;

  const int thread = static_cast<int>(threadIdx.x);
  const bool is_producer = thread >= kConsumerThreads;

  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(1);
      empty[stage].init(kConsumerThreads / 32 * kShare);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (thread == kConsumerThreads) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.row_map));
    cute::prefetch_tma_descriptor(
        reinterpret_cast<const cute::TmaDescriptor*>(&params.column_map));
  }
  if constexpr (kShare == 1) {
    __syncthreads();
  } else {
    // Neighbours signal each other's barriers.
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }

  if (is_producer) {
    if (thread == kConsumerThreads) {
      constexpr auto kOnce = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
      constexpr auto kKept = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
      for (int i = 0; i < num_tiles; ++i) {
        const int stage = i % kStages;
        empty[stage].wait(1 - i / kStages % 2);
        full[stage].arrive_and_expect_tx(kRowStageBytes + kColumnStageBytes);
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int at_k = (first_tile + i) * kTileK + chunk * kChunkElements;
          const int position = stage * kChunks + chunk;
          auto* const barrier = reinterpret_cast<std::uint64_t*>(&full[stage]);
          cute::SM90_TMA_LOAD_2D::copy(&params.row_map, barrier, kOnce,
                                       rows + position * kRows * kChunkElements, at_k, first_n);
          auto* const part =
              columns + (position * kColumns + neighbour * kLoadedColumns) * kChunkElements;
          const int at_m = first_m + neighbour * kLoadedColumns;
          if constexpr (kShare == 1) {
            cute::SM90_TMA_LOAD_2D::copy(&params.column_map, barrier, kKept, part, at_k, at_m);
          } else {
            const auto neighbours =
                static_cast<std::uint16_t>(((1u << kShare) - 1) << (rank * kShare));
            cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.column_map, barrier, neighbours, kKept,
                                                   part, at_k, at_m);
          }
        }
      }
    }
    __syncwarp();
  } else {
    // Asked for now, what the epilogue reads is in L2 when it is needed.
    if (thread < kRows && first_n + thread < params.n) {
      if (params.row_scale != nullptr) {
        PrefetchToL2(params.row_scale + (first_n + thread) * params.row_scale_stride);
      }
      if (params.bias != nullptr) {
        PrefetchToL2(static_cast<const Out*>(params.bias) + first_n + thread);
      }
    }
    for (int column = thread; column < kColumns; column += kConsumerThreads) {
      if (first_m + column < params.m && params.column_scale != nullptr) {
        PrefetchToL2(params.column_scale + (first_m + column) * params.column_scale_stride);
      }
    }

    auto row_stages = cute::make_tensor(cute::make_smem_ptr(rows), StageLayout<kRows>{});
    auto column_stages = cute::make_tensor(cute::make_smem_ptr(columns), StageLayout<kColumns>{});
    Mma mma;
    auto thread_mma = mma.get_thread_slice(thread);
    auto row_fragments = thread_mma.make_fragment_A(thread_mma.partition_A(row_stages));
    auto column_fragments = thread_mma.make_fragment_B(thread_mma.partition_B(column_stages));
    auto sums = cute::partition_fragment_C(
        mma, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{});
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;

    for (int i = 0; i < num_tiles; ++i) {
      const int stage = i % kStages;
      full[stage].wait(i / kStages % 2);
      cute::warpgroup_fence_operand(sums);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int position = stage * kChunks + chunk;
        CUTLASS_PRAGMA_UNROLL
        for (int at = 0; at < cute::size<2>(row_fragments); ++at) {
          cute::gemm(mma, row_fragments(cute::_, cute::_, at, position),
                     column_fragments(cute::_, cute::_, at, position), sums);
          mma.accumulate_ = cute::GMMA::ScaleOut::One;
        }
      }
      cute::warpgroup_commit_batch();
      // The stage before this one has been read.
      cute::warpgroup_wait<1>();
      cute::warpgroup_fence_operand(sums);
      if (i > 0) {
        if constexpr (kShare == 1) {
          if (thread % 32 == 0) empty[(i - 1) % kStages].arrive();
        } else {
          // To each neighbour, whose part of a has been read.
          empty[(i - 1) % kStages].arrive(rank * kShare + thread % 32, thread % 32 < kShare);
        }
      }
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(sums);

    // Every warp has read the last stages: partial sums may take their place.
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, /*barrier_id=*/1);
    auto* const partial = reinterpret_cast<float*>(shared);
    auto places = thread_mma.partition_C(
        cute::make_identity_tensor(cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>{}));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) {
      partial[cute::get<1>(places(i)) * kPartialStride + cute::get<0>(places(i))] = sums(i);
    }
  }

  cute::cluster_arrive();
  cute::cluster_wait();

  if (!is_producer) {
    const std::uint32_t partial = cute::cast_smem_ptr_to_uint(shared);
    const int num_columns = min(kColumns, params.m - first_m);
    constexpr int kRunsPerColumn = kRows / kRun;
    for (int run = rank * kConsumerThreads + thread; run < num_columns * kRunsPerColumn;
         run += splits * kConsumerThreads) {
      const int column = run / kRunsPerColumn;
      const int row = run % kRunsPerColumn * kRun;
      const int m = first_m + column;
      const int n = first_n + row;
      if (n >= params.n) continue;

      float sums[kRun] = {};
      const std::uint32_t address =
          partial + static_cast<std::uint32_t>((column * kPartialStride + row) * sizeof(float));
      for (int split = 0; split < splits; ++split) {
        const std::uint32_t holder = split * kShare + neighbour;
        const float4 low = LoadFromBlock(address, holder);
        const float4 high = LoadFromBlock(address + sizeof(float4), holder);
        sums[0] += low.x, sums[1] += low.y, sums[2] += low.z, sums[3] += low.w;
        sums[4] += high.x, sums[5] += high.y, sums[6] += high.z, sums[7] += high.w;
      }

      const float column_scale =
          params.column_scale == nullptr ? 1.0f
                                         : params.column_scale[m * params.column_scale_stride];
      const Out* const bias = static_cast<const Out*>(params.bias);
      OutRun result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) {
        float value = column_scale * sums[i];
        if (params.row_scale != nullptr) {
          value *= params.row_scale[(n + i) * params.row_scale_stride];
        }
        if (bias != nullptr) value += static_cast<float>(bias[n + i]);
        result.values[i] = static_cast<Out>(value);
      }
      *reinterpret_cast<OutRun*>(static_cast<Out*>(params.d) + m * params.ldd + n) = result;
    }
  }

  // No block leaves while another may read its partial sums.
  cute::cluster_arrive();
  cute::cluster_wait();
}
