#include "cc/gemm/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cc/driver/context.h"
#include "cc/driver/driver_api.h"
#include "cc/driver/driver_error.h"

namespace stoneware::gemm {
namespace {

// TMA's unit: addresses and strides are multiples of 16 bytes.
constexpr std::int64_t kTmaBytes = 16;
constexpr std::int64_t kScaleBytes = sizeof(float);
constexpr std::int64_t kScaleBlock = 128;
constexpr unsigned kMinusInfinity = 0xff800000;  // of a float

[[noreturn]] void Refuse(const std::string& name, std::int64_t value, const std::string& rule,
                         const std::string& remedy) {
  throw std::invalid_argument(name + "=" + std::to_string(value) + " " + rule + "; " + remedy);
}

void CheckExtent(const char* name, std::int64_t value, std::int64_t multiple) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (value < 1 || value > kMax) {
    Refuse(name, value, "must be 1 to " + std::to_string(kMax), "split the problem");
  }
  if (value % multiple != 0) {
    Refuse(name, value, "must be a multiple of " + std::to_string(multiple),
           std::string("pad ") + name + ", or use another backend");
  }
}

void CheckStride(const char* name, std::int64_t value, std::int64_t element_bytes) {
  const std::int64_t multiple = kTmaBytes / element_bytes;
  if (value % multiple != 0) {
    Refuse(name, value,
           "must be a multiple of " + std::to_string(multiple) + " elements (16 bytes)",
           "copy the view into a contiguous tensor, or use another backend");
  }
}

void CheckLeadingDimension(const char* name, std::int64_t value, const char* extent_name,
                           std::int64_t extent, std::int64_t element_bytes) {
  if (value < extent) {
    Refuse(name, value,
           std::string("must be at least ") + extent_name + "=" + std::to_string(extent),
           "pass the stride of the tensor's rows in elements");
  }
  CheckStride(name, value, element_bytes);
}

void CheckAtLeast(const char* name, std::int64_t value, std::int64_t least, const char* remedy) {
  if (value < least) Refuse(name, value, "must be at least " + std::to_string(least), remedy);
}

void CheckAddress(const char* name, const void* pointer, std::int64_t multiple) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address != 0 && address % static_cast<std::uintptr_t>(multiple) == 0) return;
  throw std::invalid_argument(std::string(name) + " must be a device address, a multiple of " +
                              std::to_string(multiple) + " bytes, but is " +
                              std::to_string(address) + "; copy the view into a contiguous tensor");
}

std::string NameOf(Scale scale) {
  return std::find_if(kScales.begin(), kScales.end(),
                      [scale](const auto& named) { return named.second == scale; })
      ->first;
}

bool IsBlock(Scale scale) { return scale == Scale::kBlock1x128 || scale == Scale::kBlock128x128; }

}  // namespace

EmbeddedKernel::EmbeddedKernel(const KernelEntry& kernel_entry)
    : entry(kernel_entry),
      cubin({entry.id,
             {entry.image_begin, static_cast<std::size_t>(entry.image_end - entry.image_begin)},
             {entry.parameter_bytes},
             entry.shared_bytes}) {}

const std::vector<EmbeddedKernel*>& EmbeddedKernels() {
  // Never destroyed: a thread may launch while the process ends.
  static const auto& kernels = *[] {
    auto* all = new std::vector<EmbeddedKernel*>;
    for (std::size_t i = 0; i < kNumKernelEntries; ++i) {
      all->push_back(new EmbeddedKernel(*kKernelEntries[i]));
    }
    return all;
  }();
  return kernels;
}

EmbeddedKernel& FindKernel(std::string_view id) {
  std::string known;
  for (EmbeddedKernel* kernel : EmbeddedKernels()) {
    if (kernel->entry.id == id) return *kernel;
    known.append(known.empty() ? "" : ", ").append(kernel->entry.id);
  }
  throw std::invalid_argument("kernel must be one of this module's (" + known + "), but is " +
                              std::string(id) + "; take an id from kernels()");
}

LinkedKernel::LinkedKernel(std::string_view kernel, std::string cubin_bytes)
    : entry(FindKernel(kernel).entry),
      bytes(std::move(cubin_bytes)),
      cubin({entry.id, bytes, {entry.open_parameter_bytes}, entry.shared_bytes}) {
  if (entry.open_parameter_bytes == 0) {
    throw std::invalid_argument("kernel " + std::string(kernel) +
                                " must be of a family with open kernels, and is not; take one that "
                                "kernel_manifest.json lists under open");
  }
}

