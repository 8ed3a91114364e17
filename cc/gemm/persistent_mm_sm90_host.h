// The host side of persistent_mm_sm90.h: tensor maps, parameters, launch.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cc/driver/counters.h"
#include "cc/driver/driver_api.h"
#include "cc/driver/launch.h"
#include "cc/gemm/epilogue_params.h"
#include "cc/gemm/fast_divmod.h"
#include "cc/gemm/grouped_tiles.h"
#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/operand_map.h"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/host_adapter/tensor_map_memo.h"

namespace stoneware::gemm::sm90 {

template <class Config>
struct PersistentMmHost {
  using Shape = PersistentMmShape<Config>;
  using Params = typename Shape::Params;

  static constexpr std::size_t kParameterBytes = sizeof(Params);
  static constexpr std::size_t kOpenParameterBytes = sizeof(OpenParams<Params>);
  static constexpr unsigned kSharedBytes = Shape::kSharedBytes;
  static constexpr unsigned kThreads = Shape::kThreads;

  static bool CanImplement(const GemmProblem& problem) {
    const std::int64_t num_tiles = MaxTiles(problem);
    // An int must hold where the tiles of a cluster would end if the last did not begin early.
    const auto fits = [](int extent, int tile) {
      return std::int64_t{CeilDiv(extent, tile)} * tile <= std::numeric_limits<int>::max();
    };
    return fits(problem.m, kClusterM) && fits(problem.n, kClusterN) &&
           fits(problem.k, Shape::kTileK) && problem.batch == 1 && HasGroups(problem) &&
           HasScales(problem) && (Shape::kFloatOut || !problem.accumulate) &&
           Shape::CanSplit(problem.splits) && problem.splits <= CeilDiv(problem.k, Shape::kTileK) &&
           // Blocks along x are counted in an int.
           num_tiles * problem.splits <= std::numeric_limits<int>::max() &&
           (!SharesGrid(problem) ||
            (num_tiles * Shape::kSharingBlocks <= driver::kCountersPerLaunch &&
             WorkspaceBytes(problem) <= kMaxWorkspaceBytes));
  }

  static std::size_t WorkspaceBytes(const GemmProblem& problem) {
    if (!SharesGrid(problem)) return 0;
    return static_cast<std::size_t>(MaxTiles(problem) * problem.splits * Shape::kSharingBlocks) *
           Shape::kGridPartBytes;
  }

  static void Launch(const GemmProblem& problem, const GemmTensors& tensors, CUfunction function,
                     CUstream stream) {
    OpenParams<Params> params;  // a closed kernel takes the first part
    CopyEpilogue(&params, tensors);
    EncodeMaps(&params, problem, tensors);
    SetTensors(&params, problem, tensors);
    SetTiles(&params, problem);

    const driver::DriverApi& api = driver::DriverApi::Get();
    if constexpr (Shape::kSharesGrid) {
      params.partial_sums = tensors.workspace;
      params.arrivals = problem.splits == 1
                            ? nullptr
                            : reinterpret_cast<unsigned*>(driver::CountersFor(api, stream));
    }
    const int splits_of_cluster = SharesGrid(problem) ? 1 : problem.splits;
    const auto cluster_size = static_cast<unsigned>(splits_of_cluster * Shape::kSharingBlocks);
    driver::LaunchShape shape{
        {cluster_size, 1, 1}, {cluster_size, 1, 1}, {kThreads, 1, 1}, kSharedBytes};
    int num_clusters = params.num_tiles;
    if (SharesGrid(problem)) num_clusters *= problem.splits;
    if (problem.splits == 1 && problem.num_sms > 0) {
      int slots = std::max(problem.num_sms * kBlocksPerSm / Shape::kSharingBlocks, 1);
      // A cluster that waits for a place would begin when others have done all of their tiles. Of
      // two blocks as many fit as there are pairs of SMs.
      if constexpr (Shape::kSharingBlocks > 2 && kBlocksPerSm == 1) {
        slots = std::clamp(driver::ClustersAtOnce(api, function, shape), 1, slots);
      }
      if constexpr (Shape::kGroups) {
        num_clusters = std::min(slots, params.num_tiles);
      } else {
        // As few blocks as finish in the same number of waves.
        const int waves = CeilDiv(params.num_tiles, slots);
        num_clusters = CeilDiv(params.num_tiles, waves);
      }
    }
    void* parameters[] = {&params};
    shape.grid.x = static_cast<unsigned>(num_clusters) * cluster_size;
    driver::Launch(api, function, shape, stream, parameters);
  }

