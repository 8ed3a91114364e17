// stoneware.ops._sm90: the Hopper kernels of every op with their cubins inside, compressed.
//
// Importing it makes no CUDA call. Every failed driver call is a stoneware.errors.DriverError; a
// problem that a kernel cannot compute is a ValueError.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cc/driver/python_binding.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace stoneware::gemm {
namespace {

// What `given` means among the words that an argument may be.
template <class Value, class Words = std::initializer_list<std::pair<const char*, Value>>>
Value OneOf(const char* name, const std::string& given, const Words& words) {
  std::string known;
  for (const auto& [word, value] : words) {
    if (given == word) return value;
    known.append(known.empty() ? "" : ", ").append(word);
  }
  throw std::invalid_argument(std::string(name) + " must be one of " + known + ", but is " + given +
                              "; choose one of them");
}

Raster ToRaster(const std::string& raster) {
  return OneOf<Raster>("raster", raster,
                       {{"heuristic", Raster::kHeuristic},
                        {"along_m", Raster::kAlongM},
                        {"along_n", Raster::kAlongN}});
}

Scale ToScale(const char* name, const std::string& scale) {
  return OneOf<Scale>(name, scale, kScales);
}

using Tensor = void* GemmTensors::*;

std::vector<Tensor> ToTensors(const std::vector<std::string>& names) {
  std::vector<Tensor> tensors;
  for (const std::string& name : names) {
    tensors.push_back(OneOf<Tensor>("a tensor", name,
                                    {{"a", &GemmTensors::a},
                                     {"b", &GemmTensors::b},
                                     {"out", &GemmTensors::d},
                                     {"scale_a", &GemmTensors::scale_a},
                                     {"scale_b", &GemmTensors::scale_b},
                                     {"bias", &GemmTensors::bias},
                                     {"offs", &GemmTensors::offsets}}));
  }
  return tensors;
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
    description["params_bytes"] = entry.parameter_bytes;
    description["shared_bytes"] = entry.shared_bytes;
    kernels.append(description);
  }
  return kernels;
}

nb::bytes Image(const std::string& kernel) {
  const KernelEntry& entry = FindKernel(kernel).entry;
  return nb::bytes(entry.image_begin,
                   static_cast<std::size_t>(entry.image_end - entry.image_begin));
}

void InitLinked(LinkedKernel* self, const std::string& kernel, nb::bytes cubin) {
  new (self) LinkedKernel(kernel, std::string(cubin.c_str(), cubin.size()));
}

void Init(Plan* self, const std::variant<std::string, std::shared_ptr<LinkedKernel>>& kernel,
          const std::vector<std::string>& tensors, std::int64_t m, std::int64_t n, std::int64_t k,
          std::int64_t lda, std::int64_t ldb, std::int64_t ldd, int device, int num_sms,
          const std::string& scale_a, const std::string& scale_b, std::int64_t ld_scale_a,
          std::int64_t ld_scale_b, std::int64_t batch, std::int64_t batch_stride_a,
          std::int64_t batch_stride_b, std::int64_t batch_stride_d, std::int64_t num_groups,
          int max_swizzle, const std::string& raster, int splits, std::int64_t scale_a_stride_m,
          std::int64_t scale_b_stride_n, std::int64_t group_stride_scale_b, nb::bytes epilogue,
          const std::vector<std::size_t>& pointers,
          const std::vector<std::pair<std::size_t, std::size_t>>& minima, bool discards_out,
          bool accumulate) {
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
  problem.group_stride_scale_b = group_stride_scale_b;
  problem.discards_d = discards_out;
  problem.accumulate = accumulate;
  if (const auto* const linked = std::get_if<std::shared_ptr<LinkedKernel>>(&kernel)) {
    new (self) Plan(*linked, ToTensors(tensors), problem,
                    {std::string(epilogue.c_str(), epilogue.size()), pointers, minima});
  } else {
    new (self) Plan(std::get<std::string>(kernel), ToTensors(tensors), problem);
  }
}

}  // namespace
}  // namespace stoneware::gemm

NB_MODULE(_sm90, m) {
  using namespace stoneware::gemm;
  // Torch keeps what was registered with it until the process ends, and plans with that.
  nb::set_leak_warnings(false);
  m.doc() = "Kernels for sm_90a by CUTLASS and in PTX, launched through the NVIDIA driver.";
  stoneware::driver::RegisterPythonErrors();
  EmbeddedKernels();

  m.def("kernels", &Kernels,
        "The kernels in this module, as dicts of id, params_bytes and shared_bytes. No CUDA call.");
  m.def("image", &Image, "kernel"_a,
        "The fat binary that has one kernel's cubin, compressed, as bytes. No CUDA call.\n"
        "Raises ValueError if the module has no such kernel.");

  nb::class_<LinkedKernel>(m, "LinkedKernel",
                           "An open kernel of this module, into which an epilogue was linked.")
      .def("__init__", &InitLinked, "kernel"_a, "cubin"_a,
           "No CUDA call.\n\n"
           "Args:\n"
           "  kernel: an id from kernels().\n"
           "  cubin: what nvJitLink made of its LTO-IR and an epilogue.\n\n"
           "Raises:\n"
           "  ValueError: the kernel has no open form, or the bytes are not a whole cubin.");

  nb::class_<Plan> plan(
      m, "Plan", "d[m, n] = scale_a * scale_b * (a[m, k] . b[k, n]) + bias[n] on one kernel.");
  plan.def(
      "__init__", &Init, "kernel"_a, nb::kw_only(), "tensors"_a, "m"_a, "n"_a, "k"_a, "lda"_a,
      "ldb"_a, "ldd"_a, "device"_a, "num_sms"_a, "scale_a"_a = "none", "scale_b"_a = "none",
      "ld_scale_a"_a = 0, "ld_scale_b"_a = 0, "batch"_a = 1, "batch_stride_a"_a = 0,
      "batch_stride_b"_a = 0, "batch_stride_d"_a = 0, "num_groups"_a = 0, "max_swizzle"_a = 1,
      "raster"_a = "heuristic", "splits"_a = 1, "scale_a_stride_m"_a = 1, "scale_b_stride_n"_a = 1,
      "group_stride_scale_b"_a = 0, "epilogue"_a = nb::bytes("", 0),
      "pointers"_a = std::vector<std::size_t>(),
      "minima"_a = std::vector<std::pair<std::size_t, std::size_t>>(), "discards_out"_a = false,
      "accumulate"_a = false,
      "Checks the problem; makes no CUDA call.\n\n"
      "Args:\n"
      "  kernel: an id from kernels(), or a LinkedKernel.\n"
      "  tensors: those of a, b, out (d), scale_a, scale_b, bias and offs (of a grouped product)\n"
      "    that a launch passes, in its order.\n"
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
      "    row of a, or of 128 columns of b, to the next.\n"
      "  group_stride_scale_b: elements from one group's scales of b to the next.\n"
      "  epilogue: of a LinkedKernel, the bytes of its parameters (cc/gemm/epilogue_sm90.h).\n"
      "  pointers: where in them the addresses of the epilogue's tensors go. A launch passes "
      "these\n"
      "    after `tensors`, and adds what the bytes have there.\n"
      "  minima: (position, elements) of those of the epilogue's tensors, of floats, that get\n"
      "    -infinity before the kernel.\n"
      "  discards_out: a LinkedKernel stores out into one row, again and again.\n"
      "  accumulate: out += d instead of out = d, for kernels that can.\n\n"
      "Raises:\n"
      "  ValueError: the kernel cannot compute the problem, or an argument is out of range.");
  stoneware::driver::BindLaunches(plan);
}