Plan::Plan(std::string_view kernel, std::vector<void* GemmTensors::*> order,
           const GemmProblem& problem)
    : entry_(FindKernel(kernel).entry),
      cubin_(FindKernel(kernel).cubin),
      order_(std::move(order)),
      problem_(problem) {
  CheckProblem();
  workspace_bytes_ = entry().workspace_bytes(problem);
}

Plan::Plan(std::shared_ptr<LinkedKernel> linked, std::vector<void* GemmTensors::*> order,
           const GemmProblem& problem, EpilogueArguments epilogue)
    : linked_(std::move(linked)),
      entry_(linked_->entry),
      cubin_(linked_->cubin),
      order_(std::move(order)),
      problem_(problem),
      epilogue_(std::move(epilogue)) {
  CheckProblem();
  workspace_bytes_ = entry().workspace_bytes(problem);
  CheckEpilogue();
}

void Plan::CheckEpilogue() const {
  if (epilogue_.parameters.size() != kEpilogueBytes) {
    throw std::invalid_argument(
        "an epilogue's parameters must be " + std::to_string(kEpilogueBytes) + " bytes, but are " +
        std::to_string(epilogue_.parameters.size()) + "; pad them with zeros");
  }
  for (const std::size_t offset : epilogue_.pointers) {
    if (offset > kEpilogueBytes - sizeof(void*) || offset % sizeof(void*) != 0) {
      throw std::invalid_argument(
          "a pointer of an epilogue must be at a multiple of 8 inside its " +
          std::to_string(kEpilogueBytes) + " bytes, but is at " + std::to_string(offset) +
          "; correct the offset");
    }
  }
  for (const auto& [tensor, count] : epilogue_.minima) {
    if (tensor >= epilogue_.pointers.size()) {
      throw std::invalid_argument("minima must name tensors of the epilogue, 0 to " +
                                  std::to_string(epilogue_.pointers.size()) +
                                  " excluded, but name " + std::to_string(tensor) +
                                  "; correct the position");
    }
  }
}

void Plan::CheckCanImplement() const {
  if (!entry().can_implement(problem_)) {
    throw std::invalid_argument(
        "kernel " + std::string(entry().id) + " cannot compute m=" + std::to_string(problem_.m) +
        " n=" + std::to_string(problem_.n) + " k=" + std::to_string(problem_.k) + " with batch=" +
        std::to_string(problem_.batch) + ", splits=" + std::to_string(problem_.splits) +
        ", scale_a=" + NameOf(problem_.scale_a) + " and scale_b=" + NameOf(problem_.scale_b) +
        (problem_.accumulate ? ", added to d" : "") + "; use another kernel or backend");
  }
}

void Plan::CheckProblem() const {
  const GemmProblem& p = problem_;
  const std::int64_t operand_bytes = entry().operand_bytes;
  const std::int64_t out_bytes = entry().out_bytes;
  // Extents along which an operand or d is contiguous are multiples of TMA's unit.
  const std::int64_t operand_multiple = kTmaBytes / operand_bytes;
  CheckExtent("m", p.m, entry().a_is_m_major ? operand_multiple : 1);
  CheckExtent("n", p.n, operand_multiple);
  // With a M-major and b N-major, as for a weight's gradient, no operand is contiguous along k.
  const bool is_k_strided = entry().a_is_m_major && entry().b_is_n_major;
  CheckExtent("k", p.k, is_k_strided ? 1 : operand_multiple);
  CheckExtent("batch", p.batch, 1);
  const bool a_is_m_major = entry().a_is_m_major;
  const bool b_is_n_major = entry().b_is_n_major;
  CheckLeadingDimension("lda", p.lda, a_is_m_major ? "m" : "k", a_is_m_major ? p.m : p.k,
                        operand_bytes);
  CheckLeadingDimension("ldb", p.ldb, b_is_n_major ? "n" : "k", b_is_n_major ? p.n : p.k,
                        operand_bytes);
  CheckLeadingDimension("ldd", p.ldd, "n", p.n, out_bytes);
  CheckStride("batch_stride_a", p.batch_stride_a, operand_bytes);
  CheckStride("batch_stride_b", p.batch_stride_b, operand_bytes);
  CheckStride("batch_stride_d", p.batch_stride_d, out_bytes);
  CheckAtLeast("num_groups", p.num_groups, 0, "pass the number of groups");
  if (IsBlock(p.scale_a) || IsBlock(p.scale_b)) CheckExtent("k", p.k, kScaleBlock);
  if (IsBlock(p.scale_a)) {
    CheckAtLeast("ld_scale_a", p.ld_scale_a, 0, "pass the tensor's stride");
    CheckAtLeast("scale_a_stride_m", p.scale_a_stride_m, 0, "pass the tensor's stride");
  }
  if (IsBlock(p.scale_b)) {
    CheckAtLeast("ld_scale_b", p.ld_scale_b, 0, "pass the tensor's stride");
    CheckAtLeast("scale_b_stride_n", p.scale_b_stride_n, 0, "pass the tensor's stride");
  }
  CheckAtLeast("group_stride_scale_b", p.group_stride_scale_b, 0, "pass the tensor's stride");
  CheckAtLeast("device", p.device, 0, "pass its ordinal");
  CheckAtLeast("num_sms", p.num_sms, 1, "pass the device's SM count");
  if (p.max_swizzle != 1 && p.max_swizzle != 2 && p.max_swizzle != 4 && p.max_swizzle != 8) {
    Refuse("max_swizzle", p.max_swizzle, "must be 1, 2, 4 or 8", "choose one of them");
  }
  CheckAtLeast("splits", p.splits, 1, "pass 1 for no split");
  CheckCanImplement();
}

