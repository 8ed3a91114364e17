// The CUDA context a call runs in.

#pragma once

#include "cc/driver/driver_api.h"

namespace stoneware::driver {

// While it lives, the calling thread's current context belongs to `device`: the one that was
// current if it does, otherwise the device's primary context, pushed here and popped at the end. So
// threads without a context (of autograd or a pool) and processes with several GPUs work, and the
// caller's context is restored.
class ContextGuard {
 public:
  // `device` is an ordinal. Throws DriverError.
  ContextGuard(const DriverApi& api, int device) : api_(api), device_(device) {
    CUcontext context = nullptr;
    Check("cuCtxGetCurrent", api.cuCtxGetCurrent(&context));
    CUdevice context_device = -1;
    if (context != nullptr) Check("cuCtxGetDevice", api.cuCtxGetDevice(&context_device));
    // A CUdevice is the device's ordinal.
    if (context == nullptr || context_device != device) PushPrimaryContext();
  }
  ~ContextGuard() {
    // A failed pop cannot be handled, and a destructor must not throw.
    CUcontext popped = nullptr;
    if (pushed_) api_.cuCtxPopCurrent(&popped);
  }

  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

  int device() const { return device_; }

 private:
  void PushPrimaryContext();

  const DriverApi& api_;
  const int device_;
  bool pushed_ = false;
};

}  // namespace stoneware::driver
