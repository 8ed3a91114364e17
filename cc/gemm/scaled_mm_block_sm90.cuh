// fp8 matrix product with block scales for Hopper, one config per compilation.
//
//   d[m, n] = sum_j scale_a[m, j] * scale_b[j, n / 128] * sum_{k of block j} a[m, k] * b[k, n]
//             + bias[n],    block j of k = 128 j ... 128 j + 127
//
//   tensor    shape                     stride           dtype
//   a         [m, k]                    [lda, 1]         STONEWARE_A (fp8)
//   b         [k, n]                    [1, ldb]         STONEWARE_B (fp8)
//   d         [m, n]                    [ldd, 1]         STONEWARE_OUT (bf16, fp16 or fp32)
//   scale_a   [m, k / 128]              any              fp32
//   scale_b   [k / 128, ceil(n / 128)]  any              fp32
//   bias      [n] or null               [1]              STONEWARE_OUT
//
// The accumulator is fp32: the tensor core sums one block of k, and then that sum, times its
// scales, is added to a second set of registers in full fp32. A thread therefore holds two
// accumulators per element of its tile. The bias is added in fp32.
//
// The grid covers output tiles of STONEWARE_TILE_M x STONEWARE_TILE_N; it is persistent, at most one
// block per SM, each walking over tiles. Blocks of a cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads of a and b in flight and a second one copies of the
// scales, so that no multiplying warp waits for a scale; two warp groups take turns (pingpong) or
// share a tile (cooperative), so that one multiplies while the other scales. With STONEWARE_SWAP_AB
// it computes d^T = b^T a^T, so that a small m takes the side of the tile that may be as narrow as
// 8 (wgmma's n), where m would be padded to 64.
//
// Scales are copied element by element, each guarded by the bounds of its tensor: any strides will
// do, and nothing past the last row is read.
//
// The defines come from gemm_configs.bzl, the only place a config is written.

#pragma once

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#if !defined(STONEWARE_KERNEL_ID) || !defined(STONEWARE_A) || !defined(STONEWARE_B) ||       \
    !defined(STONEWARE_OUT) || !defined(STONEWARE_TILE_M) || !defined(STONEWARE_TILE_N) ||   \
    !defined(STONEWARE_TILE_K) || !defined(STONEWARE_CLUSTER_M) ||                           \
    !defined(STONEWARE_CLUSTER_N) || !defined(STONEWARE_SCHEDULE) || !defined(STONEWARE_SWAP_AB)
#error "compile with the defines of one block_scaled_config() of gemm_configs.bzl"
#endif

