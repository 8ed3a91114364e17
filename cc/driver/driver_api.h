// libcuda's entry points, found at first use.
//
// Nothing links libcuda: importing a module works on a machine without a driver, and the first call
// that needs one says clearly what is missing.

#pragma once

#include <cuda.h>

#include <atomic>

#include "cc/driver/driver_error.h"

namespace stoneware::driver {

// Each entry point with the CUDA version that introduced the signature in cuda.h (the suffix of its
// PFN_ type in cudaTypedefs.h). cuGetProcAddress returns the newest variant up to that version, so
// asking for a later one could yield a function with other parameters.
#define STONEWARE_DRIVER_ENTRY_POINTS(ENTRY)               \
  ENTRY(cuInit, 2000)                                      \
  ENTRY(cuGetErrorName, 6000)                              \
  ENTRY(cuDeviceGet, 2000)                                 \
  ENTRY(cuDeviceGetCount, 2000)                            \
  ENTRY(cuDeviceGetName, 2000)                             \
  ENTRY(cuDeviceGetAttribute, 2000)                        \
  ENTRY(cuDeviceTotalMem, 3020)                            \
  ENTRY(cuDevicePrimaryCtxRetain, 7000)                    \
  ENTRY(cuCtxGetCurrent, 4000)                             \
  ENTRY(cuCtxGetDevice, 2000)                              \
  ENTRY(cuCtxGetId, 12000)                                 \
  ENTRY(cuCtxPushCurrent, 4000)                            \
  ENTRY(cuCtxPopCurrent, 4000)                             \
  ENTRY(cuLibraryLoadData, 12000)                          \
  ENTRY(cuLibraryGetKernel, 12000)                         \
  ENTRY(cuKernelGetFunction, 12000)                        \
  ENTRY(cuKernelGetParamInfo, 12040)                       \
  ENTRY(cuKernelSetAttribute, 12000)                       \
  ENTRY(cuLaunchKernelEx, 11060)                           \
  ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050) \
  ENTRY(cuOccupancyMaxActiveClusters, 11070)               \
  ENTRY(cuTensorMapEncodeTiled, 12000)                     \
  ENTRY(cuTensorMapEncodeIm2col, 12000)                    \
  ENTRY(cuTensorMapReplaceAddress, 12000)                  \
  ENTRY(cuMemAlloc, 3020)                                  \
  ENTRY(cuMemsetD8Async, 3020)                             \
  ENTRY(cuMemsetD16Async, 3020)                            \
  ENTRY(cuMemsetD32Async, 3020)                            \
  ENTRY(cuStreamCreate, 2000)                              \
  ENTRY(cuStreamDestroy, 4000)                             \
  ENTRY(cuStreamGetCaptureInfo, 12030)                     \
  ENTRY(cuStreamGetId, 12000)                              \
  ENTRY(cuStreamSynchronize, 2000)                         \
  ENTRY(cuThreadExchangeStreamCaptureMode, 10010)          \
  ENTRY(cuUserObjectCreate, 11030)                         \
  ENTRY(cuUserObjectRelease, 11030)                        \
  ENTRY(cuGraphRetainUserObject, 11030)

// The oldest driver that has every entry point above, as cuDriverGetVersion counts.
inline constexpr int kMinimumDriverVersion = 12040;

// A table of function pointers. cuda.h maps some names to versioned ones (cuCtxPushCurrent is
// cuCtxPushCurrent_v2); the members are mapped alike, so `api.cuCtxPushCurrent(...)` reads plainly.
class DriverApi {
 public:
  // The table with the driver initialised (cuInit); one atomic load after the first success.
  // Concurrent first calls load it once; after a failed attempt, which throws in the initialisation
  // of a static variable, the next call tries again.
  // Throws DriverError: no libcuda, a driver too old, an entry point missing, cuInit failed.
  static const DriverApi& Get() {
    static const DriverApi& api = Initialise();
    return api;
  }

  // The table without cuInit: enough to read the version on a machine whose GPU does not work.
  static const DriverApi& Load();

  // The table if it has been loaded, otherwise nullptr; never loads.
  static const DriverApi* LoadedOrNull() { return loaded_.load(std::memory_order_acquire); }

  // As cuDriverGetVersion counts: 13000 is CUDA 13.0.
  int version;

#define STONEWARE_DECLARE_ENTRY(name, since) decltype(&::name) name;
  STONEWARE_DRIVER_ENTRY_POINTS(STONEWARE_DECLARE_ENTRY)
#undef STONEWARE_DECLARE_ENTRY

 private:
  static const DriverApi& Initialise();

  static std::atomic<const DriverApi*> loaded_;
};

}  // namespace stoneware::driver
