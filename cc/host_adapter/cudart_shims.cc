// The three symbols of libcudart that CUTLASS's host code leaves undefined, on top of cc/driver.
//
// They are hidden: inside a module they take libcudart's place, outside nobody sees them, so a
// libcudart in the same process (torch's) is neither used nor disturbed. This is for CUTLASS 4.2
// with CUTLASS_ENABLE_CUDA_HOST_ADAPTER=1; a version of CUTLASS that needs another symbol shows as
// an undefined symbol at link time.

#include <cuda_runtime_api.h>

#include <cstring>

#include "cc/driver/driver_api.h"
#include "cc/host_adapter/tensor_map_memo.h"

#define STONEWARE_SHIM extern "C" __attribute__((visibility("hidden")))

using stoneware::driver::Check;
using stoneware::driver::DriverApi;

// CUTLASS asks for cuTensorMapEncodeTiled at each encode (cutlass/cuda_host_adapter.hpp,
// call_cuTensorMapEncodeTiled) and its CudaHostAdapter::tensorMapEncodeTiled is never called by it.
// The answer is a constant, and the way through the memo and the adapter is made here.
STONEWARE_SHIM cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned /*version*/, unsigned long long /*flags*/,
    cudaDriverEntryPointQueryResult* status) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&stoneware::host_adapter::EncodeTiled) : nullptr;
  *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// CUTLASS queries these two only where its caller gives no SM count.
STONEWARE_SHIM cudaError_t cudaGetDevice(int* device) {
  Check("cuCtxGetDevice", DriverApi::Get().cuCtxGetDevice(device));
  return cudaSuccess;
}

STONEWARE_SHIM cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                                  int device) {
  // The runtime's attributes have the numbers of the driver's.
  Check("cuDeviceGetAttribute", DriverApi::Get().cuDeviceGetAttribute(
                                    value, static_cast<CUdevice_attribute>(attribute), device));
  return cudaSuccess;
}
