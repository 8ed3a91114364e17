// From the bytes of a cubin, or of a fat binary with one, to a kernel that can be launched.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cc/driver/context.h"
#include "cc/driver/driver_api.h"

namespace stoneware::driver {

// What is known of a kernel before any CUDA call. The bytes of `image` must outlive the
// CubinKernel.
struct CubinSpec {
  std::string name;                          // of the kernel, in the cubin
  std::string_view image;                    // a cubin, or a fat binary with one; not owned
  std::vector<std::size_t> parameter_bytes;  // the size of each parameter, as the host packs it
  unsigned shared_bytes = 0;                 // dynamic shared memory of a launch
};

// One kernel, loaded at first use: the library once per process, the shared memory attribute once
// per device. Thread-safe; a failed attempt throws and the next call tries again.
class CubinKernel {
 public:
  // No CUDA call. Throws std::invalid_argument if the image is neither a whole cubin nor a whole
  // fat binary.
  explicit CubinKernel(CubinSpec spec);

  CubinKernel(const CubinKernel&) = delete;
  CubinKernel& operator=(const CubinKernel&) = delete;

  const CubinSpec& spec() const { return spec_; }

  // What cuLaunchKernelEx takes, on the device of `context`; no lock once the kernel is ready
  // there. It is a CUkernel, of which the driver knows the function in each context, also in one
  // that took the place of another after a reset.
  // Throws DriverError: the cubin does not fit the GPU, or its kernel is not the one that this
  // module was built with.
  CUfunction FunctionOn(const DriverApi& api, const ContextGuard& context) {
    if ((ready_devices_.load(std::memory_order_acquire) & Bit(context.device())) == 0) {
      Prepare(api, context);
    }
    return reinterpret_cast<CUfunction>(kernel_);
  }

 private:
  // 0 for a device beyond the 64th, which is prepared anew for each launch.
  static std::uint64_t Bit(int device) { return device < 64 ? std::uint64_t{1} << device : 0; }

  void Prepare(const DriverApi& api, const ContextGuard& context);
  void CheckParameters(const DriverApi& api, CUkernel kernel) const;

  const CubinSpec spec_;
  std::atomic<std::uint64_t> ready_devices_{0};

  std::mutex mutex_;             // guards writes to ready_devices_ and to what follows
  CUlibrary library_ = nullptr;  // stays loaded: a launch may still be running
  CUkernel kernel_ = nullptr;    // set before the first bit of ready_devices_
};

}  // namespace stoneware::driver
