// The host side of one config: turns a problem into the kernel's parameters and launches it.
// Compiled by nvcc (-x cu) with the defines of the config, as its cubin is, so that both sides see
// the same Params.

#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/matmul_sm90.cuh"
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

namespace stoneware::gemm::matmul_sm90 {
namespace {

using RasterOption = cutlass::gemm::kernel::detail::RasterOrderOptions;

// Of a grid along y and z (CUDA C++ Programming Guide, technical specifications).
constexpr std::int64_t kMaxGridYZ = 65535;

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

Kernel::Arguments ToArguments(const GemmProblem& problem, const GemmTensors& tensors) {
  const int rows = kSwapAb ? problem.n : problem.m;
  const int columns = kSwapAb ? problem.m : problem.n;

  Kernel::Arguments arguments{};
  arguments.mode = problem.batch == 1 ? cutlass::gemm::GemmUniversalMode::kGemm
                                      : cutlass::gemm::GemmUniversalMode::kBatched;
  arguments.problem_shape = {rows, columns, problem.k, problem.batch};

  const void* row_operand = kSwapAb ? tensors.b : tensors.a;
  const void* column_operand = kSwapAb ? tensors.a : tensors.b;
  arguments.mainloop.ptr_A = static_cast<const ElementOperand*>(row_operand);
  arguments.mainloop.ptr_B = static_cast<const ElementOperand*>(column_operand);
  // The strides of an operand are those of (its outer extent, k, batch); the one of its contiguous
  // dimension is a constant.
  cute::get<kRowOperandIsKMajor ? 0 : 1>(arguments.mainloop.dA) =
      kSwapAb ? problem.ldb : problem.lda;
  cute::get<kColumnOperandIsKMajor ? 0 : 1>(arguments.mainloop.dB) =
      kSwapAb ? problem.lda : problem.ldb;
  cute::get<2>(arguments.mainloop.dA) = kSwapAb ? problem.batch_stride_b : problem.batch_stride_a;
  cute::get<2>(arguments.mainloop.dB) = kSwapAb ? problem.batch_stride_a : problem.batch_stride_b;

  // d is contiguous along the caller's n: along columns, or with kSwapAb along rows.
  arguments.epilogue.ptr_D = static_cast<ElementOut*>(tensors.d);
  cute::get<kSwapAb ? 1 : 0>(arguments.epilogue.dD) = problem.ldd;
  cute::get<2>(arguments.epilogue.dD) = problem.batch_stride_d;

  // The fusion's tree is accumulator + bias. A row or a column, which name the pointer differently
  // but both begin with it; its batch stride stays 0.
  arguments.epilogue.thread.op_1 = {static_cast<const ElementOut*>(tensors.bias)};

  arguments.hw_info.device_id = problem.device;
  arguments.hw_info.sm_count = problem.num_sms;
  arguments.scheduler.max_swizzle_size = problem.max_swizzle;
  arguments.scheduler.raster_order = ToCutlass(problem.raster);
  return arguments;
}

// A persistent grid has a block per SM; the other one has its tiles along the columns in y and the
// batch in z.
bool FitsGrid(const GemmProblem& problem) {
  if (kIsPersistent) return true;
  const std::int64_t columns = kSwapAb ? problem.m : problem.n;
  const std::int64_t tiles = (columns + STONEWARE_TILE_N - 1) / STONEWARE_TILE_N;
  return tiles + STONEWARE_CLUSTER_N - 1 <= kMaxGridYZ && problem.batch <= kMaxGridYZ;
}

bool CanImplement(const GemmProblem& problem) {
  return problem.num_groups == 0 && problem.splits == 1 && problem.scale_a == Scale::kNone &&
         problem.scale_b == Scale::kNone && FitsGrid(problem) &&
         Kernel::can_implement(ToArguments(problem, {}));
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
}  // namespace stoneware::gemm::matmul_sm90

extern "C" const stoneware::gemm::KernelEntry STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID,
                                                                    _entry) = {
    STONEWARE_STRING(STONEWARE_KERNEL_ID),
    "matmul",
    stoneware::gemm::matmul_sm90::kArch,
    STONEWARE_CUBIN_BEGIN,
    STONEWARE_CUBIN_END,
    sizeof(stoneware::gemm::matmul_sm90::Kernel::Params),
    stoneware::gemm::matmul_sm90::Kernel::SharedStorageSize,
    stoneware::gemm::matmul_sm90::Kernel::MaxThreadsPerBlock,
    stoneware::gemm::matmul_sm90::kSwapAb,
    stoneware::gemm::matmul_sm90::kAIsMMajor,
    stoneware::gemm::matmul_sm90::kBIsNMajor,
    sizeof(stoneware::gemm::matmul_sm90::ElementOperand),
    sizeof(stoneware::gemm::matmul_sm90::ElementOut),
    &stoneware::gemm::matmul_sm90::CanImplement,
    &stoneware::gemm::matmul_sm90::WorkspaceBytes,
    &stoneware::gemm::matmul_sm90::Launch,
};
