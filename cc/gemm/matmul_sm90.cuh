// bf16 and fp16 matrix product for Hopper, one instance for each config.
//
//   d[i, m, n] = sum_k a[i, m, k] * b[i, k, n] + bias[n]
//
//   tensor  shape         stride                                            dtype
//   a       [batch, m, k] [batch_stride_a, lda, 1], or with                 Config::kA
//                         kAIsMMajor [batch_stride_a, 1, lda]
//   b       [batch, k, n] [batch_stride_b, 1, ldb], or with                 Config::kB, as a's
//                         kBIsNMajor [batch_stride_b, ldb, 1]
//   d       [batch, m, n] [batch_stride_d, ldd, 1]                          Config::kOut
//   bias    [n] or null   [1]                                               Config::kOut
//
// kA is bf16 or fp16, kOut the same or fp32. A batch stride of 0 is one
// operand for every product. The accumulator is fp32; the bias is added to it before it is rounded.
//
// The grid covers output tiles of kTileM x kTileN of every product of the batch.
// With the pingpong and cooperative schedules it is persistent, at most one block per SM, each
// walking over tiles; with warpspecialized it has a block per tile, and swizzle and raster order
// mean nothing. Blocks of a cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads in flight while the other warp groups run wgmma,
// which takes 16-bit operands of either orientation from shared memory, so no layout needs a
// transposed copy. With kSwapAb it computes d^T = b^T a^T, so that a small m takes the
// side of the tile that may be as narrow as 8 (wgmma's n), where m would be padded to 64.
//
// Beside what every config has (config.h): kClusterM, kClusterN and kSchedule (kPingpong,
// kCooperative or kWarpSpecialized).

#pragma once

#include "cc/gemm/cutlass_kernel_sm90.cuh"

namespace stoneware::gemm::sm90 {

template <Schedule kSchedule>
struct MatmulMainloop;
template <>
struct MatmulMainloop<Schedule::kWarpSpecialized> {
  using Type = cutlass::gemm::KernelTmaWarpSpecialized;
};
template <>
struct MatmulMainloop<Schedule::kPingpong> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
};
template <>
struct MatmulMainloop<Schedule::kCooperative> {
  using Type = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

template <class Config>
struct MatmulTypes : CutlassTypes<Config> {
  using Base = CutlassTypes<Config>;
  static_assert(Config::kA == Config::kB);

  using Epilogue = typename Base::template Epilogue<typename Base::Biased>;
  using Mainloop =
      typename Base::template Mainloop<typename MatmulMainloop<Config::kSchedule>::Type,
                                       typename Base::LayoutRowOperand,
                                       typename Base::LayoutColumnOperand, Epilogue>;
  using Cutlass = typename Base::template Kernel<Mainloop, Epilogue>;
};

template <class Config>
struct MatmulKernel : CutlassKernel<typename MatmulTypes<Config>::Cutlass> {};

}  // namespace stoneware::gemm::sm90
