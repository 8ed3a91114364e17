// The host side of scaled_mm_sm90.cuh.

#pragma once

#include "cc/gemm/cutlass_host_sm90.h"
#include "cc/gemm/scaled_mm_sm90.cuh"

namespace stoneware::gemm::sm90 {

template <class Config>
struct ScaledMmHost : CutlassHost<ScaledMmHost<Config>, Config, ScaledMmTypes<Config>> {
  using Arguments = typename ScaledMmTypes<Config>::Cutlass::Arguments;
  static constexpr bool kSwapAb = Config::kSwapAb;

  template <bool kFirst, class First, class Second>
  static auto& Select(First& first, Second& second) {
    if constexpr (kFirst) {
      return first;
    } else {
      return second;
    }
  }

  static bool IsTensorOrRow(Scale scale) { return scale == Scale::kTensor || scale == Scale::kRow; }

  static bool Supports(const GemmProblem& problem) {
    return problem.batch == 1 && IsTensorOrRow(problem.scale_a) && IsTensorOrRow(problem.scale_b);
  }

  static void SetFamilyArguments(Arguments* arguments, const GemmProblem& problem,
                                 const GemmTensors& tensors) {
    // The fusion's tree is scale_b * (scale_a * accumulator) + bias, its operands in order.
    auto& fusion = arguments->epilogue.thread;
    auto& scale_a = fusion.op_1.op_0;
    auto& scale_b = fusion.op_0;
    auto& row_scale = Select<kSwapAb>(scale_b, scale_a);
    auto& column_scale = Select<kSwapAb>(scale_a, scale_b);
    row_scale.ptr_col = static_cast<const float*>(kSwapAb ? tensors.scale_b : tensors.scale_a);
    cute::get<0>(row_scale.dCol) = (kSwapAb ? problem.scale_b : problem.scale_a) == Scale::kRow;
    column_scale.ptr_row = static_cast<const float*>(kSwapAb ? tensors.scale_a : tensors.scale_b);
    cute::get<1>(column_scale.dRow) = (kSwapAb ? problem.scale_a : problem.scale_b) == Scale::kRow;
    // A row or a column, which name the pointer differently but both begin with it.
    fusion.op_2 = {static_cast<const typename ScaledMmTypes<Config>::Out*>(tensors.bias)};
  }
};

}  // namespace stoneware::gemm::sm90
