// From the bytes of a cubin to a function that can be launched.

#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cc/driver/context.h"
#include "cc/driver/driver_api.h"

namespace stoneware::driver {

// What is known of a kernel before any CUDA call.
struct CubinSpec {
  std::string name;                          // how messages call the kernel
  std::string_view cubin;                    // not owned; must outlive the CubinKernel
  std::string symbol;                        // the kernel's name in the cubin
  std::vector<std::size_t> parameter_bytes;  // the size of each parameter, as the host packs it
  unsigned shared_bytes = 0;                 // dynamic shared memory of a launch
};

// One kernel, loaded at first use. The library is loaded once per process, the shared memory
// attribute set once per device, the function fetched once per context. Thread-safe; a failed
// attempt throws and the next call tries again.
class CubinKernel {
 public:
  // No CUDA call. Throws std::invalid_argument if the bytes are not a whole cubin.
  explicit CubinKernel(CubinSpec spec);

  // The library stays loaded: a launch may still be running.
  ~CubinKernel();

  CubinKernel(const CubinKernel&) = delete;
  CubinKernel& operator=(const CubinKernel&) = delete;

  const CubinSpec& spec() const { return spec_; }

  // The function in the current context, which is `context`'s; no lock once it is known there.
  // Throws DriverError: the cubin does not fit the GPU, or its kernel is not the one that this
  // module was built with.
  CUfunction FunctionIn(const DriverApi& api, const ContextGuard& context) {
    for (const Function* function = functions_.load(std::memory_order_acquire);
         function != nullptr; function = function->next) {
      if (function->context_id == context.id()) return function->handle;
    }
    return LoadInto(api, context);
  }

 private:
  // A list that only grows, so that readers need no lock. A process has few contexts; a destroyed
  // context leaves its entry behind, which no later context matches.
  struct Function {
    unsigned long long context_id;
    CUfunction handle;
    const Function* next;
  };

  CUfunction LoadInto(const DriverApi& api, const ContextGuard& context);
  void CheckParameters(const DriverApi& api, CUkernel kernel) const;

  const CubinSpec spec_;
  std::atomic<const Function*> functions_{nullptr};

  std::mutex mutex_;  // guards what follows, and writes to functions_
  CUlibrary library_ = nullptr;
  CUkernel kernel_ = nullptr;
  std::set<int> prepared_devices_;
};

// The architecture that a cubin was built for, such as "sm_90", from its ELF header. Throws
// std::invalid_argument if the bytes are not a whole cubin.
std::string CubinArch(std::string_view cubin);

}  // namespace stoneware::driver
