// The host side of one config of splitk_sm90.cuh: tensor maps, parameters, launch.

#include "cc/gemm/splitk_sm90.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

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

int CeilDiv(int numerator, int denominator) { return (numerator - 1) / denominator + 1; }

// What a block has of an SM's 228 KiB of shared memory, and 1 KiB that the system takes (CUDA C++
// Programming Guide, compute capability 9.0).
constexpr int kBlocksPerSm = 228 * 1024 / (SharedLayout::kBytes + 1024);

// Rows of a that are gone through for all n before the next: a's share of L2, and tiles enough for
// all SMs.
constexpr int kBandM = 2048;

bool HasScales(const GemmProblem& problem) {
  const auto is_plain = [](Scale scale) {
    return scale == Scale::kNone || scale == Scale::kTensor || scale == Scale::kRow;
  };
  return kBlockScales ? problem.scale_a == Scale::kBlock1x128 &&
                            problem.scale_b == Scale::kBlock128x128
                      : is_plain(problem.scale_a) && is_plain(problem.scale_b);
}

bool CanImplement(const GemmProblem& problem) {
  const bool is_power_of_two = (problem.splits & (problem.splits - 1)) == 0;
  const std::int64_t num_tiles = std::int64_t{CeilDiv(problem.m, kTileM)} *
                                 CeilDiv(problem.n, kTileN);
  // Of a last tile what reaches over the end is counted too, in an int.
  const auto fits = [](int extent, int tile) {
    return std::int64_t{CeilDiv(extent, tile)} * tile <= std::numeric_limits<int>::max();
  };
  return fits(problem.m, kTileM) && fits(problem.n, kTileN) && fits(problem.k, kTileK) &&
         problem.batch == 1 && problem.num_groups == 0 && HasScales(problem) && is_power_of_two &&
         problem.splits <= kMaxSplits && problem.splits <= CeilDiv(problem.k, kTileK) &&
         // Blocks along x are counted in an int.
         num_tiles * problem.splits <= std::numeric_limits<int>::max();
}

std::size_t WorkspaceBytes(const GemmProblem&) { return 0; }

// A row-major matrix [rows, columns], in boxes of so many rows and columns.
void Encode(CUtensorMap* map, CUtensorMapDataType type, unsigned element_bytes,
            const void* address, int rows, int columns, std::int64_t ld, int box_rows,
            int box_columns, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(ld) * element_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  host_adapter::EncodeTiledByMemo(map, type, 2, const_cast<void*>(address), dims, strides, box,
                                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

void EncodeOperand(CUtensorMap* map, const void* address, int extent, int k, std::int64_t ld,
                   int box_extent) {
  Encode(map, dtype::STONEWARE_A::kTensorMapType, kOperandBytes, address, extent, k, ld, box_extent,
         kChunkElements, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

void EncodeResult(CUtensorMap* map, const GemmProblem& problem, void* d, int box_columns,
                  CUtensorMapSwizzle swizzle) {
  Encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kOutBytes, d, problem.m, problem.n, problem.ldd,
         kBoxRows, box_columns, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
            CUstream stream) {
  Params params;
  EncodeOperand(&params.b_map, tensors.b, problem.n, problem.k, problem.ldb, kTileN);
  EncodeOperand(&params.a_map, tensors.a, problem.m, problem.k, problem.lda, kTileM);
  if (kStoresBoxes && (problem.splits == 1 || kSplitsStoreBoxes)) {
    EncodeResult(&params.d_map, problem, tensors.d, kBoxColumns, CU_TENSOR_MAP_SWIZZLE_128B);
  }
#if STONEWARE_NARROW_BOXES
  // As Boxes::ChunkAt has them.
  EncodeResult(&params.narrow_d_map, problem, tensors.d, kLastBoxColumns,
               kLastBoxColumns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE);
#endif
#if STONEWARE_FETCHES_AHEAD
  params.b = tensors.b;
  params.ldb_bytes = problem.ldb * kOperandBytes;
#endif
  params.d = tensors.d;
  params.scale_a = problem.scale_a == Scale::kNone ? nullptr : tensors.scale_a;
  params.scale_b = problem.scale_b == Scale::kNone ? nullptr : tensors.scale_b;
  params.bias = tensors.bias;
  params.ldd = problem.ldd;
  if constexpr (kBlockScales) {
    params.scale_a_stride = problem.scale_a_stride_m;
    params.scale_b_stride = problem.scale_b_stride_n;
    params.ld_scale_a = problem.ld_scale_a;
    params.ld_scale_b = problem.ld_scale_b;
  } else {
    params.scale_a_stride = problem.scale_a == Scale::kRow;
    params.scale_b_stride = problem.scale_b == Scale::kRow;
    params.ld_scale_a = params.ld_scale_b = 0;
  }
  params.m = problem.m;
  params.n = problem.n;
  params.k = problem.k;
  params.num_k_tiles = CeilDiv(problem.k, kTileK);
  params.num_m_tiles = CeilDiv(problem.m, kTileM);
  const int num_n_tiles = CeilDiv(problem.n, kTileN);
  params.num_tiles = params.num_m_tiles * num_n_tiles;
  const int band = std::min(std::max(kBandM / kTileM, 1), params.num_m_tiles);
  params.last_band = (params.num_m_tiles - 1) / band;
  params.tiles_of_band = cutlass::FastDivmod(band * num_n_tiles);
  params.height_of_band = cutlass::FastDivmod(band);
  params.height_of_last_band = cutlass::FastDivmod(params.num_m_tiles - params.last_band * band);

  // So many blocks that each has as many tiles, or one less.
  int num_clusters = params.num_tiles;
  if (problem.splits == 1 && problem.num_sms > 0) {
    const int waves = CeilDiv(params.num_tiles, problem.num_sms * kBlocksPerSm);
    num_clusters = CeilDiv(params.num_tiles, waves);
  }

  void* parameters[] = {&params};
  const auto cluster_size = static_cast<unsigned>(problem.splits);
  driver::Launch(driver::DriverApi::Get(), function,
                 {{static_cast<unsigned>(num_clusters) * cluster_size, 1, 1},
                  {cluster_size, 1, 1},
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
    /*swap_ab=*/stoneware::gemm::sm90::kSwapAb,
    /*a_is_m_major=*/false,
    /*b_is_n_major=*/false,
    stoneware::gemm::sm90::kOperandBytes,
    stoneware::gemm::sm90::kOutBytes,
    &stoneware::gemm::sm90::CanImplement,
    &stoneware::gemm::sm90::WorkspaceBytes,
    &stoneware::gemm::sm90::Launch,
};
