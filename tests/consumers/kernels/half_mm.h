// d[m, n] = a[m, k] * b[k, n] in fp16, a and d row-major, b column-major, fp32 sums: CUTLASS's
// kernel for a config, as both sides see it.

#pragma once

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass/half.h"

namespace granite {

template <class Config>
using HalfMm = typename cutlass::gemm::kernel::DefaultGemm<
    cutlass::half_t, cutlass::layout::RowMajor, 8, cutlass::half_t, cutlass::layout::ColumnMajor, 8,
    cutlass::half_t, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, cutlass::gemm::GemmShape<Config::kTileM, Config::kTileN, 32>,
    cutlass::gemm::GemmShape<Config::kTileM / 2, Config::kTileN / 2, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<cutlass::half_t, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, Config::kStages, false,
    cutlass::arch::OpMultiplyAdd>::GemmKernel;

}  // namespace granite
