// The host side of matmul_sm90.cuh.

#pragma once

#include "cc/gemm/cutlass_host_sm90.h"
#include "cc/gemm/matmul_sm90.cuh"

namespace stoneware::gemm::sm90 {

// The most blocks of a grid along y and along z (CUDA C++ Programming Guide, technical
// specifications).
inline constexpr std::int64_t kMaxGridYZ = 65535;

template <class Config>
struct MatmulHost : CutlassHost<MatmulHost<Config>, Config, MatmulTypes<Config>> {
  using Arguments = typename MatmulTypes<Config>::Cutlass::Arguments;

  static bool Supports(const GemmProblem& problem) {
    return problem.scale_a == Scale::kNone && problem.scale_b == Scale::kNone && FitsGrid(problem);
  }

  static void SetFamilyArguments(Arguments* arguments, const GemmProblem&,
                                 const GemmTensors& tensors) {
    // The fusion's tree is accumulator + bias. A row or a column, which name the pointer
    // differently but both begin with it; its batch stride stays 0.
    arguments->epilogue.thread.op_1 = {
        static_cast<const typename MatmulTypes<Config>::Out*>(tensors.bias)};
  }

 private:
  // A persistent grid has a block per SM; the other one has its tiles along the columns in y and
  // the batch in z.
  static bool FitsGrid(const GemmProblem& problem) {
    if (Config::kSchedule != Schedule::kWarpSpecialized) return true;
    const std::int64_t columns = Config::kSwapAb ? problem.m : problem.n;
    const std::int64_t tiles = (columns + Config::kTileN - 1) / Config::kTileN;
    return tiles + Config::kClusterN - 1 <= kMaxGridYZ && problem.batch <= kMaxGridYZ;
  }
};

}  // namespace stoneware::gemm::sm90
