// One problem on one embedded kernel: checked once, then launched with nothing left to decide.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cc/driver/cubin_module.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/host_adapter/tensor_map_memo.h"

namespace stoneware::gemm {

// A kernel of this module and its loaded form, which all plans of it share.
struct EmbeddedKernel {
  explicit EmbeddedKernel(const KernelEntry& kernel_entry);

  const KernelEntry& entry;
  driver::CubinKernel cubin;
};

// Every kernel of this module, in the order of its registry. No CUDA call.
const std::vector<EmbeddedKernel*>& EmbeddedKernels();

// Throws std::invalid_argument, naming this module's kernels, if none has this id.
EmbeddedKernel& FindKernel(std::string_view id);

class Plan {
 public:
  // `order`: which tensors a launch passes. Throws std::invalid_argument, with rule, value and
  // remedy, if the kernel cannot compute the problem. No CUDA call.
  Plan(std::string_view kernel, std::vector<void* GemmTensors::*> order,
       const GemmProblem& problem);

  std::uint32_t num_tensors() const { return static_cast<std::uint32_t>(order_.size()); }

  // Queues the product on `stream`. Throws driver::DriverError, or std::invalid_argument if an
  // address is missing or misaligned. Thread-safe; of two concurrent launches one keeps its tensor
  // maps for the next launch.
  void Launch(void* const* addresses, CUstream stream) const;

 private:
  const KernelEntry& entry() const { return kernel_.entry; }
  void CheckProblem() const;
  void CheckTensors(const GemmTensors& tensors) const;

  EmbeddedKernel& kernel_;
  const std::vector<void* GemmTensors::*> order_;
  const GemmProblem problem_;

  mutable std::mutex memo_mutex_;
  const std::unique_ptr<host_adapter::TensorMapMemo> memo_ =
      std::make_unique<host_adapter::TensorMapMemo>();  // guarded by memo_mutex_
};

}  // namespace stoneware::gemm
