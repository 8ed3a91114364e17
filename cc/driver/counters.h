// Counters in device memory that a kernel finds at 0, and leaves at 0.

#pragma once

#include "cc/driver/driver_api.h"

namespace stoneware::driver {

// Of 32 bits, for one launch.
inline constexpr int kCountersOfLaunch = 512;

// Counters, all 0, for a kernel that is queued on `stream` in the current context. It must leave
// them at 0. Nothing is queued here.
//
// Kernels of one stream run one after the other, and share theirs. Graphs may run at the same time:
// a captured kernel has its own, until its graph and what was instantiated from it are destroyed.
// Allocates device memory from time to time. Throws DriverError. Thread-safe.
CUdeviceptr CountersFor(const DriverApi& api, CUstream stream);

}  // namespace stoneware::driver
