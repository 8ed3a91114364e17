// stoneware.ops.scaled_mm._cutlass_sm90: the CUTLASS kernels of scaled_mm with their cubins inside.
//
// Importing it makes no CUDA call. Every failed driver call is a stoneware.errors.DriverError; a
// problem that a kernel cannot compute is a ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <deque>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cc/driver/context.h"
#include "cc/driver/cubin_module.h"
#include "cc/driver/python_errors.h"
#include "cc/gemm/kernel_entry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace stoneware::gemm {
namespace {

// TMA's unit: addresses and strides are multiples of 16 bytes.
constexpr std::int64_t kTmaBytes = 16;
constexpr std::int64_t kOperandElementBytes = 1;  // fp8
constexpr std::int64_t kOutElementBytes = 2;      // bf16, fp16

// A kernel of this module and its loaded form, which all plans of it share.
struct EmbeddedKernel {
  explicit EmbeddedKernel(const KernelEntry& kernel_entry)
      : entry(kernel_entry),
        cubin({entry.id,
               {entry.cubin_begin, static_cast<std::size_t>(entry.cubin_end - entry.cubin_begin)},
               entry.id,
               {entry.parameter_bytes},
               entry.shared_bytes}) {}

  const KernelEntry& entry;
  driver::CubinKernel cubin;
};

// Filled by the module's initialisation, then only read. A deque, since a kernel cannot be moved.
// Never destroyed: a thread may launch while the process ends.
std::deque<EmbeddedKernel>& EmbeddedKernels() {
  static auto& kernels = *new std::deque<EmbeddedKernel>;
  return kernels;
}

EmbeddedKernel& FindKernel(const std::string& id) {
  std::string known;
  for (EmbeddedKernel& kernel : EmbeddedKernels()) {
    if (kernel.entry.id == id) return kernel;
    known.append(known.empty() ? "" : ", ").append(kernel.entry.id);
  }
  throw std::invalid_argument("kernel must be one of this module's (" + known + "), but is " + id +
                              "; take an id from kernels()");
}

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

void CheckLeadingDimension(const char* name, std::int64_t value, const char* extent_name,
                           std::int64_t extent, std::int64_t element_bytes) {
  if (value < extent) {
    Refuse(name, value,
           std::string("must be at least ") + extent_name + "=" + std::to_string(extent),
           "pass the stride of the tensor's rows in elements");
  }
  const std::int64_t multiple = kTmaBytes / element_bytes;
  if (value % multiple != 0) {
    Refuse(name, value,
           "must be a multiple of " + std::to_string(multiple) + " elements (16 bytes)",
           "copy the view into a contiguous tensor, or use another backend");
  }
}

Raster ToRaster(const std::string& raster) {
  if (raster == "heuristic") return Raster::kHeuristic;
  if (raster == "along_m") return Raster::kAlongM;
  if (raster == "along_n") return Raster::kAlongN;
  throw std::invalid_argument("raster must be heuristic, along_m or along_n, but is " + raster +
                              "; choose one of them");
}

// One problem on one kernel: checked once, then launched with nothing left to decide.
class Plan {
 public:
  Plan(const std::string& kernel, std::int64_t m, std::int64_t n, std::int64_t k,
       std::int64_t lda, std::int64_t ldb, std::int64_t ldd, bool vector_scale_a,
       bool vector_scale_b, int device, int num_sms, int max_swizzle, const std::string& raster)
      : kernel_(FindKernel(kernel)) {
    CheckExtent("m", m, 1);
    CheckExtent("n", n, 16);
    CheckExtent("k", k, 16);
    CheckLeadingDimension("lda", lda, "k", k, kOperandElementBytes);
    CheckLeadingDimension("ldb", ldb, "k", k, kOperandElementBytes);
    CheckLeadingDimension("ldd", ldd, "n", n, kOutElementBytes);
    if (device < 0) Refuse("device", device, "must not be negative", "pass the device's ordinal");
    if (num_sms < 1) Refuse("num_sms", num_sms, "must be positive", "pass the device's SM count");
    if (max_swizzle != 1 && max_swizzle != 2 && max_swizzle != 4 && max_swizzle != 8) {
      Refuse("max_swizzle", max_swizzle, "must be 1, 2, 4 or 8", "choose one of them");
    }
    problem_ = {static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), lda, ldb, ldd,
                vector_scale_a, vector_scale_b, device, num_sms, max_swizzle, ToRaster(raster)};

    const std::string shape = "m=" + std::to_string(m) + " n=" + std::to_string(n) +
                              " k=" + std::to_string(k);
    if (!entry().can_implement(problem_)) {
      throw std::invalid_argument("kernel " + kernel + " cannot compute " + shape +
                                  "; use another kernel or backend");
    }
    workspace_bytes_ = entry().workspace_bytes(problem_);
    if (workspace_bytes_ != 0) {
      throw std::invalid_argument("a plan must need no workspace, but kernel " + kernel +
                                  " needs " + std::to_string(workspace_bytes_) + " bytes for " +
                                  shape + "; use another kernel");
    }
  }

