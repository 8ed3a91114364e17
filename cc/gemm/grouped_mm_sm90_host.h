// The host side of grouped_mm_sm90.h: turns a problem into the kernel's parameters and launches it.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cc/driver/driver_api.h"
#include "cc/driver/launch.h"
#include "cc/gemm/epilogue_params.h"
#include "cc/gemm/grouped_mm_sm90.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/operand_map.h"

namespace stoneware::gemm::sm90 {

template <class Config>
struct GroupedMmHost {
  using Shape = GroupedMmShape<Config>;

  static constexpr std::size_t kParameterBytes = sizeof(GroupedMmParams);
  static constexpr std::size_t kOpenParameterBytes = sizeof(OpenParams<GroupedMmParams>);
  static constexpr unsigned kSharedBytes = Shape::kSharedBytes;
  static constexpr unsigned kThreads = Shape::kThreads;

  static bool CanImplement(const GemmProblem& problem) {
    const bool has_scales = problem.scale_a != Scale::kNone;
    const Scale scale = has_scales ? Scale::kRow : Scale::kNone;
    return problem.batch == 1 && problem.num_groups >= 1 && problem.num_groups <= kMaxGroups &&
           problem.splits == 1 && !problem.accumulate && problem.scale_a == scale &&
           problem.scale_b == scale &&
           // Tile counts and the coordinates of tiles that reach over an end are ints.
           MaxTiles(problem) <= std::numeric_limits<int>::max() / 2 &&
           problem.m <= std::numeric_limits<int>::max() / 2 &&
           problem.n <= std::numeric_limits<int>::max() / 2 &&
           problem.k <= std::numeric_limits<int>::max() / 2;
  }

  static void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
                     CUstream stream) {
    OpenParams<GroupedMmParams> params;  // a closed kernel takes the first part
    static_cast<GroupedMmParams&>(params) = {};
    CopyEpilogue(&params, tensors);
    EncodeOperandMap(Shape::kSwapAb ? &params.columns : &params.rows, Shape::kOperand, tensors.a,
                     problem.m, problem.k, problem.lda, Shape::kTileM);
    EncodeOperandMap(Shape::kSwapAb ? &params.rows : &params.columns, Shape::kOperand, tensors.b,
                     problem.n, problem.k, problem.ldb, Shape::kTileN, problem.num_groups,
                     problem.batch_stride_b);
    params.d = tensors.d;
    params.scale_a = static_cast<const float*>(tensors.scale_a);
    params.scale_b = static_cast<const float*>(tensors.scale_b);
    params.offsets = static_cast<const std::int32_t*>(tensors.offsets);
    params.ldd = problem.discards_d ? 0 : problem.ldd;
    params.m = problem.m;
    params.n = problem.n;
    params.k = problem.k;
    params.num_groups = problem.num_groups;
    params.band = kBand * problem.max_swizzle;

    const auto num_blocks =
        static_cast<unsigned>(std::min<std::int64_t>(problem.num_sms, MaxTiles(problem)));
    void* parameters[] = {&params};
    driver::Launch(driver::DriverApi::Get(), function,
                   {{num_blocks, 1, 1}, {1, 1, 1}, {kThreads, 1, 1}, kSharedBytes}, stream,
                   parameters);
  }

 private:
  // Tiles along m that share one tile of b before the next n is taken, at max_swizzle 1: with 132
  // SMs some 16 x 8 tiles run at once, whose operands are few.
  static constexpr int kBand = 16;

  // The most tiles that any offsets give: each group wastes less than one tile along m, and one
  // without rows has none.
  static std::int64_t MaxTiles(const GemmProblem& problem) {
    const std::int64_t m = problem.m;
    const std::int64_t m_tiles = std::min(m, m / Shape::kTileM + problem.num_groups);
    return m_tiles * NumTiles(problem.n, Shape::kTileN);
  }
};

}  // namespace stoneware::gemm::sm90
