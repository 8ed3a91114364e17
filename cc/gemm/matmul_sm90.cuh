// bf16 and fp16 matrix product for Hopper, one config per compilation.
//
//   d[i, m, n] = sum_k a[i, m, k] * b[i, k, n] + bias[n]
//
//   tensor  shape         stride                                            dtype
//   a       [batch, m, k] [batch_stride_a, lda, 1], or with                 STONEWARE_OPERAND
//                         STONEWARE_A_IS_M_MAJOR [batch_stride_a, 1, lda]
//   b       [batch, k, n] [batch_stride_b, 1, ldb], or with                 STONEWARE_OPERAND
//                         STONEWARE_B_IS_N_MAJOR [batch_stride_b, ldb, 1]
//   d       [batch, m, n] [batch_stride_d, ldd, 1]                          STONEWARE_OUT
//   bias    [n] or null   [1]                                               STONEWARE_OUT
//
// STONEWARE_OPERAND is bf16 or fp16, STONEWARE_OUT the same or fp32. A batch stride of 0 is one
// operand for every product. The accumulator is fp32; the bias is added to it before it is rounded.
//
// The grid covers output tiles of STONEWARE_TILE_M x STONEWARE_TILE_N of every product of the batch.
// With the pingpong and cooperative schedules it is persistent, at most one block per SM, each
// walking over tiles; with warpspecialized it has a block per tile, and swizzle and raster order
// mean nothing. Blocks of a cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads in flight while the other warp groups run wgmma,
// which takes 16-bit operands of either orientation from shared memory, so no layout needs a
// transposed copy. With STONEWARE_SWAP_AB it computes d^T = b^T a^T, so that a small m takes the
// side of the tile that may be as narrow as 8 (wgmma's n), where m would be padded to 64.
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

#if !defined(STONEWARE_KERNEL_ID) || !defined(STONEWARE_OPERAND) || !defined(STONEWARE_OUT) ||      \
    !defined(STONEWARE_A_IS_M_MAJOR) || !defined(STONEWARE_B_IS_N_MAJOR) ||                         \
    !defined(STONEWARE_TILE_M) || !defined(STONEWARE_TILE_N) || !defined(STONEWARE_TILE_K) ||       \
    !defined(STONEWARE_CLUSTER_M) || !defined(STONEWARE_CLUSTER_N) || !defined(STONEWARE_SCHEDULE) || \
    !defined(STONEWARE_SWAP_AB)
#error "compile with the defines of one matmul_config() of gemm_configs.bzl"
#endif

namespace stoneware::gemm::matmul_sm90 {

// The config's words for CUTLASS's types.
namespace dtype {
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
using fp32 = float;
}  // namespace dtype

namespace schedule {
struct warpspecialized {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
}  // namespace schedule

// wgmma exists on exactly this architecture.
constexpr char kArch[] = "sm_90a";

constexpr bool kSwapAb = STONEWARE_SWAP_AB;
constexpr bool kAIsMMajor = STONEWARE_A_IS_M_MAJOR;
constexpr bool kBIsNMajor = STONEWARE_B_IS_N_MAJOR;
// warpspecialized has a block per tile, the others walk over tiles.
constexpr bool kIsPersistent =
    !cute::is_same_v<schedule::STONEWARE_SCHEDULE, schedule::warpspecialized>;

using ElementOperand = dtype::STONEWARE_OPERAND;
using ElementOut = dtype::STONEWARE_OUT;
using Schedule = schedule::STONEWARE_SCHEDULE;

// From here on "rows" and "columns" are those of the problem that CUTLASS sees: the caller's m and
// n, or with kSwapAb n and m.
constexpr bool kRowOperandIsKMajor = kSwapAb ? !kBIsNMajor : !kAIsMMajor;
constexpr bool kColumnOperandIsKMajor = kSwapAb ? !kAIsMMajor : !kBIsNMajor;
using LayoutRowOperand = cute::conditional_t<kRowOperandIsKMajor, cutlass::layout::RowMajor,
                                             cutlass::layout::ColumnMajor>;
using LayoutColumnOperand = cute::conditional_t<kColumnOperandIsKMajor, cutlass::layout::ColumnMajor,
                                                cutlass::layout::RowMajor>;
using LayoutOut =
    cute::conditional_t<kSwapAb, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

using TileShape = cute::Shape<cute::Int<STONEWARE_TILE_M>, cute::Int<STONEWARE_TILE_N>,
                              cute::Int<STONEWARE_TILE_K>>;
using ClusterShape =
    cute::Shape<cute::Int<STONEWARE_CLUSTER_M>, cute::Int<STONEWARE_CLUSTER_N>, cute::_1>;

namespace fusion = cutlass::epilogue::fusion;

// Along the caller's n. A null pointer reads as zeros: one kernel serves bias or none.
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
constexpr int kOperandAlignment = 16 / sizeof(ElementOperand);
constexpr int kOutAlignment = 16 / sizeof(ElementOut);

// C does not exist: void.
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutOut, kOutAlignment,
    ElementOut, LayoutOut, kOutAlignment, Schedule::Epilogue, Biased>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementOperand, LayoutRowOperand,
    kOperandAlignment, ElementOperand, LayoutColumnOperand, kOperandAlignment, float, TileShape,
    ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule::Mainloop>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, cutlass::gemm::PersistentScheduler>;

}  // namespace stoneware::gemm::matmul_sm90
