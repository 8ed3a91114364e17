// What a scaled_mm kernel shows to the module that binds it: plain data and four functions.
//
// Each config is compiled into one KernelEntry (scaled_mm_sm90.cc), so the module knows no CUTLASS
// type, and the types of two configs never meet in one translation unit.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace stoneware::gemm {

// The order in which output tiles are visited, in the caller's orientation.
enum class Raster { kHeuristic, kAlongM, kAlongN };

// d[m, n] = scale_a * scale_b * sum_k a[m, k] * b[k, n] + bias[n], all in the caller's orientation:
// a row-major [m, k], b column-major [k, n], d row-major [m, n]; leading dimensions in elements.
struct ScaledMmProblem {
  int m;
  int n;
  int k;
  std::int64_t lda;
  std::int64_t ldb;
  std::int64_t ldd;
  bool vector_scale_a;  // scale_a has m elements, else one
  bool vector_scale_b;  // scale_b has n elements, else one
  int device;
  int num_sms;
  int max_swizzle;
  Raster raster;
};

// Device pointers. Scales are fp32; bias has the dtype of d and n elements, or is nullptr.
struct ScaledMmTensors {
  const void* a;
  const void* b;
  void* d;
  const float* scale_a;
  const float* scale_b;
  const void* bias;
};

struct KernelEntry {
  const char* id;  // also the kernel's symbol in the cubin
  const char* arch;
  const char* cubin_begin;
  const char* cubin_end;
  std::size_t parameter_bytes;  // sizeof(Params), the kernel's only parameter
  unsigned shared_bytes;
  unsigned block_threads;
  bool swap_ab;

  bool (*can_implement)(const ScaledMmProblem& problem);
  std::size_t (*workspace_bytes)(const ScaledMmProblem& problem);
  // Queues the kernel in the current context. Throws driver::DriverError. No allocation, no query.
  void (*launch)(const ScaledMmProblem& problem, const ScaledMmTensors& tensors,
                 CUfunction function, CUstream stream);
};

// The kernels of this module, from a generated file.
extern const KernelEntry* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

}  // namespace stoneware::gemm
