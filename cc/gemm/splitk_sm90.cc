// The host side of one config of splitk_sm90.cuh: tensor maps, parameters, launch.

#include "cc/gemm/splitk_sm90.cuh"

#include <cstddef>

#include "cc/driver/launch.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/host_adapter/encode_tiled.h"

#define STONEWARE_CONCATENATE_(a, b) a##b
#define STONEWARE_CONCATENATE(a, b) STONEWARE_CONCATENATE_(a, b)
#define STONEWARE_STRING_(a) #a
#define STONEWARE_STRING(a) STONEWARE_STRING_(a)

// The cubin's first byte and the byte after its last, from the generated assembler file.
#define STONEWARE_CUBIN_BEGIN STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID, _cubin_begin)
#define STONEWARE_CUBIN_END STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID, _cubin_end)
extern "C" const char STONEWARE_CUBIN_BEGIN[];
extern "C" const char STONEWARE_CUBIN_END[];

namespace stoneware::gemm::sm90 {
namespace {

// The largest cluster that every Hopper GPU takes (CUDA C++ Programming Guide, thread block
// clusters).
constexpr int kMaxCluster = 8;

int CeilDiv(int numerator, int denominator) { return (numerator - 1) / denominator + 1; }

bool IsScale(Scale scale) {
  return scale == Scale::kNone || scale == Scale::kTensor || scale == Scale::kRow;
}

bool CanImplement(const GemmProblem& problem) {
  const bool is_power_of_two = (problem.splits & (problem.splits - 1)) == 0;
  return problem.batch == 1 && problem.num_groups == 0 && IsScale(problem.scale_a) &&
         IsScale(problem.scale_b) && is_power_of_two && problem.splits * kShare <= kMaxCluster &&
         problem.splits <= CeilDiv(problem.k, kTileK) &&
         // Blocks along y (CUDA C++ Programming Guide, technical specifications).
         CeilDiv(problem.m, kColumns) <= 65535;
}

std::size_t WorkspaceBytes(const GemmProblem&) { return 0; }

void EncodeOperand(CUtensorMap* map, const void* address, int extent, int k, std::int64_t ld,
                   int box_extent) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(extent)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * kOperandBytes};
  const cuuint32_t box[] = {kChunkElements, static_cast<cuuint32_t>(box_extent)};
  const cuuint32_t element_strides[] = {1, 1};
  host_adapter::EncodeTiledOrThrow(
      map, dtype::STONEWARE_A::kTensorMapType, 2, const_cast<void*>(address), dims, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
            CUstream stream) {
  Params params;
  EncodeOperand(&params.row_map, tensors.b, problem.n, problem.k, problem.ldb, kRows);
  EncodeOperand(&params.column_map, tensors.a, problem.m, problem.k, problem.lda,
                kLoadedColumns);
  params.d = tensors.d;
  params.row_scale = problem.scale_b == Scale::kNone ? nullptr : tensors.scale_b;
  params.column_scale = problem.scale_a == Scale::kNone ? nullptr : tensors.scale_a;
  params.bias = tensors.bias;
  params.ldd = problem.ldd;
  params.m = problem.m;
  params.n = problem.n;
  params.num_k_tiles = CeilDiv(problem.k, kTileK);
  params.row_scale_stride = problem.scale_b == Scale::kRow;
  params.column_scale_stride = problem.scale_a == Scale::kRow;

  void* parameters[] = {&params};
  const auto splits = static_cast<unsigned>(problem.splits);
  const auto num_clusters = static_cast<unsigned>(CeilDiv(CeilDiv(problem.n, kRows), kShare));
  driver::Launch(driver::DriverApi::Get(), function,
                 {{num_clusters * kShare * splits,
                   static_cast<unsigned>(CeilDiv(problem.m, kColumns)), 1},
                  {kShare * splits, 1, 1},
                  {kThreads, 1, 1},
                  SharedLayout::kBytes},
                 stream, parameters);
}

}  // namespace
}  // namespace stoneware::gemm::sm90

extern "C" const stoneware::gemm::KernelEntry STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID,
                                                                    _entry) = {
    STONEWARE_STRING(STONEWARE_KERNEL_ID),
    STONEWARE_STRING(STONEWARE_OP),
    "sm_90a",
    STONEWARE_CUBIN_BEGIN,
    STONEWARE_CUBIN_END,
    sizeof(stoneware::gemm::sm90::Params),
    stoneware::gemm::sm90::SharedLayout::kBytes,
    stoneware::gemm::sm90::kThreads,
    /*swap_ab=*/true,
    /*a_is_m_major=*/false,
    /*b_is_n_major=*/false,
    stoneware::gemm::sm90::kOperandBytes,
    stoneware::gemm::sm90::kOutBytes,
    &stoneware::gemm::sm90::CanImplement,
    &stoneware::gemm::sm90::WorkspaceBytes,
    &stoneware::gemm::sm90::Launch,
};
