// What stands behind the cuTensorMapEncodeTiled that CUTLASS looks up.

#pragma once

#include <cuda.h>

namespace stoneware::host_adapter {

// The driver's cuTensorMapEncodeTiled, by way of the memo in use, if there is one
// (tensor_map_memo.h). Throws driver::DriverError where the driver refuses: CUTLASS would print to
// stderr and launch with an empty tensor map. It returns nothing but success.
decltype(::cuTensorMapEncodeTiled) EncodeTiled;

}  // namespace stoneware::host_adapter
