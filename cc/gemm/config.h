// The words of a kernel's config, as C++ sees them.
//
// cubin_library generates one header for each kernel, <id>_config.h, from a config of
// gemm_configs.bzl:
//
//   namespace stoneware::gemm {
//   struct <id>_config {
//     static constexpr char kId[] = "<id>";
//     static constexpr char kOp[] = "scaled_mm";
//     static constexpr DType kA = DType::kE4M3;
//     ...
//     static constexpr bool kSwapAb = false;
//   };
//   }
//
// kId, kOp, kArch, kA, kB, kOut, kTileM, kTileN, kTileK, kSwapAb, kAIsMMajor and kBIsNMajor are in
// every config; which others there are, a family's header says. kTileM and kTileN belong to the
// product that is computed: with kSwapAb that is d^T = b^T a^T, and kTileM runs along the caller's
// n. kA is always the caller's a.
//
// A family has two class templates over such a struct, which the generated sources name:
//
//   Kernel<Config>   Params, the kernel's only parameter; kThreads, kSharedBytes, kSharedAlignment;
//                    static __device__ void Run(const Params&, char* shared).
//   Host<Config>     kParameterBytes, the size of Params; kThreads, kSharedBytes;
//                    static bool CanImplement(const GemmProblem&);
//                    static std::size_t WorkspaceBytes(const GemmProblem&);
//                    static void Launch(const GemmProblem&, const GemmTensors&, CUfunction,
//                                       CUstream);
//
// Only plain C++ here: it is read by nvcc, on both its sides, and by the host's compiler.

#pragma once

namespace stoneware::gemm {

enum class DType { kE4M3, kE5M2, kBF16, kFP16, kFP32 };

constexpr int BytesOf(DType dtype) {
  switch (dtype) {
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
    case DType::kBF16:
    case DType::kFP16:
      return 2;
    case DType::kFP32:
      return 4;
  }
  return 0;
}

// How warp groups and blocks share the tiles.
enum class Schedule {
  kCooperative,      // all warp groups that multiply share a tile
  kPingpong,         // two warp groups take turns, a tile each
  kWarpSpecialized,  // one warp group multiplies, a block has one tile
};

// Shared memory that a block may have on sm_90 (CUDA C++ Programming Guide, compute
// capability 9.0).
inline constexpr int kMaxSharedBytesSm90 = 227 * 1024;

}  // namespace stoneware::gemm
