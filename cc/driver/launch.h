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

// How many clusters of `shape` run at one time in the current context, where a block fills an SM.
// Clusters lie within a GPC, so they leave SMs idle where its SMs are no multiple of theirs. The
// driver is queried once for each size by each thread, as long as its context stays the same.
// Throws DriverError.
int ClustersAtOnce(const DriverApi& api, CUfunction function, const LaunchShape& shape);

// Queues `function` on `stream` in the current context. `parameters` points to one pointer per
// kernel parameter. Throws DriverError.
void Launch(const DriverApi& api, CUfunction function, const LaunchShape& shape, CUstream stream,
            void** parameters);

}  // namespace stoneware::driver
