// The host side of one config: turns a problem into the kernel's parameters and launches it.
// Compiled by nvcc (-x cu) with the defines of the config, as its cubin is, so that both sides see
// the same Params.

#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/scaled_mm_block_sm90.cuh"
#include "cc/host_adapter/driver_host_adapter.h"

#define STONEWARE_CONCATENATE_(a, b) a##b
#define STONEWARE_CONCATENATE(a, b) STONEWARE_CONCATENATE_(a, b)
#define STONEWARE_STRING_(a) #a
#define STONEWARE_STRING(a) STONEWARE_STRING_(a)

// The cubin's first byte and the byte after its last, from the generated assembler file.
#define STONEWARE_CUBIN_BEGIN STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID, _cubin_begin)
#define STONEWARE_CUBIN_END STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID, _cubin_end)
extern "C" const char STONEWARE_CUBIN_BEGIN[];
extern "C" const char STONEWARE_CUBIN_END[];

namespace stoneware::gemm::sm90_block {
namespace {

using RasterOption = cutlass::gemm::kernel::detail::RasterOrderOptions;

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

RowwiseScales LayoutOfScaleA(const GemmProblem& problem) {
  const int blocks_of_k = problem.k / kScaleBlock;
  return cute::make_layout(
      cute::make_shape(cute::make_shape(cute::_1{}, problem.m),
                       cute::make_shape(cute::Int<kScaleBlock>{}, blocks_of_k), 1),
      cute::make_stride(cute::make_stride(cute::_0{}, problem.scale_a_stride_m),
                        cute::make_stride(cute::_0{}, problem.ld_scale_a), std::int64_t{0}));
}

BlockwiseScales LayoutOfScaleB(const GemmProblem& problem) {
  const int blocks_of_k = problem.k / kScaleBlock;
  const int blocks_of_n = (problem.n - 1) / kScaleBlock + 1;
  return cute::make_layout(
      cute::make_shape(
          cute::make_shape(cute::Int<kGranularity>{},
                           cute::make_shape(cute::Int<kTilesPerBlock>{}, blocks_of_n)),
          cute::make_shape(cute::Int<kScaleBlock>{}, blocks_of_k), 1),
      cute::make_stride(
          cute::make_stride(cute::_0{}, cute::make_stride(cute::_0{}, problem.scale_b_stride_n)),
          cute::make_stride(cute::_0{}, problem.ld_scale_b), std::int64_t{0}));
}

Kernel::Arguments ToArguments(const GemmProblem& problem, const GemmTensors& tensors) {
  const int rows = kSwapAb ? problem.n : problem.m;
  const int columns = kSwapAb ? problem.m : problem.n;

  Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {rows, columns, problem.k, 1};

  // The stride between batches is never used: there is one.
  const void* row_operand = kSwapAb ? tensors.b : tensors.a;
  const void* column_operand = kSwapAb ? tensors.a : tensors.b;
  arguments.mainloop.ptr_A = static_cast<const ElementRowOperand*>(row_operand);
  arguments.mainloop.ptr_B = static_cast<const ElementColumnOperand*>(column_operand);
  cute::get<0>(arguments.mainloop.dA) = kSwapAb ? problem.ldb : problem.lda;
  cute::get<0>(arguments.mainloop.dB) = kSwapAb ? problem.lda : problem.ldb;
  arguments.mainloop.ptr_SFA = kSwapAb ? tensors.scale_b : tensors.scale_a;
  arguments.mainloop.ptr_SFB = kSwapAb ? tensors.scale_a : tensors.scale_b;
  const auto layouts = cute::make_tuple(LayoutOfScaleA(problem), LayoutOfScaleB(problem));
  arguments.mainloop.layout_SFA = cute::get<kSwapAb ? 1 : 0>(layouts);
  arguments.mainloop.layout_SFB = cute::get<kSwapAb ? 0 : 1>(layouts);

  // d is contiguous along the caller's n: along columns, or with kSwapAb along rows.
  arguments.epilogue.ptr_D = static_cast<ElementOut*>(tensors.d);
  cute::get<kSwapAb ? 1 : 0>(arguments.epilogue.dD) = problem.ldd;
  // A row or a column, which name the pointer differently but both begin with it.
  arguments.epilogue.thread.op_1 = {static_cast<const ElementOut*>(tensors.bias)};

  arguments.hw_info.device_id = problem.device;
  arguments.hw_info.sm_count = problem.num_sms;
  arguments.scheduler.max_swizzle_size = problem.max_swizzle;
  arguments.scheduler.raster_order = ToCutlass(problem.raster);
  return arguments;
}

bool CanImplement(const GemmProblem& problem) {
  return problem.batch == 1 && problem.num_groups == 0 && problem.splits == 1 &&
         problem.scale_a == Scale::kBlock1x128 && problem.scale_b == Scale::kBlock128x128 &&
         problem.k % kScaleBlock == 0 && Kernel::can_implement(ToArguments(problem, {}));
}

std::size_t WorkspaceBytes(const GemmProblem& problem) {
  return Kernel::get_workspace_size(ToArguments(problem, {}));
}

void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
            CUstream stream) {
  const host_adapter::DriverHostAdapter adapter(driver::DriverApi::Get(), function);
  Kernel::Params params =
      Kernel::to_underlying_arguments(ToArguments(problem, tensors), tensors.workspace);
  void* parameters[] = {&params};
  // Cannot return an error: the adapter throws where the driver refuses, and there is no fallback
  // cluster that it would not support.
  adapter.launch(Kernel::get_grid_shape(params),
                 dim3(STONEWARE_CLUSTER_M, STONEWARE_CLUSTER_N, 1), Kernel::get_block_shape(),
                 Kernel::SharedStorageSize, stream, parameters, /*kernel_index=*/0);
}

}  // namespace
}  // namespace stoneware::gemm::sm90_block

extern "C" const stoneware::gemm::KernelEntry STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID,
                                                                    _entry) = {
    STONEWARE_STRING(STONEWARE_KERNEL_ID),
    "scaled_mm",
    stoneware::gemm::sm90_block::kArch,
    STONEWARE_CUBIN_BEGIN,
    STONEWARE_CUBIN_END,
    sizeof(stoneware::gemm::sm90_block::Kernel::Params),
    stoneware::gemm::sm90_block::Kernel::SharedStorageSize,
    stoneware::gemm::sm90_block::Kernel::MaxThreadsPerBlock,
    stoneware::gemm::sm90_block::kSwapAb,
    /*a_is_m_major=*/false,
    /*b_is_n_major=*/false,
    sizeof(stoneware::gemm::sm90_block::ElementRowOperand),
    sizeof(stoneware::gemm::sm90_block::ElementOut),
    &stoneware::gemm::sm90_block::CanImplement,
    &stoneware::gemm::sm90_block::WorkspaceBytes,
    &stoneware::gemm::sm90_block::Launch,
};