namespace stoneware::gemm::sm90_block {

// The config's words for CUTLASS's types.
namespace dtype {
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
using fp32 = float;
}  // namespace dtype

namespace schedule {
struct pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
}  // namespace schedule

// wgmma exists on exactly this architecture.
inline constexpr char kArch[] = "sm_90a";

inline constexpr bool kSwapAb = STONEWARE_SWAP_AB;

// Elements of k, and columns of b, that share a scale.
inline constexpr int kScaleBlock = 128;

using ElementOut = dtype::STONEWARE_OUT;
using Schedule = schedule::STONEWARE_SCHEDULE;

// From here on "rows" and "columns" are those of the problem that CUTLASS sees: the caller's m and
// n, or with kSwapAb n and m. Both operands are K-major either way, as fp8 wgmma demands.
using ElementRowOperand = cute::conditional_t<kSwapAb, dtype::STONEWARE_B, dtype::STONEWARE_A>;
using ElementColumnOperand = cute::conditional_t<kSwapAb, dtype::STONEWARE_A, dtype::STONEWARE_B>;
using LayoutOut =
    cute::conditional_t<kSwapAb, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

using TileShape = cute::Shape<cute::Int<STONEWARE_TILE_M>, cute::Int<STONEWARE_TILE_N>,
                              cute::Int<STONEWARE_TILE_K>>;
using ClusterShape =
    cute::Shape<cute::Int<STONEWARE_CLUSTER_M>, cute::Int<STONEWARE_CLUSTER_N>, cute::_1>;

// Scales as functions of an element's place, ((element, block), (element of k, block of k), batch),
// with stride 0 inside a block. Strides known at run time only keep CUTLASS from loading scales by
// TMA, which would want 16-byte alignment.
using BlocksOfK = cute::Shape<cute::Int<kScaleBlock>, int>;
using BlocksOfKStride = cute::Stride<cute::_0, std::int64_t>;

// Along the caller's m: a scale for each row.
using RowwiseScales =
    cute::Layout<cute::Shape<cute::Shape<cute::_1, int>, BlocksOfK, int>,
                 cute::Stride<cute::Stride<cute::_0, std::int64_t>, BlocksOfKStride, std::int64_t>>;

// Along the caller's n: a scale for each kScaleBlock columns. A tile has whole scales, so that a
// narrower one has its own granularity, and kTilesPerBlock tiles in turn have the same scale.
inline constexpr int kTileAlongN = kSwapAb ? STONEWARE_TILE_M : STONEWARE_TILE_N;
inline constexpr int kGranularity = kTileAlongN < kScaleBlock ? kTileAlongN : kScaleBlock;
static_assert(kScaleBlock % kGranularity == 0 && kTileAlongN % kGranularity == 0,
              "a tile must have whole blocks along n, or divide one");
inline constexpr int kTilesPerBlock = kScaleBlock / kGranularity;
using BlockwiseScales =
    cute::Layout<cute::Shape<cute::Shape<cute::Int<kGranularity>,
                                         cute::Shape<cute::Int<kTilesPerBlock>, int>>,
                             BlocksOfK, int>,
                 cute::Stride<cute::Stride<cute::_0, cute::Stride<cute::_0, std::int64_t>>,
                              BlocksOfKStride, std::int64_t>>;

using RowScales = cute::conditional_t<kSwapAb, BlockwiseScales, RowwiseScales>;
using ColumnScales = cute::conditional_t<kSwapAb, RowwiseScales, BlockwiseScales>;

namespace fusion = cutlass::epilogue::fusion;

using Bias = cute::conditional_t<
    kSwapAb,
    fusion::Sm90ColBroadcast<0, TileShape, ElementOut, float,
                             cute::Stride<cute::_1, cute::_0, std::int64_t>>,
    fusion::Sm90RowBroadcast<0, TileShape, ElementOut, float,
                             cute::Stride<cute::_0, cute::_1, std::int64_t>>>;

// accumulator + bias
using Biased = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, ElementOut, float,
                                                   cutlass::FloatRoundStyle::round_to_nearest>,
                               fusion::Sm90AccFetch, Bias>;

// TMA moves 16 bytes at least.
inline constexpr int kOperandAlignment = 16 / sizeof(ElementRowOperand);
inline constexpr int kOutAlignment = 16 / sizeof(ElementOut);

// C does not exist: void.
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutOut, kOutAlignment,
    ElementOut, LayoutOut, kOutAlignment, Schedule::Epilogue, Biased>::CollectiveOp;

// CUTLASS's builder takes layouts of its own form only, from which it reads the granularities; the
// main loop itself takes any. So it is built for such layouts, and then given ours.
template <int kGranularityAlongTile>
using FormOfBuilder =
    cute::Layout<cute::Shape<cute::Shape<cute::Int<kGranularityAlongTile>, int>, BlocksOfK, int>,
                 cute::Stride<cute::Stride<cute::_0, std::int64_t>, BlocksOfKStride, std::int64_t>>;

using BuiltMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementRowOperand,
    cute::tuple<cutlass::layout::RowMajor, FormOfBuilder<kSwapAb ? kGranularity : 1>>,
    kOperandAlignment, ElementColumnOperand,
    cute::tuple<cutlass::layout::ColumnMajor, FormOfBuilder<kSwapAb ? 1 : kGranularity>>,
    kOperandAlignment, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule::Mainloop>::CollectiveOp;

template <class Mainloop>
struct WithScaleLayouts;

template <class Policy, class Tile, class A, class StrideA, class B, class StrideB, class... Rest>
struct WithScaleLayouts<
    cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, StrideA, B, StrideB, Rest...>> {
  using Type = cutlass::gemm::collective::CollectiveMma<
      Policy, Tile, A, cute::tuple<cute::tuple_element_t<0, StrideA>, RowScales>, B,
      cute::tuple<cute::tuple_element_t<0, StrideB>, ColumnScales>, Rest...>;
};

using Mainloop = typename WithScaleLayouts<BuiltMainloop>::Type;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, cutlass::gemm::PersistentScheduler>;

}  // namespace stoneware::gemm::sm90_block
