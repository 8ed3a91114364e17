// Launching a kernel, with or without thread block clusters.

#pragma once

#include "cc/driver/driver_api.h"

namespace stoneware::driver {

struct Extent {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

struct LaunchShape {
  Extent grid;     // in blocks
  Extent cluster;  // in blocks
  Extent block;    // in threads
  unsigned shared_bytes = 0;
};

// Queues `function` on `stream` in the current context. `parameters` points to one pointer per
// kernel parameter. Throws DriverError.
void Launch(const DriverApi& api, CUfunction function, const LaunchShape& shape, CUstream stream,
            void** parameters);

}  // namespace stoneware::driver
