// fp8 matrix product with block scales for Hopper, one instance for each config.
//
//   d[m, n] = sum_j scale_a[m, j] * scale_b[j, n / 128] * sum_{k of block j} a[m, k] * b[k, n]
//             + bias[n],    block j of k = 128 j ... 128 j + 127
//
//   tensor    shape                     stride           dtype
//   a         [m, k]                    [lda, 1]         Config::kA (fp8)
//   b         [k, n]                    [1, ldb]         Config::kB (fp8)
//   d         [m, n]                    [ldd, 1]         Config::kOut (bf16, fp16 or fp32)
//   scale_a   [m, k / 128]              any              fp32
//   scale_b   [k / 128, ceil(n / 128)]  any              fp32
//   bias      [n] or null               [1]              Config::kOut
//
// The accumulator is fp32: the tensor core sums one block of k, and then that sum, times its
// scales, is added to a second set of registers in full fp32. A thread therefore holds two
// accumulators per element of its tile. The bias is added in fp32.
//
// The grid covers output tiles of kTileM x kTileN; it is persistent, at most one
// block per SM, each walking over tiles. Blocks of a cluster share the tiles that TMA multicasts.
//
// What makes it fast: one warp keeps TMA loads of a and b in flight and a second one copies of the
// scales, so that no multiplying warp waits for a scale; two warp groups take turns (pingpong) or
// share a tile (cooperative), so that one multiplies while the other scales. With kSwapAb
// it computes d^T = b^T a^T, so that a small m takes the side of the tile that may be as narrow as
// 8 (wgmma's n), where m would be padded to 64.
//
// Scales are copied element by element, each guarded by the bounds of its tensor: any strides will
// do, and nothing past the last row is read.
//
// Beside what every config has (config.h): kClusterM, kClusterN and kSchedule (kPingpong or
// kCooperative).

#pragma once

#include "cc/gemm/cutlass_kernel_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Elements of k, and columns of b, that share a scale.
inline constexpr int kScaleBlock = 128;

// Scales as functions of an element's place, ((element, block), (element of k, block of k), batch),
// with stride 0 inside a block. Strides known at run time only keep CUTLASS from loading scales by
// TMA, which would want 16-byte alignment.
using BlocksOfK = cute::Shape<cute::Int<kScaleBlock>, int>;
using BlocksOfKStride = cute::Stride<cute::_0, std::int64_t>;

// Along the caller's m: a scale for each row.
using RowwiseScales =
    cute::Layout<cute::Shape<cute::Shape<cute::_1, int>, BlocksOfK, int>,
                 cute::Stride<cute::Stride<cute::_0, std::int64_t>, BlocksOfKStride, std::int64_t>>;

// Along the caller's n: a scale for each kScaleBlock columns. A tile has whole scales, so that a
// narrower one has its own granularity, and kTilesPerBlock tiles in turn have the same scale.
template <class Config>
struct BlockwiseScales {
  static constexpr int kTileAlongN = Config::kSwapAb ? Config::kTileM : Config::kTileN;
  static constexpr int kGranularity = kTileAlongN < kScaleBlock ? kTileAlongN : kScaleBlock;
  static_assert(kScaleBlock % kGranularity == 0 && kTileAlongN % kGranularity == 0,
                "a tile must have whole blocks along n, or divide one");
  static constexpr int kTilesPerBlock = kScaleBlock / kGranularity;
  using Layout = cute::Layout<
      cute::Shape<cute::Shape<cute::Int<kGranularity>, cute::Shape<cute::Int<kTilesPerBlock>, int>>,
                  BlocksOfK, int>,
      cute::Stride<cute::Stride<cute::_0, cute::Stride<cute::_0, std::int64_t>>, BlocksOfKStride,
                   std::int64_t>>;
};

// CUTLASS's builder takes layouts of its own form only, from which it reads the granularities; the
// main loop itself takes any. So it is built for such layouts, and then given ours.
template <int kGranularityAlongTile>
using FormOfBuilder =
    cute::Layout<cute::Shape<cute::Shape<cute::Int<kGranularityAlongTile>, int>, BlocksOfK, int>,
                 cute::Stride<cute::Stride<cute::_0, std::int64_t>, BlocksOfKStride, std::int64_t>>;

template <class Mainloop, class RowScales, class ColumnScales>
struct WithScaleLayouts;

template <class Policy, class Tile, class A, class StrideA, class B, class StrideB, class... Rest,
          class RowScales, class ColumnScales>
struct WithScaleLayouts<
    cutlass::gemm::collective::CollectiveMma<Policy, Tile, A, StrideA, B, StrideB, Rest...>,
    RowScales, ColumnScales> {
  using Type = cutlass::gemm::collective::CollectiveMma<
      Policy, Tile, A, cute::tuple<cute::tuple_element_t<0, StrideA>, RowScales>, B,
      cute::tuple<cute::tuple_element_t<0, StrideB>, ColumnScales>, Rest...>;
};

template <class Config>
struct ScaledMmBlockTypes : CutlassTypes<Config> {
  using Base = CutlassTypes<Config>;
  static_assert(Config::kTileK == kScaleBlock);
  static_assert(Config::kSchedule == Schedule::kPingpong ||
                Config::kSchedule == Schedule::kCooperative);

  static constexpr bool kSwapAb = Config::kSwapAb;
  static constexpr int kGranularity = BlockwiseScales<Config>::kGranularity;
  using ScalesOfB = typename BlockwiseScales<Config>::Layout;
  using RowScales = cute::conditional_t<kSwapAb, ScalesOfB, RowwiseScales>;
  using ColumnScales = cute::conditional_t<kSwapAb, RowwiseScales, ScalesOfB>;

  using MainloopSchedule =
      cute::conditional_t<Config::kSchedule == Schedule::kCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise>;
  using Epilogue = typename Base::template Epilogue<typename Base::Biased>;
  using BuiltMainloop = typename Base::template Mainloop<
      MainloopSchedule,
      cute::tuple<cutlass::layout::RowMajor, FormOfBuilder<kSwapAb ? kGranularity : 1>>,
      cute::tuple<cutlass::layout::ColumnMajor, FormOfBuilder<kSwapAb ? 1 : kGranularity>>,
      Epilogue>;
  using Mainloop = typename WithScaleLayouts<BuiltMainloop, RowScales, ColumnScales>::Type;
  using Cutlass = typename Base::template Kernel<Mainloop, Epilogue>;
};

template <class Config>
struct ScaledMmBlockKernel : CutlassKernel<typename ScaledMmBlockTypes<Config>::Cutlass> {};

}  // namespace stoneware::gemm::sm90
