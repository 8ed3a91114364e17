// The dtypes of configs as tensor maps have them.

#pragma once

#include <cuda.h>

#include "cc/gemm/config.h"

namespace stoneware::gemm {

// TMA copies bytes: of fp8 it knows no type.
constexpr CUtensorMapDataType TensorMapType(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
    case DType::kE5M2:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFP16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFP32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace stoneware::gemm