 private:
  // An SM has 228 KiB of shared memory, of which the system takes 1 KiB per block (CUDA C++
  // Programming Guide, compute capability 9.0).
  static constexpr int kBlocksPerSm = 228 * 1024 / (Shape::kSharedBytes + 1024);

  // Of _MAX_WORKSPACE_BYTES of kernels/split_k.py.
  static constexpr std::size_t kMaxWorkspaceBytes = 64 << 20;

  // Rows of a and columns of b of a cluster's tiles, which are counted together.
  static constexpr int kClusterM = Shape::kTileM * Shape::kBlocksAlongM;
  static constexpr int kClusterN = Shape::kTileN * Shape::kBlocksAlongN;

  // Rows of a that are multiplied with all of b before the next rows: they fit L2, and have enough
  // tiles for all SMs.
  static constexpr int kBandM = 2048;

  // Tiles of groups along m that share one tile of b before the next n is taken: with 132 SMs some
  // 16 x 8 tiles run at once, whose operands are few.
  static constexpr int kBandOfGroup = 16;

  // Whether clusters share the k of a tile, through the workspace.
  static bool SharesGrid(const GemmProblem& problem) {
    return Shape::kSharesGrid && problem.splits > 1;
  }

  static int CeilDiv(int numerator, int denominator) { return (numerator - 1) / denominator + 1; }

  static bool HasGroups(const GemmProblem& problem) {
    if (!Shape::kGroups) return problem.num_groups == 0;
    // A tile that begins before m ends may reach beyond it, from any row.
    return problem.num_groups >= 1 && problem.num_groups <= kMaxGroups &&
           problem.m <= std::numeric_limits<int>::max() - Shape::kTileM;
  }

  // Tiles of d, of a cluster. With groups the most that any offsets give: each group wastes less
  // than one tile along m, and one without rows has none.
  static std::int64_t MaxTiles(const GemmProblem& problem) {
    const std::int64_t m_tiles =
        Shape::kGroups
            ? std::min<std::int64_t>(problem.m, problem.m / Shape::kTileM + problem.num_groups)
            : CeilDiv(problem.m, kClusterM);
    return m_tiles * CeilDiv(problem.n, kClusterN);
  }

  static bool HasScales(const GemmProblem& problem) {
    const auto is_plain = [](Scale scale) {
      return scale == Scale::kNone || scale == Scale::kTensor || scale == Scale::kRow;
    };
    if (Shape::kBlockScales) {
      return problem.scale_a == Scale::kBlock1x128 && problem.scale_b == Scale::kBlock128x128;
    }
    if (!Shape::kHasVectorScales) {
      return problem.scale_a == Scale::kNone && problem.scale_b == Scale::kNone;
    }
    if (Shape::kGroups) {
      return problem.scale_a == problem.scale_b &&
             (problem.scale_a == Scale::kNone || problem.scale_a == Scale::kRow);
    }
    return is_plain(problem.scale_a) && is_plain(problem.scale_b);
  }

  // The map of d, in boxes of `box_m` by `box_n`.
  static void EncodeResult(CUtensorMap* map, const GemmProblem& problem, void* d, int box_m,
                           int box_n) {
    // TMA stores no row beyond the last: of a d that is discarded, the first alone.
    const cuuint64_t extents[] = {static_cast<cuuint64_t>(problem.n),
                                  static_cast<cuuint64_t>(problem.discards_d ? 1 : problem.m)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(problem.ldd) * Shape::kOutBytes};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(box_n), static_cast<cuuint32_t>(box_m)};
    const cuuint32_t element_strides[] = {1, 1};
    // As Boxes::ChunkAt has them.
    const int row_bytes = box_n * Shape::kOutBytes;
    const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE;
    constexpr CUtensorMapDataType kType =
        Shape::kFloatOut ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
    host_adapter::EncodeTiled(map, kType, 2, d, extents, strides, box, element_strides,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                              CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }

  // The map of an operand of `rows` rows, in boxes as OperandBoxes says.
  template <class Boxes>
  static void EncodeMap(CUtensorMap* map, DType dtype, const void* address, int rows, int k,
                        std::int64_t stride, int num_matrices = 0, std::int64_t matrix_stride = 0) {
    if constexpr (Boxes::kContiguous > 0) {
      EncodeOperandMap(map, dtype, address, k, rows, stride, Boxes::kKOfBox, Boxes::kRowsOfBox * 2);
    } else {
      EncodeOperandMap(map, dtype, address, rows, k, stride, Boxes::RowsOfBox(rows),
                       Boxes::kChunkBytes, num_matrices, matrix_stride);
    }
  }

