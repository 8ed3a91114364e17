// What stands behind the cuTensorMapEncodeTiled that CUTLASS looks up.

#pragma once

#include <cuda.h>

namespace stoneware::host_adapter {

// cuTensorMapEncodeTiled by way of DriverHostAdapter. Throws driver::DriverError where the driver
// refuses: CUTLASS would print to stderr and launch with an empty tensor map.
CUresult EncodeTiledOrThrow(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                            void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                            const cuuint32_t* box, const cuuint32_t* element_strides,
                            CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                            CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill);

// The same by way of the memo in use, if there is one (tensor_map_memo.h).
CUresult EncodeTiledByMemo(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                           void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                           const cuuint32_t* box, const cuuint32_t* element_strides,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill);

}  // namespace stoneware::host_adapter
