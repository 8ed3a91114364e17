// One problem on one embedded kernel: checked once, then launched with nothing left to decide.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/driver/cubin_module.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/host_adapter/tensor_map_memo.h"

namespace stoneware::gemm {

// Each Scale, by what callers name it.
inline constexpr std::array<std::pair<const char*, Scale>, 5> kScales = {{
    {"none", Scale::kNone},
    {"tensor", Scale::kTensor},
    {"row", Scale::kRow},
    {"block_1x128", Scale::kBlock1x128},
    {"block_128x128", Scale::kBlock128x128},
}};

// A kernel of this module and its loaded form, which all plans of it share.
struct EmbeddedKernel {
  explicit EmbeddedKernel(const KernelEntry& kernel_entry);

  const KernelEntry& entry;
  driver::CubinKernel cubin;
};

// An open kernel of this module, into which an epilogue was linked.
struct LinkedKernel {
  // Throws std::invalid_argument if the module has no such kernel, if it has no open form, or if
  // `cubin_bytes` are not a whole cubin.
  LinkedKernel(std::string_view kernel, std::string cubin_bytes);

  const KernelEntry& entry;
  const std::string bytes;
  driver::CubinKernel cubin;
};

// What the epilogue of a linked kernel gets.
struct EpilogueArguments {
  std::string parameters;             // kEpilogueBytes; at a pointer, bytes to add to the address
  std::vector<std::size_t> pointers;  // where the addresses of its tensors go, in their order
  // Of tensors of floats that get -infinity before the kernel: position, and elements.
  std::vector<std::pair<std::size_t, std::size_t>> minima;
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

  // The same on a linked kernel. A launch passes the tensors of `order`, then the epilogue's.
  Plan(std::shared_ptr<LinkedKernel> linked, std::vector<void* GemmTensors::*> order,
       const GemmProblem& problem, EpilogueArguments epilogue);

  std::uint32_t num_tensors() const {
    return static_cast<std::uint32_t>(order_.size() + epilogue_.pointers.size());
  }

  // If not 0, a launch has one address more, after those of its tensors: memory of that many bytes,
  // at a multiple of 16, that is this launch's own until it is done.
  std::size_t workspace_bytes() const { return workspace_bytes_; }

  // Queues the product on `stream`. Throws driver::DriverError, or std::invalid_argument if an
  // address is missing or misaligned. Thread-safe; of two concurrent launches one keeps its tensor
  // maps for the next launch.
  void Launch(void* const* addresses, CUstream stream) const;

 private:
  const KernelEntry& entry() const { return entry_; }
  void CheckProblem() const;
  void CheckEpilogue() const;
  void CheckCanImplement() const;
  void CheckTensors(const GemmTensors& tensors) const;

  const std::shared_ptr<LinkedKernel> linked_;  // or nullptr
  const KernelEntry& entry_;
  driver::CubinKernel& cubin_;
  const std::vector<void* GemmTensors::*> order_;
  const GemmProblem problem_;
  const EpilogueArguments epilogue_;
  std::size_t workspace_bytes_ = 0;

  mutable std::mutex memo_mutex_;
  const std::unique_ptr<host_adapter::TensorMapMemo> memo_ =
      std::make_unique<host_adapter::TensorMapMemo>();  // guarded by memo_mutex_
};

}  // namespace stoneware::gemm
