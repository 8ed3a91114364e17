#include "cc/driver/launch.h"

#include <atomic>
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

// Portable clusters have at most so many blocks.
constexpr unsigned kMaxClusterBlocks = 8;
constexpr int kMaxDevices = 64;

}  // namespace

int ClustersAtOnce(const DriverApi& api, int device, CUfunction function,
                   const LaunchShape& shape) {
  static std::atomic<int> known[kMaxDevices][kMaxClusterBlocks + 1];  // 0: not asked
  const unsigned blocks = Config::BlocksOf(shape);
  std::atomic<int>* const place =
      device < kMaxDevices && blocks <= kMaxClusterBlocks ? &known[device][blocks] : nullptr;
  int clusters = place != nullptr ? place->load(std::memory_order_relaxed) : 0;
  if (clusters > 0) return clusters;
  const Config config(shape);
  CheckWhile("cuOccupancyMaxActiveClusters",
             api.cuOccupancyMaxActiveClusters(&clusters, function, &config.launch),
             [&] { return "counting the clusters of " + Text(shape.cluster) + " that fit"; });
  if (place != nullptr) place->store(clusters, std::memory_order_relaxed);
  return clusters;
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