void Plan::CheckTensors(const GemmTensors& tensors) const {
  CheckAddress("a", tensors.a, kTmaBytes);
  CheckAddress("b", tensors.b, kTmaBytes);
  CheckAddress("d", tensors.d, kTmaBytes);
  if (problem_.scale_a != Scale::kNone) CheckAddress("scale_a", tensors.scale_a, kScaleBytes);
  if (problem_.scale_b != Scale::kNone) CheckAddress("scale_b", tensors.scale_b, kScaleBytes);
  if (tensors.bias != nullptr) CheckAddress("bias", tensors.bias, entry().out_bytes);
  if (problem_.num_groups != 0) CheckAddress("offsets", tensors.offsets, sizeof(std::int32_t));
  if (workspace_bytes_ != 0) CheckAddress("workspace", tensors.workspace, kTmaBytes);
}

void Plan::Launch(void* const* addresses, CUstream stream) const {
  GemmTensors tensors;
  for (std::size_t i = 0; i < order_.size(); ++i) tensors.*order_[i] = addresses[i];
  char epilogue[kEpilogueBytes];
  if (linked_ != nullptr) {
    std::memcpy(epilogue, epilogue_.parameters.data(), kEpilogueBytes);
    for (std::size_t i = 0; i < epilogue_.pointers.size(); ++i) {
      char* const pointer = epilogue + epilogue_.pointers[i];
      std::uintptr_t address;
      std::memcpy(&address, pointer, sizeof(address));
      address += reinterpret_cast<std::uintptr_t>(addresses[order_.size() + i]);
      std::memcpy(pointer, &address, sizeof(address));
    }
    tensors.epilogue = epilogue;
  }
  if (workspace_bytes_ != 0) tensors.workspace = addresses[num_tensors()];
  if (problem_.scale_a == Scale::kNone) tensors.scale_a = nullptr;
  if (problem_.scale_b == Scale::kNone) tensors.scale_b = nullptr;
  CheckTensors(tensors);
  const driver::DriverApi& api = driver::DriverApi::Get();
  const driver::ContextGuard context(api, problem_.device);
  for (const auto& [tensor, count] : epilogue_.minima) {
    const auto address = reinterpret_cast<CUdeviceptr>(addresses[order_.size() + tensor]);
    driver::Check("cuMemsetD32Async", api.cuMemsetD32Async(address, kMinusInfinity, count, stream));
  }
  const CUfunction function = cubin_.FunctionOn(api, context);
  // A thread that finds another one launching encodes for itself rather than wait: the driver may
  // hold the other one up until the stream's queue has room.
  const std::unique_lock<std::mutex> lock(memo_mutex_, std::try_to_lock);
  if (lock.owns_lock()) {
    const host_adapter::TensorMapMemo::Use use(*memo_);
    entry().launch(problem_, tensors, function, stream);
  } else {
    entry().launch(problem_, tensors, function, stream);
  }
}

}  // namespace stoneware::gemm