  void Launch(std::uint64_t a, std::uint64_t b, std::uint64_t d, std::uint64_t scale_a,
              std::uint64_t scale_b, std::uint64_t bias, std::uint64_t stream) const {
    CheckAddress("a", a, kTmaBytes);
    CheckAddress("b", b, kTmaBytes);
    CheckAddress("d", d, kTmaBytes);
    CheckAddress("scale_a", scale_a, sizeof(float));
    CheckAddress("scale_b", scale_b, sizeof(float));
    if (bias != 0) CheckAddress("bias", bias, kOutElementBytes);
    const ScaledMmTensors tensors = {
        reinterpret_cast<const void*>(a),        reinterpret_cast<const void*>(b),
        reinterpret_cast<void*>(d),              reinterpret_cast<const float*>(scale_a),
        reinterpret_cast<const float*>(scale_b), reinterpret_cast<const void*>(bias)};

    // The driver may wait for room in the stream's queue, and a callback that frees some may need
    // the interpreter.
    const nb::gil_scoped_release release;
    const driver::DriverApi& api = driver::DriverApi::Get();
    const driver::ContextGuard context(api, problem_.device);
    entry().launch(problem_, tensors, kernel_.cubin.FunctionIn(api, context),
                   reinterpret_cast<CUstream>(stream));
  }

  const char* kernel() const { return entry().id; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  const KernelEntry& entry() const { return kernel_.entry; }

  static void CheckAddress(const char* name, std::uint64_t address, std::uint64_t multiple) {
    if (address != 0 && address % multiple == 0) return;
    throw std::invalid_argument(std::string(name) + " must be a device address, a multiple of " +
                                std::to_string(multiple) + " bytes, but is " +
                                std::to_string(address) +
                                "; copy the view into a contiguous tensor");
  }

  EmbeddedKernel& kernel_;
  ScaledMmProblem problem_{};
  std::size_t workspace_bytes_ = 0;
};

nb::list Kernels() {
  nb::list kernels;
  for (const EmbeddedKernel& kernel : EmbeddedKernels()) {
    const KernelEntry& entry = kernel.entry;
    nb::dict description;
    description["id"] = entry.id;
    description["arch"] = entry.arch;
    description["params_bytes"] = entry.parameter_bytes;
    description["shared_bytes"] = entry.shared_bytes;
    description["block_threads"] = entry.block_threads;
    description["swap_ab"] = entry.swap_ab;
    kernels.append(description);
  }
  return kernels;
}

nb::bytes Cubin(const std::string& kernel) {
  const KernelEntry& entry = FindKernel(kernel).entry;
  return nb::bytes(entry.cubin_begin,
                   static_cast<std::size_t>(entry.cubin_end - entry.cubin_begin));
}

}  // namespace
}  // namespace stoneware::gemm

NB_MODULE(_cutlass_sm90, m) {
  using namespace stoneware::gemm;
  m.doc() = "CUTLASS kernels of scaled_mm for sm_90a, launched through the NVIDIA driver.";
  stoneware::driver::RegisterPythonErrors();
  for (std::size_t i = 0; i < kNumKernelEntries; ++i) {
    EmbeddedKernels().emplace_back(*kKernelEntries[i]);
  }

  m.def("kernels", &Kernels,
        "The kernels in this module, as dicts of id, arch, params_bytes, shared_bytes,\n"
        "block_threads and swap_ab. No CUDA call.");
  m.def("cubin", &Cubin, "kernel"_a,
        "The embedded cubin of one kernel, as bytes. No CUDA call.\n"
        "Raises ValueError if the module has no such kernel.");

  nb::class_<Plan>(m, "Plan",
                   "d[m, n] = scale_a * scale_b * (a[m, k] . b[k, n]) + bias[n] on one kernel.")
      .def(nb::init<const std::string&, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                    std::int64_t, std::int64_t, bool, bool, int, int, int, const std::string&>(),
           "kernel"_a, nb::kw_only(), "m"_a, "n"_a, "k"_a, "lda"_a, "ldb"_a, "ldd"_a,
           "vector_scale_a"_a, "vector_scale_b"_a, "device"_a, "num_sms"_a, "max_swizzle"_a = 1,
           "raster"_a = "heuristic",
           "Checks the problem; makes no CUDA call.\n\n"
           "Args:\n"
           "  kernel: an id from kernels().\n"
           "  m, n, k: extents; n and k multiples of 16.\n"
           "  lda, ldb, ldd: elements from one row of a (row-major), column of b (column-major)\n"
           "    and row of d (row-major) to the next; multiples of 16 bytes.\n"
           "  vector_scale_a: scale_a has m elements, else one.\n"
           "  vector_scale_b: scale_b has n elements, else one.\n"
           "  device: ordinal of the device.\n"
           "  num_sms: SMs to fill with blocks.\n"
           "  max_swizzle: output tiles taken together for the sake of the L2: 1, 2, 4 or 8.\n"
           "  raster: order of the output tiles: \"heuristic\", \"along_m\" or \"along_n\".\n\n"
           "Raises:\n"
           "  ValueError: the kernel cannot compute the problem, or an argument is out of range.")
      .def("__call__", &Plan::Launch, "a"_a, "b"_a, "d"_a, "scale_a"_a, "scale_b"_a, "bias"_a,
           "stream"_a,
           "Queues the product on `stream`. All arguments are ints: device addresses (bias 0\n"
           "means none) and a CUstream.\n"
           "Raises DriverError; ValueError if an address is missing or misaligned.")
      .def_prop_ro("kernel", &Plan::kernel, "The kernel's id.")
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes,
                   "Device memory that a call needs besides its tensors.");
}