  static void EncodeMaps(Params* params, const GemmProblem& problem, const GemmTensors& tensors) {
    EncodeMap<typename Shape::BoxesOfB>(&params->b_map, Shape::kB, tensors.b, problem.n, problem.k,
                                        problem.ldb, problem.num_groups, problem.batch_stride_b);
    EncodeMap<typename Shape::BoxesOfA>(&params->a_map, Shape::kA, tensors.a, problem.m, problem.k,
                                        problem.lda);
    if (Shape::kStoresBoxes && (problem.splits == 1 || Shape::kSplitsStoreBoxes)) {
      EncodeResult(&params->d_map, problem, tensors.d, Shape::kBoxM, Shape::kBoxN);
    }
    // The loader prefetches it in any case.
    if constexpr (Shape::kSmallerBoxes) {
      constexpr int kLast = Shape::kLastBoxColumns;
      EncodeResult(&params->smaller_d_map, problem, tensors.d,
                   Shape::kSwapAb ? kLast : Shape::kBoxM, Shape::kSwapAb ? Shape::kBoxN : kLast);
    }
  }

  static void SetTensors(Params* params, const GemmProblem& problem, const GemmTensors& tensors) {
    if constexpr (Shape::kFetchesAhead) {
      params->b = tensors.b;
      params->ldb_bytes = problem.ldb * Shape::kOperandBytes;
    }
    if constexpr (Shape::kGroups) {
      params->offsets = static_cast<const std::int32_t*>(tensors.offsets);
      params->group_stride_scale_b = problem.group_stride_scale_b;
      params->num_groups = problem.num_groups;
    }
    if constexpr (Shape::kFloatOut) params->accumulate = problem.accumulate;
    if constexpr (Shape::kSharesColumns || Shape::kSharesGrid) {
      params->splits = FastDivmod(problem.splits);
    }
    params->d = tensors.d;
    params->scale_a = static_cast<const float*>(tensors.scale_a);
    params->scale_b = static_cast<const float*>(tensors.scale_b);
    params->bias = tensors.bias;
    params->ldd = problem.discards_d ? 0 : problem.ldd;
    if constexpr (Shape::kBlockScales) {
      params->scale_a_stride = problem.scale_a_stride_m;
      params->scale_b_stride = problem.scale_b_stride_n;
      params->ld_scale_a = problem.ld_scale_a;
      params->ld_scale_b = problem.ld_scale_b;
    } else {
      params->scale_a_stride = problem.scale_a == Scale::kRow;
      params->scale_b_stride = problem.scale_b == Scale::kRow;
      params->ld_scale_a = params->ld_scale_b = 0;
    }
  }

  static void SetTiles(Params* params, const GemmProblem& problem) {
    params->m = problem.m;
    params->n = problem.n;
    params->k = problem.k;
    params->stage_bytes =
        Shape::kChunks * (Shape::BoxesOfA::BytesOfChunk(problem.m) * Shape::kPartsOfA +
                          Shape::BoxesOfB::BytesOfChunk(problem.n));
    params->rows_of_a_box = Shape::BoxesOfA::RowsOfBox(problem.m);
    params->rows_of_b_box = Shape::BoxesOfB::RowsOfBox(problem.n);
    params->num_k_tiles = CeilDiv(problem.k, Shape::kTileK);
    params->num_tiles = static_cast<int>(MaxTiles(problem));
    // The mean of the groups.
    const int m = Shape::kGroups ? CeilDiv(problem.m, problem.num_groups) : problem.m;
    params->num_m_tiles = CeilDiv(m, kClusterM);
    const int num_n_tiles = CeilDiv(problem.n, kClusterN);
    const int band = Shape::kGroups
                         ? kBandOfGroup
                         : std::min(std::max(kBandM / kClusterM, 1), params->num_m_tiles);
    params->last_band = (params->num_m_tiles - 1) / band;
    params->tiles_of_band = FastDivmod(band * num_n_tiles);
    params->height_of_band = FastDivmod(band);
    params->height_of_last_band = FastDivmod(params->num_m_tiles - params->last_band * band);
  }
};

}  // namespace stoneware::gemm::sm90
