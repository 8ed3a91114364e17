#include "cc/driver/launch.h"

#include <string>

namespace stoneware::driver {
namespace {

std::string Text(const Extent& extent) {
  return std::to_string(extent.x) + "x" + std::to_string(extent.y) + "x" + std::to_string(extent.z);
}

}  // namespace

void Launch(const DriverApi& api, CUfunction function, const LaunchShape& shape, CUstream stream,
            void** parameters) {
  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = shape.cluster.x;
  cluster.value.clusterDim.y = shape.cluster.y;
  cluster.value.clusterDim.z = shape.cluster.z;

  CUlaunchConfig config{};
  config.gridDimX = shape.grid.x;
  config.gridDimY = shape.grid.y;
  config.gridDimZ = shape.grid.z;
  config.blockDimX = shape.block.x;
  config.blockDimY = shape.block.y;
  config.blockDimZ = shape.block.z;
  config.sharedMemBytes = shape.shared_bytes;
  config.hStream = stream;
  config.attrs = &cluster;
  // GPUs before sm_90 refuse the attribute, so a cluster of one block is not asked for.
  config.numAttrs = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1 ? 1 : 0;

  CheckWhile("cuLaunchKernelEx", api.cuLaunchKernelEx(&config, function, parameters, nullptr), [&] {
    return "launching a grid of " + Text(shape.grid) + " blocks in clusters of " +
           Text(shape.cluster) + ", " + Text(shape.block) + " threads and " +
           std::to_string(shape.shared_bytes) + " bytes of shared memory each";
  });
}

}  // namespace stoneware::driver
