// Counters in device memory that a kernel finds at 0, and leaves at 0.

#pragma once

#include "cc/driver/driver_api.h"

namespace stoneware::driver {

// Counters of 32 bits for each launch.
inline constexpr int kCountersPerLaunch = 512;

// Counters, all 0, for a kernel that is queued on `stream` in the current context. It must leave
// them at 0. Nothing is queued here.
//
// Kernels of one stream run one after the other, and share theirs: 2 KiB for each stream that was
// ever used. Graphs may run at the same time: a captured kernel has its own, until its graph and
// what was instantiated from it are destroyed. Two executables of one graph must not run at the
// same time, as they must not with torch's temporaries. Allocates device memory from time to time.
// Throws DriverError. Thread-safe.
CUdeviceptr CountersFor(const DriverApi& api, CUstream stream);

}  // namespace stoneware::driver
