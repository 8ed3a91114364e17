// What a kernel shows to the module that binds it: plain data and two functions.
//
// Each config becomes one KernelEntry, so the module knows no CUTLASS type. One problem and one set
// of tensors serve every family; what a family does not have stays at its default.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cc/gemm/config.h"

namespace stoneware::gemm {

// The order in which output tiles are visited, in the caller's orientation.
enum class Raster { kHeuristic, kAlongM, kAlongN };

// What a scale has an element for.
enum class Scale {
  kNone,
  kTensor,        // the whole operand
  kRow,           // each row of a, or each column of b
  kBlock1x128,    // each 128 elements of k of a row of a (or of a column of b)
  kBlock128x128,  // each block of 128 of k times 128 columns of b
};

// d[m, n] = scale_a * scale_b * sum_k a[m, k] * b[k, n] + bias[n], all in the caller's orientation:
// d row-major [m, n]; a [m, k] and b [k, n] as the kernel's KernelEntry says; strides in elements.
struct GemmProblem {
  int m = 0;  // of grouped_mm: the rows of all groups
  int n = 0;
  int k = 0;
  int batch = 1;         // products of this shape (matmul)
  int num_groups = 0;    // groups of rows of a, each with its own b (grouped_mm)
  std::int64_t lda = 0;  // from one row of a to the next; of an M-major a, from one k to the next
  std::int64_t ldb =
      0;  // from one column of b to the next; of an N-major b, from one k to the next
  std::int64_t ldd = 0;
  std::int64_t batch_stride_a = 0;  // 0: every product has the same a
  std::int64_t batch_stride_b = 0;  // of grouped_mm: from one group's b to the next
  std::int64_t batch_stride_d = 0;
  Scale scale_a = Scale::kNone;
  Scale scale_b = Scale::kNone;
  std::int64_t ld_scale_a = 0;  // of block scales: from one block of k to the next
  std::int64_t ld_scale_b = 0;
  int device = 0;
  int num_sms = 0;
  int max_swizzle = 1;
  Raster raster = Raster::kHeuristic;
  int splits = 1;  // blocks, or clusters, that share the k of one output tile
  // Of block scales: from the scale of one row of a, or 128 columns of b, to the next.
  std::int64_t scale_a_stride_m = 1;
  std::int64_t scale_b_stride_n = 1;
  std::int64_t group_stride_scale_b = 0;  // from one group's scales of b to the next (grouped_mm)
  // An open kernel stores d into one row again and again: what its epilogue stores is the result.
  bool discards_d = false;
  // d += instead of d =, for kernels that can.
  bool accumulate = false;
};

// Bytes of the parameters that a launch passes to the epilogue of an open kernel.
inline constexpr std::size_t kEpilogueBytes = 512;

// Device addresses, of one type so that a list can say which of them a launch passes.
struct GemmTensors {
  void* a = nullptr;
  void* b = nullptr;
  void* d = nullptr;
  void* scale_a = nullptr;  // fp32; nullptr for Scale::kNone
  void* scale_b = nullptr;
  void* bias = nullptr;     // [n], of d's dtype; may be absent
  void* offsets = nullptr;  // [num_groups] int32, the row after each group's last (grouped_mm)
  const void* epilogue = nullptr;  // kEpilogueBytes on the host for an open kernel; else nullptr
  void* workspace = nullptr;       // KernelEntry::workspace_bytes, whose content is not kept
};

struct KernelEntry {
  const char* id;           // also the kernel's symbol in the cubin
  const char* image_begin;  // the fat binary that has its cubin
  const char* image_end;
  std::size_t parameter_bytes;       // sizeof(Params), the kernel's only parameter
  std::size_t open_parameter_bytes;  // of the open kernel; 0 if the family has none
  unsigned shared_bytes;
  bool a_is_m_major;
  bool b_is_n_major;
  unsigned operand_bytes;  // of an element of a and of b
  unsigned out_bytes;      // of an element of d

  bool (*can_implement)(const GemmProblem& problem);
  std::size_t (*workspace_bytes)(const GemmProblem& problem);
  // Queues the kernel in the current context. Throws driver::DriverError. No allocation but of
  // counters (cc/driver/counters.h); the first launches with clusters of more than two blocks query
  // how many fit.
  void (*launch)(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
                 CUstream stream);
};

// The entry of a family's host side and one config. `image_begin` and `image_end`: the fat binary's
// first byte and the byte after its last, from the generated assembler file.
template <class Config, template <class> class Host>
constexpr KernelEntry MakeKernelEntry(const char* image_begin, const char* image_end) {
  static_assert(BytesOf(Config::kA) == BytesOf(Config::kB), "a and b have elements of one size");
  return {
      Config::kId,
      image_begin,
      image_end,
      Host<Config>::kParameterBytes,
      Host<Config>::kOpenParameterBytes,
      Host<Config>::kSharedBytes,
      Config::kAIsMMajor,
      Config::kBIsNMajor,
      BytesOf(Config::kA),
      BytesOf(Config::kOut),
      &Host<Config>::CanImplement,
      &Host<Config>::WorkspaceBytes,
      &Host<Config>::Launch,
  };
}

// The kernels of this module, from a generated file.
extern const KernelEntry* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

}  // namespace stoneware::gemm
