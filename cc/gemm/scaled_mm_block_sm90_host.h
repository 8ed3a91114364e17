// The host side of scaled_mm_block_sm90.cuh.

#pragma once

#include "cc/gemm/cutlass_host_sm90.h"
#include "cc/gemm/scaled_mm_block_sm90.cuh"

namespace stoneware::gemm::sm90 {

template <class Config>
struct ScaledMmBlockHost
    : CutlassHost<ScaledMmBlockHost<Config>, Config, ScaledMmBlockTypes<Config>> {
  using Types = ScaledMmBlockTypes<Config>;
  using Arguments = typename Types::Cutlass::Arguments;
  static constexpr bool kSwapAb = Config::kSwapAb;

  static bool Supports(const GemmProblem& problem) {
    return problem.batch == 1 && problem.scale_a == Scale::kBlock1x128 &&
           problem.scale_b == Scale::kBlock128x128 && problem.k % kScaleBlock == 0;
  }

  static void SetFamilyArguments(Arguments* arguments, const GemmProblem& problem,
                                 const GemmTensors& tensors) {
    const auto* scale_a = static_cast<const float*>(tensors.scale_a);
    const auto* scale_b = static_cast<const float*>(tensors.scale_b);
    arguments->mainloop.ptr_SFA = kSwapAb ? scale_b : scale_a;
    arguments->mainloop.ptr_SFB = kSwapAb ? scale_a : scale_b;
    const auto layouts = cute::make_tuple(LayoutOfScaleA(problem), LayoutOfScaleB(problem));
    arguments->mainloop.layout_SFA = cute::get<kSwapAb ? 1 : 0>(layouts);
    arguments->mainloop.layout_SFB = cute::get<kSwapAb ? 0 : 1>(layouts);
    // A row or a column, which name the pointer differently but both begin with it.
    arguments->epilogue.thread.op_1 = {static_cast<const typename Types::Out*>(tensors.bias)};
  }

 private:
  static RowwiseScales LayoutOfScaleA(const GemmProblem& problem) {
    const int blocks_of_k = problem.k / kScaleBlock;
    return cute::make_layout(
        cute::make_shape(cute::make_shape(cute::_1{}, problem.m),
                         cute::make_shape(cute::Int<kScaleBlock>{}, blocks_of_k), 1),
        cute::make_stride(cute::make_stride(cute::_0{}, problem.scale_a_stride_m),
                          cute::make_stride(cute::_0{}, problem.ld_scale_a), std::int64_t{0}));
  }

  static typename Types::ScalesOfB LayoutOfScaleB(const GemmProblem& problem) {
    using Scales = BlockwiseScales<Config>;
    const int blocks_of_k = problem.k / kScaleBlock;
    const int blocks_of_n = (problem.n - 1) / kScaleBlock + 1;
    return cute::make_layout(
        cute::make_shape(
            cute::make_shape(cute::Int<Scales::kGranularity>{},
                             cute::make_shape(cute::Int<Scales::kTilesPerBlock>{}, blocks_of_n)),
            cute::make_shape(cute::Int<kScaleBlock>{}, blocks_of_k), 1),
        cute::make_stride(
            cute::make_stride(cute::_0{}, cute::make_stride(cute::_0{}, problem.scale_b_stride_n)),
            cute::make_stride(cute::_0{}, problem.ld_scale_b), std::int64_t{0}));
  }
};

}  // namespace stoneware::gemm::sm90
