// fp8 matrix product with scales for Hopper, one instance for each config.
//
//   d[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias[n]
//
//   tensor    shape           stride                 dtype
//   a         [m, k]          [lda, 1]               Config::kA (fp8)
//   b         [k, n]          [1, ldb]               Config::kB (fp8)
//   d         [m, n]          [ldd, 1]               Config::kOut (bf16, fp16 or fp32)
//   scale_a   [m] or scalar   [1] or [0]             fp32
//   scale_b   [n] or scalar   [1] or [0]             fp32
//   bias      [n] or null     [1]                    Config::kOut
//
// The accumulator is fp32. With kFastAccumulation the tensor core sums over all of k, in
// the some 14 bits that it keeps of a sum; without, each 128 of k are added to a second set of
// registers in full fp32. Scales and bias are applied in fp32.
//
// The grid covers output tiles of kTileM x kTileN. With the pingpong and
// cooperative schedules it is persistent, at most one block per SM, each walking over tiles; with
// warpspecialized it has a block per tile, and swizzle and raster order mean nothing. Blocks of a
// cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads in flight while the other warp groups run wgmma, and
// with kSwapAb it computes d^T = b^T a^T, so that a small m takes the side of the tile
// that may be as narrow as 8 (wgmma's n), where m would be padded to 64.
//
// Beside what every config has (config.h): kClusterM, kClusterN, kSchedule (kPingpong, kCooperative
// or kWarpSpecialized) and kFastAccumulation.

#pragma once

#include "cc/gemm/cutlass_kernel_sm90.cuh"

namespace stoneware::gemm::sm90 {

template <Schedule kSchedule, bool kFastAccumulation>
struct Fp8Mainloop;
template <>
struct Fp8Mainloop<Schedule::kWarpSpecialized, true> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
};
template <>
struct Fp8Mainloop<Schedule::kWarpSpecialized, false> {
  using Type = cutlass::gemm::KernelTmaWarpSpecialized;
};
template <>
struct Fp8Mainloop<Schedule::kPingpong, true> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
};
template <>
struct Fp8Mainloop<Schedule::kPingpong, false> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
};
template <>
struct Fp8Mainloop<Schedule::kCooperative, true> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
};
template <>
struct Fp8Mainloop<Schedule::kCooperative, false> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

template <class Config>
struct ScaledMmTypes : CutlassTypes<Config> {
  using Base = CutlassTypes<Config>;
  using typename Base::Bias;
  using typename Base::Out;
  using typename Base::TileShape;

  template <template <class> class Operation, class Output>
  using Compute =
      cutlass::epilogue::fusion::Sm90Compute<Operation, Output, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>;

  // A stride of bool makes vector or scalar a choice of the launch: one kernel serves both.
  using RowScale =
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float, float,
                                                  cute::Stride<bool, cute::_0, std::int64_t>>;
  using ColumnScale =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float, float,
                                                  cute::Stride<cute::_0, bool, std::int64_t>>;

  // scale_b * (scale_a * accumulator) + bias, in this order for every config and as in
  // persistent_mm_store_sm90.cuh: a row's bits do not depend on which kernel computes it.
  using ScaleOfA = cute::conditional_t<Config::kSwapAb, ColumnScale, RowScale>;
  using ScaleOfB = cute::conditional_t<Config::kSwapAb, RowScale, ColumnScale>;
  using ScaledAccumulator =
      cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::multiplies, float>, ScaleOfA,
                                         cutlass::epilogue::fusion::Sm90AccFetch>;
  using ScaledAndBiased =
      cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, Out>, ScaleOfB,
                                         ScaledAccumulator, Bias>;

  using Epilogue = typename Base::template Epilogue<ScaledAndBiased>;
  using Mainloop = typename Base::template Mainloop<
      typename Fp8Mainloop<Config::kSchedule, Config::kFastAccumulation>::Type,
      typename Base::LayoutRowOperand, typename Base::LayoutColumnOperand, Epilogue>;
  using Cutlass = typename Base::template Kernel<Mainloop, Epilogue>;
};

template <class Config>
struct ScaledMmKernel : CutlassKernel<typename ScaledMmTypes<Config>::Cutlass> {};

}  // namespace stoneware::gemm::sm90
