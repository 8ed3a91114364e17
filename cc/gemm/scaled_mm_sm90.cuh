// fp8 matrix product with scales for Hopper, one config per compilation.
//
//   d[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias[n]
//
//   tensor    shape           stride                 dtype
//   a         [m, k]          [lda, 1]               STONEWARE_A (fp8)
//   b         [k, n]          [1, ldb]               STONEWARE_B (fp8)
//   d         [m, n]          [ldd, 1]               STONEWARE_OUT (bf16, fp16 or fp32)
//   scale_a   [m] or scalar   [1] or [0]             fp32
//   scale_b   [n] or scalar   [1] or [0]             fp32
//   bias      [n] or null     [1]                    STONEWARE_OUT
//
// The accumulator is fp32. With STONEWARE_FAST_ACCUMULATION the tensor core sums over all of k, in
// the some 14 bits that it keeps of a sum; without, each 128 of k are added to a second set of
// registers in full fp32. Scales and bias are applied in fp32.
//
// The grid covers output tiles of STONEWARE_TILE_M x STONEWARE_TILE_N. With the pingpong and
// cooperative schedules it is persistent, at most one block per SM, each walking over tiles; with
// warpspecialized it has a block per tile, and swizzle and raster order mean nothing. Blocks of a
// cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads in flight while the other warp groups run wgmma, and
// with STONEWARE_SWAP_AB it computes d^T = b^T a^T, so that a small m takes the side of the tile
// that may be as narrow as 8 (wgmma's n), where m would be padded to 64.
//
// The defines come from gemm_configs.bzl, the only place a config is written.

#pragma once

// All widths of wgmma; else a tile of 160 columns is computed by five of 32.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#if !defined(STONEWARE_KERNEL_ID) || !defined(STONEWARE_A) || !defined(STONEWARE_B) ||       \
    !defined(STONEWARE_OUT) || !defined(STONEWARE_TILE_M) || !defined(STONEWARE_TILE_N) ||   \
    !defined(STONEWARE_TILE_K) || !defined(STONEWARE_CLUSTER_M) ||                           \
    !defined(STONEWARE_CLUSTER_N) || !defined(STONEWARE_SCHEDULE) ||                         \
    !defined(STONEWARE_FAST_ACCUMULATION) || !defined(STONEWARE_SWAP_AB)
#error "compile with the defines of one gemm_config() of gemm_configs.bzl"
#endif

namespace stoneware::gemm::sm90 {

// The config's words for CUTLASS's types.
namespace dtype {
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
using fp32 = float;
}  // namespace dtype

inline constexpr bool kFastAccumulation = STONEWARE_FAST_ACCUMULATION;

namespace schedule {
struct warpspecialized {
  using Mainloop =
      cute::conditional_t<kFastAccumulation, cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum,
                          cutlass::gemm::KernelTmaWarpSpecialized>;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct pingpong {
  using Mainloop = cute::conditional_t<kFastAccumulation,
                                       cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                       cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct cooperative {
  using Mainloop =
      cute::conditional_t<kFastAccumulation,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
}  // namespace schedule

// wgmma exists on exactly this architecture.
inline constexpr char kArch[] = "sm_90a";

inline constexpr bool kSwapAb = STONEWARE_SWAP_AB;

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

namespace fusion = cutlass::epilogue::fusion;

template <template <class> class Operation, class Output>
using Compute =
    fusion::Sm90Compute<Operation, Output, float, cutlass::FloatRoundStyle::round_to_nearest>;

// A stride of bool makes vector or scalar a choice of the launch: one kernel serves both.
using RowScale = fusion::Sm90ColBroadcast<0, TileShape, float, float,
                                          cute::Stride<bool, cute::_0, std::int64_t>>;
using ColumnScale = fusion::Sm90RowBroadcast<0, TileShape, float, float,
                                             cute::Stride<cute::_0, bool, std::int64_t>>;
using Bias = cute::conditional_t<
    kSwapAb,
    fusion::Sm90ColBroadcast<0, TileShape, ElementOut, float,
                             cute::Stride<cute::_1, cute::_0, std::int64_t>>,
    fusion::Sm90RowBroadcast<0, TileShape, ElementOut, float,
                             cute::Stride<cute::_0, cute::_1, std::int64_t>>>;

// row_scale * (column_scale * accumulator) + bias
using ScaledAccumulator =
    fusion::Sm90EVT<Compute<cutlass::multiplies, float>, ColumnScale, fusion::Sm90AccFetch>;
using ScaledAndBiased =
    fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, ElementOut>, RowScale,
                    ScaledAccumulator, Bias>;

// TMA moves 16 bytes at least.
inline constexpr int kOperandAlignment = 16 / sizeof(ElementRowOperand);
inline constexpr int kOutAlignment = 16 / sizeof(ElementOut);

// C does not exist: void.
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutOut, kOutAlignment,
    ElementOut, LayoutOut, kOutAlignment, Schedule::Epilogue, ScaledAndBiased>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementRowOperand,
    cutlass::layout::RowMajor, kOperandAlignment, ElementColumnOperand,
    cutlass::layout::ColumnMajor, kOperandAlignment, float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule::Mainloop>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, cutlass::gemm::PersistentScheduler>;

}  // namespace stoneware::gemm::sm90
