#include "cc/driver/launch.h"

#include <string>

namespace stoneware::driver {
namespace {

std::string Text(const Extent& extent) {
  return std::to_string(extent.x) + "x" + std::to_string(extent.y) + "x" + std::to_string(extent.z);
}

// What the driver takes for a launch.
struct Config {
  explicit Config(const LaunchShape& shape) {
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = shape.cluster.x;
    cluster.value.clusterDim.y = shape.cluster.y;
    cluster.value.clusterDim.z = shape.cluster.z;
    launch.gridDimX = shape.grid.x;
    launch.gridDimY = shape.grid.y;
    launch.gridDimZ = shape.grid.z;
    launch.blockDimX = shape.block.x;
    launch.blockDimY = shape.block.y;
    launch.blockDimZ = shape.block.z;
    launch.sharedMemBytes = shape.shared_bytes;
    launch.attrs = &cluster;
    // GPUs before sm_90 refuse the attribute, so a cluster of one block is not asked for.
    launch.numAttrs = BlocksOf(shape) > 1 ? 1 : 0;
  }

  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;

  static unsigned BlocksOf(const LaunchShape& shape) {
    return shape.cluster.x * shape.cluster.y * shape.cluster.z;
  }

  CUlaunchAttribute cluster{};
  CUlaunchConfig launch{};
};

// Blocks of the largest portable cluster.
constexpr unsigned kMaxBlocks = 8;

// What the driver said in one context, by the blocks of a cluster; 0: it was not asked.
struct ClusterCounts {
  unsigned long long context = ~0ULL;
  int of_blocks[kMaxBlocks + 1] = {};
};

}  // namespace

int ClustersAtOnce(const DriverApi& api, CUfunction function, const LaunchShape& shape) {
  // A context may have a part of the SMs, and its address may be that of an earlier one.
  thread_local ClusterCounts counts;
  unsigned long long context = 0;
  Check("cuCtxGetId", api.cuCtxGetId(nullptr, &context));
  if (counts.context != context) {
    counts = {};
    counts.context = context;
  }
  const unsigned blocks = Config::BlocksOf(shape);
  int uncounted = 0;
  int& count = blocks <= kMaxBlocks ? counts.of_blocks[blocks] : uncounted;
  if (count == 0) {
    const Config config(shape);
    CheckWhile("cuOccupancyMaxActiveClusters",
               api.cuOccupancyMaxActiveClusters(&count, function, &config.launch),
               [&] { return "counting the clusters of " + Text(shape.cluster) + " that fit"; });
  }
  return count;
}

void Launch(const DriverApi& api, CUfunction function, const LaunchShape& shape, CUstream stream,
            void** parameters) {
  Config config(shape);
  config.launch.hStream = stream;
  CheckWhile("cuLaunchKernelEx",
             api.cuLaunchKernelEx(&config.launch, function, parameters, nullptr), [&] {
               return "launching a grid of " + Text(shape.grid) + " blocks in clusters of " +
                      Text(shape.cluster) + ", " + Text(shape.block) + " threads and " +
                      std::to_string(shape.shared_bytes) + " bytes of shared memory each";
             });
}

}  // namespace stoneware::driver
