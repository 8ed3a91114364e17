// What the families that CUTLASS's builders make have in common on both sides: a config's words as
// CUTLASS's types, and the kernel's shape for the generated sources.
//
// "Rows" and "columns" are those of the problem that CUTLASS sees: the caller's m and n, or with
// kSwapAb n and m.

#pragma once

#include <cstdint>

#include "cc/gemm/config.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace stoneware::gemm::sm90 {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kE4M3> {
  using Type = cutlass::float_e4m3_t;
};
template <>
struct ElementOf<DType::kE5M2> {
  using Type = cutlass::float_e5m2_t;
};
template <>
struct ElementOf<DType::kBF16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<DType::kFP16> {
  using Type = cutlass::half_t;
};
template <>
struct ElementOf<DType::kFP32> {
  using Type = float;
};
template <DType kDType>
using Element = typename ElementOf<kDType>::Type;

// TMA moves 16 bytes at least.
template <class T>
inline constexpr int kTmaElements = 16 / sizeof(T);

// The types that follow from a config alone.
template <class Config>
struct CutlassTypes {
  static constexpr bool kSwapAb = Config::kSwapAb;
  using RowOperand = cute::conditional_t<kSwapAb, Element<Config::kB>, Element<Config::kA>>;
  using ColumnOperand = cute::conditional_t<kSwapAb, Element<Config::kA>, Element<Config::kB>>;
  using Out = Element<Config::kOut>;

  // wgmma takes operands of 16 bits in either orientation, fp8 K-major alone.
  static constexpr bool kRowOperandIsKMajor = kSwapAb ? !Config::kBIsNMajor : !Config::kAIsMMajor;
  static constexpr bool kColumnOperandIsKMajor =
      kSwapAb ? !Config::kAIsMMajor : !Config::kBIsNMajor;
  using LayoutRowOperand = cute::conditional_t<kRowOperandIsKMajor, cutlass::layout::RowMajor,
                                               cutlass::layout::ColumnMajor>;
  using LayoutColumnOperand =
      cute::conditional_t<kColumnOperandIsKMajor, cutlass::layout::ColumnMajor,
                          cutlass::layout::RowMajor>;
  using LayoutOut =
      cute::conditional_t<kSwapAb, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

  using TileShape =
      cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  using ClusterShape =
      cute::Shape<cute::Int<Config::kClusterM>, cute::Int<Config::kClusterN>, cute::_1>;

  // Along the caller's n. A null pointer reads as zeros: one kernel serves bias or none.
  using Bias = cute::conditional_t<
      kSwapAb,
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, Out, float,
                                                  cute::Stride<cute::_1, cute::_0, std::int64_t>>,
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, Out, float,
                                                  cute::Stride<cute::_0, cute::_1, std::int64_t>>>;

  // accumulator + bias
  using Biased = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Out, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90AccFetch, Bias>;

  using EpilogueSchedule = cute::conditional_t<Config::kSchedule == Schedule::kCooperative,
                                               cutlass::epilogue::TmaWarpSpecializedCooperative,
                                               cutlass::epilogue::TmaWarpSpecialized>;

  // C does not exist: void.
  template <class Fusion>
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutOut,
      kTmaElements<Out>, Out, LayoutOut, kTmaElements<Out>, EpilogueSchedule, Fusion>::CollectiveOp;

  // LayoutRow and LayoutColumn: an operand's, or a tuple of it and its scales'.
  template <class MainloopSchedule, class LayoutRow, class LayoutColumn, class EpilogueOp>
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, RowOperand, LayoutRow,
      kTmaElements<RowOperand>, ColumnOperand, LayoutColumn, kTmaElements<ColumnOperand>, float,
      TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename EpilogueOp::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;

  template <class MainloopOp, class EpilogueOp>
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, MainloopOp, EpilogueOp,
                                           cutlass::gemm::PersistentScheduler>;
};

// CUTLASS's kernel as the generated source launches it.
template <class Cutlass>
struct CutlassKernel {
  using Params = typename Cutlass::Params;

  static constexpr int kThreads = Cutlass::MaxThreadsPerBlock;
  static constexpr int kSharedBytes = Cutlass::SharedStorageSize;
  // CUTLASS aligns what it must itself.
  static constexpr int kSharedAlignment = 1;
  static_assert(Cutlass::MinBlocksPerMultiprocessor == 1);
  static_assert(kSharedBytes <= kMaxSharedBytesSm90, "shrink the tile");

#if defined(__CUDACC__)
  static __device__ __forceinline__ void Run(const Params& params, char* shared) {
    Cutlass{}(params, shared);
  }
#endif
};

}  // namespace stoneware::gemm::sm90
