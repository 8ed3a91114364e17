// The host side of one config: turns a problem into the kernel's parameters and launches it.
// Compiled by nvcc (-x cu) with the defines of the config, as its cubin is, so that both sides see
// the same Params.

#include "cc/gemm/grouped_mm_sm90.cuh"

#include <algorithm>
#include <limits>

#include "cc/driver/driver_api.h"
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

namespace map_type {
[[maybe_unused]] constexpr CUtensorMapDataType e4m3 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
[[maybe_unused]] constexpr CUtensorMapDataType bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
[[maybe_unused]] constexpr CUtensorMapDataType fp16 = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}  // namespace map_type

// Tiles along m that share one tile of b before the next n is taken, at max_swizzle 1: with 132 SMs
// some 16 x 8 tiles run at once, whose operands are few.
constexpr int kBand = 16;

// The most tiles that any offsets give: each group wastes less than one tile along m, and one
// without rows has none.
std::int64_t MaxTiles(const GemmProblem& problem) {
  const std::int64_t m = problem.m;
  const std::int64_t m_tiles = std::min(m, m / kTileM + problem.num_groups);
  return m_tiles * NumTiles(problem.n, kTileN);
}

bool CanImplement(const GemmProblem& problem) {
  const bool has_scales = problem.scale_a != Scale::kNone;
  const Scale scale = has_scales ? Scale::kRow : Scale::kNone;
  return problem.batch == 1 && problem.num_groups >= 1 && problem.num_groups <= kMaxGroups &&
         problem.splits == 1 && problem.scale_a == scale && problem.scale_b == scale &&
         // Tile counts and the coordinates of tiles that reach over an end are ints.
         MaxTiles(problem) <= std::numeric_limits<int>::max() / 2 &&
         problem.m <= std::numeric_limits<int>::max() / 2 &&
         problem.n <= std::numeric_limits<int>::max() / 2 &&
         problem.k <= std::numeric_limits<int>::max() / 2;
}

std::size_t WorkspaceBytes(const GemmProblem&) { return 0; }

// The map of an operand of num_rows rows of k, num_groups times (rank 3), or once (rank 2).
void EncodeMap(CUtensorMap* map, const void* address, int k, int num_rows,
               std::int64_t row_stride, int box_rows, int num_groups, std::int64_t group_stride,
               cuuint32_t rank) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(num_rows),
                                static_cast<cuuint64_t>(num_groups)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * kOperandBytes,
                                static_cast<cuuint64_t>(group_stride) * kOperandBytes};
  const cuuint32_t box[] = {kSlabK, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  // It returns nothing but success.
  host_adapter::EncodeTiledByMemo(
      map, map_type::STONEWARE_OPERAND, rank, const_cast<void*>(address), extents, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
            CUstream stream) {
  Params params{};
  EncodeMap(kSwapAb ? &params.columns : &params.rows, tensors.a, problem.k, problem.m,
            problem.lda, kTileM, /*num_groups=*/1, /*group_stride=*/0, /*rank=*/2);
  EncodeMap(kSwapAb ? &params.rows : &params.columns, tensors.b, problem.k, problem.n,
            problem.ldb, kTileN, problem.num_groups, problem.batch_stride_b, /*rank=*/3);
  const bool has_scales = problem.scale_a != Scale::kNone;
  params.d = tensors.d;
  params.scale_a = has_scales ? tensors.scale_a : nullptr;
  params.scale_b = has_scales ? tensors.scale_b : nullptr;
  params.offsets = tensors.offsets;
  params.ldd = problem.ldd;
  params.m = problem.m;
  params.n = problem.n;
  params.k = problem.k;
  params.num_groups = problem.num_groups;
  params.band = kBand * problem.max_swizzle;

  const auto num_blocks = static_cast<unsigned>(
      std::min<std::int64_t>(problem.num_sms, MaxTiles(problem)));
  void* parameters[] = {&params};
  driver::Launch(driver::DriverApi::Get(), function,
                 {{num_blocks, 1, 1}, {1, 1, 1}, {kNumThreads, 1, 1}, kSharedBytes}, stream,
                 parameters);
}

}  // namespace
}  // namespace stoneware::gemm::sm90

extern "C" const stoneware::gemm::KernelEntry STONEWARE_CONCATENATE(STONEWARE_KERNEL_ID,
                                                                    _entry) = {
    STONEWARE_STRING(STONEWARE_KERNEL_ID),
    "grouped_mm",
    stoneware::gemm::sm90::kArch,
    STONEWARE_CUBIN_BEGIN,
    STONEWARE_CUBIN_END,
    sizeof(stoneware::gemm::sm90::Params),
    stoneware::gemm::sm90::kSharedBytes,
    stoneware::gemm::sm90::kNumThreads,
    stoneware::gemm::sm90::kSwapAb,
    /*a_is_m_major=*/false,
    /*b_is_n_major=*/false,
    stoneware::gemm::sm90::kOperandBytes,
    stoneware::gemm::sm90::kOutBytes,
    &stoneware::gemm::sm90::CanImplement,
    &stoneware::gemm::sm90::WorkspaceBytes,
    &stoneware::gemm::sm90::Launch,
};
