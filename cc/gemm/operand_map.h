// The tensor map of an operand, as persistent_mm loads it.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/gemm/config.h"
#include "cc/host_adapter/tensor_map_memo.h"

namespace stoneware::gemm {

// Encodes the map of `num_rows` rows of k contiguous elements, in boxes of `box_rows` rows and
// `box_bytes` (128 or 64) of k, which are a row of the swizzle. With `num_matrices` it has as many
// of them, and rank 3. Strides are in elements. An operand whose rows run fastest passes k as
// `num_rows`, and its rows as `k`.
inline void EncodeOperandMap(CUtensorMap* map, DType dtype, const void* address, int num_rows,
                             int k, std::int64_t row_stride, int box_rows, int box_bytes = 128,
                             int num_matrices = 0, std::int64_t matrix_stride = 0) {
  const auto element_bytes = static_cast<cuuint32_t>(BytesOf(dtype));
  // TMA copies bytes: of fp8 it knows no type.
  const CUtensorMapDataType type = element_bytes == 1      ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(num_rows),
                                static_cast<cuuint64_t>(num_matrices)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * element_bytes,
                                static_cast<cuuint64_t>(matrix_stride) * element_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes) / element_bytes,
                            static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  host_adapter::EncodeTiled(
      map, type, num_matrices == 0 ? 2 : 3, const_cast<void*>(address), extents, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace stoneware::gemm
