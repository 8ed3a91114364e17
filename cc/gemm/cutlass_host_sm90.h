// The host side that the families of CUTLASS's builders share: a problem becomes the kernel's
// Params, by CUTLASS's own host code, and is launched through a CudaHostAdapter.
//
// Compiled as CUDA for the host alone (cuda_library), so that both sides see the same Params.

#pragma once

// All widths of wgmma: without it a tile of 160 columns is computed by five of 32, another kernel.
// The device side has it where the width needs it; other widths are the same kernel with it and
// without.
#if !defined(CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif

#include <cstddef>

#include "cc/gemm/cutlass_kernel_sm90.cuh"
#include "cc/gemm/kernel_entry.h"
#include "cc/host_adapter/driver_host_adapter.h"

namespace stoneware::gemm::sm90 {

using RasterOption = cutlass::gemm::kernel::detail::RasterOrderOptions;

template <bool kSwapAb>
RasterOption ToCutlass(Raster raster) {
  switch (raster) {
    case Raster::kHeuristic:
      return RasterOption::Heuristic;
    case Raster::kAlongM:
      return kSwapAb ? RasterOption::AlongN : RasterOption::AlongM;
    case Raster::kAlongN:
      return kSwapAb ? RasterOption::AlongM : RasterOption::AlongN;
  }
  return RasterOption::Heuristic;
}

// `Family` derives from it and adds
//   static bool Supports(const GemmProblem&), what CUTLASS does not know of, and
//   static void SetFamilyArguments(Arguments*, const GemmProblem&, const GemmTensors&).
// `Types` is a CutlassTypes<Config> with a Cutlass.
template <class Family, class Config, class Types>
struct CutlassHost {
  using Cutlass = typename Types::Cutlass;
  using Arguments = typename Cutlass::Arguments;

  static constexpr std::size_t kParameterBytes = sizeof(typename Cutlass::Params);
  static constexpr std::size_t kOpenParameterBytes = 0;
  static constexpr unsigned kSharedBytes = CutlassKernel<Cutlass>::kSharedBytes;
  static constexpr unsigned kThreads = CutlassKernel<Cutlass>::kThreads;
  static constexpr bool kSwapAb = Config::kSwapAb;

  static bool CanImplement(const GemmProblem& problem) {
    if (problem.num_groups != 0 || problem.splits != 1 || problem.accumulate ||
        !Family::Supports(problem)) {
      return false;
    }
    const Arguments arguments = ToArguments(problem, {});
    return Cutlass::can_implement(arguments) && Cutlass::get_workspace_size(arguments) == 0;
  }

  static std::size_t WorkspaceBytes(const GemmProblem&) { return 0; }

  static void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
                     CUstream stream) {
    const host_adapter::DriverHostAdapter adapter(driver::DriverApi::Get(), function);
    typename Cutlass::Params params =
        Cutlass::to_underlying_arguments(ToArguments(problem, tensors), /*workspace=*/nullptr);
    void* parameters[] = {&params};
    // Cannot return an error: the adapter throws if the driver refuses, and no fallback cluster
    // is passed, which it would not support.
    adapter.launch(Cutlass::get_grid_shape(params), dim3(Config::kClusterM, Config::kClusterN, 1),
                   Cutlass::get_block_shape(), Cutlass::SharedStorageSize, stream, parameters,
                   /*kernel_index=*/0);
  }

 private:
  static Arguments ToArguments(const GemmProblem& problem, const GemmTensors& tensors) {
    const int rows = kSwapAb ? problem.n : problem.m;
    const int columns = kSwapAb ? problem.m : problem.n;

    Arguments arguments{};
    arguments.mode = problem.batch == 1 ? cutlass::gemm::GemmUniversalMode::kGemm
                                        : cutlass::gemm::GemmUniversalMode::kBatched;
    arguments.problem_shape = {rows, columns, problem.k, problem.batch};

    const void* row_operand = kSwapAb ? tensors.b : tensors.a;
    const void* column_operand = kSwapAb ? tensors.a : tensors.b;
    arguments.mainloop.ptr_A = static_cast<const typename Types::RowOperand*>(row_operand);
    arguments.mainloop.ptr_B = static_cast<const typename Types::ColumnOperand*>(column_operand);
    // The strides of an operand are those of (its outer extent, k, batch); the one of its
    // contiguous dimension is a constant.
    cute::get<Types::kRowOperandIsKMajor ? 0 : 1>(arguments.mainloop.dA) =
        kSwapAb ? problem.ldb : problem.lda;
    cute::get<Types::kColumnOperandIsKMajor ? 0 : 1>(arguments.mainloop.dB) =
        kSwapAb ? problem.lda : problem.ldb;
    cute::get<2>(arguments.mainloop.dA) = kSwapAb ? problem.batch_stride_b : problem.batch_stride_a;
    cute::get<2>(arguments.mainloop.dB) = kSwapAb ? problem.batch_stride_a : problem.batch_stride_b;

    // d is contiguous along the caller's n: along columns, or with kSwapAb along rows.
    arguments.epilogue.ptr_D = static_cast<typename Types::Out*>(tensors.d);
    cute::get<kSwapAb ? 1 : 0>(arguments.epilogue.dD) = problem.ldd;
    cute::get<2>(arguments.epilogue.dD) = problem.batch_stride_d;

    arguments.hw_info.device_id = problem.device;
    arguments.hw_info.sm_count = problem.num_sms;
    arguments.scheduler.max_swizzle_size = problem.max_swizzle;
    arguments.scheduler.raster_order = ToCutlass<kSwapAb>(problem.raster);
    Family::SetFamilyArguments(&arguments, problem, tensors);
    return arguments;
  }
};

}  // namespace stoneware::gemm::sm90
