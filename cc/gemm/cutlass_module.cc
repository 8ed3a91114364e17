// stoneware.ops._cutlass_sm90: the CUTLASS kernels of every op with their cubins inside.
//
// Importing it makes no CUDA call. Every failed driver call is a stoneware.errors.DriverError; a
// problem that a kernel cannot compute is a ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cc/call/native_launch.h"
#include "cc/driver/python_errors.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace stoneware::gemm {
namespace {

Raster ToRaster(const std::string& raster) {
  if (raster == "heuristic") return Raster::kHeuristic;
  if (raster == "along_m") return Raster::kAlongM;
  if (raster == "along_n") return Raster::kAlongN;
  throw std::invalid_argument("raster must be heuristic, along_m or along_n, but is " + raster +
                              "; choose one of them");
}

Scale ToScale(const char* name, const std::string& scale) {
  if (scale == "none") return Scale::kNone;
  if (scale == "tensor") return Scale::kTensor;
  if (scale == "row") return Scale::kRow;
  if (scale == "block_1x128") return Scale::kBlock1x128;
  if (scale == "block_128x128") return Scale::kBlock128x128;
  throw std::invalid_argument(std::string(name) +
                              " must be none, tensor, row, block_1x128 or block_128x128, but is " +
                              scale + "; choose one of them");
}

// An extent, which CUTLASS counts in 32 bits.
int ToInt(const char* name, std::int64_t value) {
  if (value >= 0 && value <= INT32_MAX) return static_cast<int>(value);
  throw std::invalid_argument(std::string(name) + "=" + std::to_string(value) + " must be 1 to " +
                              std::to_string(INT32_MAX) + "; split the problem");
}

nb::list Kernels() {
  nb::list kernels;
  for (const EmbeddedKernel* kernel : EmbeddedKernels()) {
    const KernelEntry& entry = kernel->entry;
    nb::dict description;
    description["id"] = entry.id;
    description["op"] = entry.op;
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

void Init(Plan* self, const std::string& kernel, std::int64_t m, std::int64_t n, std::int64_t k,
          std::int64_t lda, std::int64_t ldb, std::int64_t ldd, int device, int num_sms,
          const std::string& scale_a, const std::string& scale_b, std::int64_t ld_scale_a,
          std::int64_t ld_scale_b, std::int64_t batch, std::int64_t batch_stride_a,
          std::int64_t batch_stride_b, std::int64_t batch_stride_d, std::int64_t num_groups,
          int max_swizzle, const std::string& raster, int splits, std::int64_t scale_a_stride_m,
          std::int64_t scale_b_stride_n) {
  GemmProblem problem;
  problem.m = ToInt("m", m);
  problem.n = ToInt("n", n);
  problem.k = ToInt("k", k);
  problem.batch = ToInt("batch", batch);
  problem.num_groups = ToInt("num_groups", num_groups);
  problem.lda = lda;
  problem.ldb = ldb;
  problem.ldd = ldd;
  problem.batch_stride_a = batch_stride_a;
  problem.batch_stride_b = batch_stride_b;
  problem.batch_stride_d = batch_stride_d;
  problem.scale_a = ToScale("scale_a", scale_a);
  problem.scale_b = ToScale("scale_b", scale_b);
  problem.ld_scale_a = ld_scale_a;
  problem.ld_scale_b = ld_scale_b;
  problem.device = device;
  problem.num_sms = num_sms;
  problem.max_swizzle = max_swizzle;
  problem.raster = ToRaster(raster);
  problem.splits = splits;
  problem.scale_a_stride_m = scale_a_stride_m;
  problem.scale_b_stride_n = scale_b_stride_n;
  new (self) Plan(kernel, problem);
}

void Call(const Plan& plan, std::uint64_t a, std::uint64_t b, std::uint64_t d,
          std::uint64_t scale_a, std::uint64_t scale_b, std::uint64_t bias, std::uint64_t stream,
          std::uint64_t offsets) {
  GemmTensors tensors;
  tensors.a = reinterpret_cast<const void*>(a);
  tensors.b = reinterpret_cast<const void*>(b);
  tensors.d = reinterpret_cast<void*>(d);
  tensors.scale_a = reinterpret_cast<const float*>(scale_a);
  tensors.scale_b = reinterpret_cast<const float*>(scale_b);
  tensors.bias = reinterpret_cast<const void*>(bias);
  tensors.offsets = reinterpret_cast<const std::int32_t*>(offsets);
  // The driver may wait for room in the stream's queue, and a callback that frees some may need the
  // interpreter.
  const nb::gil_scoped_release release;
  plan.Launch(tensors, reinterpret_cast<CUstream>(stream));
}

// A tensor of a plan by its place among a native launch's.
enum class Tensor { kA, kB, kD, kScaleA, kScaleB, kBias, kOffsets };

Tensor ToTensor(const std::string& name) {
  constexpr std::array<const char*, 7> kNames = {"a",       "b",    "d",      "scale_a",
                                                 "scale_b", "bias", "offsets"};
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Tensor>(i);
  }
  throw std::invalid_argument(
      "tensors must be of a, b, d, scale_a, scale_b, bias and offsets, but "
      "has " +
      name + "; name each argument of the plan");
}

struct PlanLaunch : call::NativeLaunch {
  const Plan* plan;
  nb::object owner;  // of the plan
  std::vector<Tensor> order;
};

int LaunchPlan(const call::NativeLaunch* self, void* const* tensors, void* stream) {
  const auto& launch = *static_cast<const PlanLaunch*>(self);
  GemmTensors found;
  for (std::size_t i = 0; i < launch.order.size(); ++i) {
    switch (launch.order[i]) {
      case Tensor::kA:
        found.a = tensors[i];
        break;
      case Tensor::kB:
        found.b = tensors[i];
        break;
      case Tensor::kD:
        found.d = tensors[i];
        break;
      case Tensor::kScaleA:
        found.scale_a = static_cast<const float*>(tensors[i]);
        break;
      case Tensor::kScaleB:
        found.scale_b = static_cast<const float*>(tensors[i]);
        break;
      case Tensor::kBias:
        found.bias = tensors[i];
        break;
      case Tensor::kOffsets:
        found.offsets = static_cast<const std::int32_t*>(tensors[i]);
        break;
    }
  }
  try {
    // As in Call. The exception is caught with the GIL held again.
    const nb::gil_scoped_release release;
    launch.plan->Launch(found, static_cast<CUstream>(stream));
    return 0;
  } catch (const driver::DriverError& error) {
    driver::SetPythonError(error);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return -1;
}

nb::capsule NativeLaunchOf(nb::handle owner, const std::vector<std::string>& tensors) {
  const auto& plan = nb::cast<const Plan&>(owner);
  auto launch = std::make_unique<PlanLaunch>();
  launch->launch = &LaunchPlan;
  launch->num_tensors = static_cast<std::uint32_t>(tensors.size());
  launch->plan = &plan;
  launch->owner = nb::borrow(owner);
  for (const std::string& name : tensors) launch->order.push_back(ToTensor(name));
  const call::NativeLaunch* shown = launch.get();
  nb::capsule capsule(shown, call::kNativeLaunchCapsule, [](void* pointer) noexcept {
    delete static_cast<PlanLaunch*>(static_cast<call::NativeLaunch*>(pointer));
  });
  launch.release();
  return capsule;
}

}  // namespace
}  // namespace stoneware::gemm

NB_MODULE(_cutlass_sm90, m) {
  using namespace stoneware::gemm;
  // Torch keeps what was registered with it until the process ends, and plans with that.
  nb::set_leak_warnings(false);
  m.doc() = "CUTLASS kernels for sm_90a, launched through the NVIDIA driver.";
  stoneware::driver::RegisterPythonErrors();
  EmbeddedKernels();

  m.def("kernels", &Kernels,
        "The kernels in this module, as dicts of id, op, arch, params_bytes, shared_bytes,\n"
        "block_threads and swap_ab. No CUDA call.");
  m.def("cubin", &Cubin, "kernel"_a,
        "The embedded cubin of one kernel, as bytes. No CUDA call.\n"
        "Raises ValueError if the module has no such kernel.");

  nb::class_<Plan>(m, "Plan",
                   "d[m, n] = scale_a * scale_b * (a[m, k] . b[k, n]) + bias[n] on one kernel.")
      .def(
          "__init__", &Init, "kernel"_a, nb::kw_only(), "m"_a, "n"_a, "k"_a, "lda"_a, "ldb"_a,
          "ldd"_a, "device"_a, "num_sms"_a, "scale_a"_a = "none", "scale_b"_a = "none",
          "ld_scale_a"_a = 0, "ld_scale_b"_a = 0, "batch"_a = 1, "batch_stride_a"_a = 0,
          "batch_stride_b"_a = 0, "batch_stride_d"_a = 0, "num_groups"_a = 0, "max_swizzle"_a = 1,
          "raster"_a = "heuristic", "splits"_a = 1, "scale_a_stride_m"_a = 1,
          "scale_b_stride_n"_a = 1,
          "Checks the problem; makes no CUDA call.\n\n"
          "Args:\n"
          "  kernel: an id from kernels().\n"
          "  m, n, k: extents; n, k unless a is M-major and b N-major, and m of an M-major a,\n"
          "    multiples of 16 bytes.\n"
          "  lda, ldb, ldd: elements from one row of a (row-major), column of b (column-major)\n"
          "    and row of d (row-major) to the next, or, of an M-major a or an N-major b, from\n"
          "    one k to the next; multiples of 16 bytes.\n"
          "  device: ordinal of the device.\n"
          "  num_sms: SMs to fill with blocks.\n"
          "  scale_a, scale_b: \"none\", \"tensor\" (one element), \"row\" (m, or n, elements),\n"
          "    \"block_1x128\" or \"block_128x128\".\n"
          "  ld_scale_a, ld_scale_b: of block scales, elements from one block of k to the next.\n"
          "  batch: products of this shape.\n"
          "  batch_stride_a, batch_stride_b, batch_stride_d: elements from one product's tensor\n"
          "    to the next one's; 0 for one that all share.\n"
          "  num_groups: groups of rows of a, each with its own b; 0 if it is no grouped product.\n"
          "  max_swizzle: output tiles taken together for the sake of the L2: 1, 2, 4 or 8.\n"
          "  raster: order of the output tiles: \"heuristic\", \"along_m\" or \"along_n\".\n"
          "  splits: blocks that share the k of one output tile, for kernels that can.\n"
          "  scale_a_stride_m, scale_b_stride_n: of block scales, elements from the scale of one\n"
          "    row of a, or of 128 columns of b, to the next.\n\n"
          "Raises:\n"
          "  ValueError: the kernel cannot compute the problem, or an argument is out of range.")
      .def("__call__", &Call, "a"_a, "b"_a, "d"_a, "scale_a"_a, "scale_b"_a, "bias"_a, "stream"_a,
           "offsets"_a = 0,
           "Queues the product on `stream`. All arguments are ints: device addresses (0 means\n"
           "none) and a CUstream; `offsets` of a grouped product.\n"
           "Raises DriverError; ValueError if an address is missing or misaligned.")
      .def("native_launch", &NativeLaunchOf, nb::is_method(), "tensors"_a,
           "A capsule by which another native module launches the plan (cc/call/native_launch.h).\n"
           "Keeps the plan alive.\n\n"
           "Args:\n"
           "  tensors: a, b, d, scale_a, scale_b, bias and offsets, as many as the plan takes, in\n"
           "    the order in which the caller has them.\n\n"
           "Raises:\n"
           "  ValueError: there is no such tensor.")
      .def_prop_ro("kernel", [](const Plan& plan) { return plan.entry().id; }, "The kernel's id.");
}
