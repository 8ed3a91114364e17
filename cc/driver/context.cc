#include "cc/driver/context.h"

#include <map>
#include <mutex>
#include <string>

namespace stoneware::driver {
namespace {

// Retains each device's primary context once. It is never released: kernels that we launched may
// still be running in it, and releasing the last reference would destroy it under them.
CUcontext RetainedPrimaryContext(const DriverApi& api, int device) {
  // Never destroyed: a thread may launch while the process ends.
  static auto& mutex = *new std::mutex;
  static auto& retained = *new std::map<int, CUcontext>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = retained.find(device);
  if (found != retained.end()) return found->second;

  const auto doing = [&] {
    return "making the primary context of device " + std::to_string(device) + " current";
  };
  CUdevice handle = -1;
  CheckWhile("cuDeviceGet", api.cuDeviceGet(&handle, device), doing);
  CUcontext context = nullptr;
  CheckWhile("cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(&context, handle), doing);
  retained.emplace(device, context);
  return context;
}

}  // namespace

void ContextGuard::PushPrimaryContext() {
  Check("cuCtxPushCurrent", api_.cuCtxPushCurrent(RetainedPrimaryContext(api_, device_)));
  pushed_ = true;
}

}  // namespace stoneware::driver
