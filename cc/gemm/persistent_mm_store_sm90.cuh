// What persistent_mm does with a tile's sums once they are added up: scales, rounds, stores.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/gemm/epilogue_sm90.h"
#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_boxes_sm90.cuh"
#include "cc/gemm/persistent_mm_groups_sm90.cuh"
#include "cc/gemm/persistent_mm_partial_sums_sm90.cuh"
#include "cc/gemm/persistent_mm_registers_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"
#include "cc/gemm/transpose_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Scales, rounds and stores a tile, whose sums a thread holds as wgmma_sm90.cuh says. With
// kUsesBoxes it goes by way of shared memory, else 8 neighbours in n at a time.
template <class Shape, bool kUsesBoxes>
class TileStore {
 public:
  using Params = typename Shape::Params;

  __device__ TileStore(const Params& params, const SharedMemory<Shape>& shared,
                       const TileOffset<Shape>& offset, int tile_idx, bool is_last_tile)
      : params_(params),
        offset_(offset),
        scales_a_(shared.ScalesOfA(tile_idx)),
        scales_b_(shared.ScalesOfB(tile_idx)),
        biases_(shared.Biases(tile_idx)),
        boxes_(shared, warp_group_, tile_idx, kUsesBoxes && kUsesStages && is_last_tile) {}

  __device__ void Run(const float (&sums)[Shape::kRowSteps][Shape::kSums]) {
    if constexpr (kStoresAtOnce) boxes_.BeginAll();
#pragma unroll
    for (int step = 0; step < Shape::kRowSteps; ++step) {
      if constexpr (Shape::kHasHalves) {
        if (step > 0 && offset_.is_half) continue;  // not break: sums would be in local memory
      }
      const int row = (step * Shape::kGroupsOfTile + group_of_tile_) * 64 + warp_ * 16;
      if constexpr (Shape::kSwapAb) {
        StoreTransposed(sums[step], row);
      } else if constexpr (kUsesBoxes) {
        StoreStraight(sums[step], row);
      } else {
        StoreStraightRuns(sums[step], row);
      }
    }
    if constexpr (kStoresAtOnce) {
      boxes_.SendAll([&] {
#pragma unroll
        for (int step = 0; step < Shape::kRowSteps; ++step) {
          if constexpr (Shape::kHasHalves) {
            if (step > 0 && offset_.is_half) continue;
          }
          int m = offset_.m + (step * Shape::kGroupsOfTile + group_of_tile_) * 64;
          // As in Send; a function of both would make the LTO-IR of each open kernel larger.
          if (m + Shape::kBoxM <= BeginM()) m = EndM();
#pragma unroll
          for (int column = 0; column < Shape::kColumns; column += Shape::kBoxColumns) {
            const bool is_whole = column + Shape::kBoxColumns <= Shape::kColumns;
            boxes_.SendNext(MapOf(is_whole), m, offset_.n + column);
          }
        }
      });
    }
  }

  // Adds up and stores this block's share of the columns.
  __device__ void RunShare(const PartialColumns<Shape>& partial, const KSlice<Shape, true>& slice) {
    const ColumnShare<Shape> share(slice, slice.rank);
#pragma unroll 1
    for (int group = share.begin; group < share.end; ++group) {
#pragma unroll
      for (int step = 0; step < Shape::kRowSteps; ++step) {
        const int row = (step * Shape::kGroupsOfTile + group_of_tile_) * 64 + warp_ * 16;
        const float* const row_scales = Shape::kSwapAb ? scales_b_ : scales_a_;
        const float* const column_scales = Shape::kSwapAb ? scales_a_ : scales_b_;
        EpilogueState state;
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 sum = partial.Sum(share, group, step, i);
          const int column = group * 16 + i * 8 + 2 * quad_lane_;
          const float2 column_scale = ScalePair(column_scales, column);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = row + lane_ / 4 + 8 * half;
            const float row_scale = Scale(row_scales, at);
            const float2 pair = half == 0 ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
            if constexpr (Shape::kSwapAb) {
              words[2 * i + half] = Finish(column_scale.x * pair.x * row_scale + biases_[at],
                                           column_scale.y * pair.y * row_scale + biases_[at], at,
                                           column, {2 * i + half, true, true}, state);
            } else {
              const float2 bias = Pair(biases_, column);
              words[2 * i + half] = Finish(row_scale * pair.x * column_scale.x + bias.x,
                                           row_scale * pair.y * column_scale.y + bias.y, at, column,
                                           {2 * i + half, true, true}, state);
            }
          }
        }
        if constexpr (Shape::kSwapAb) {
          StoreTransposedRun(words, row, group * 2);
        } else {
          // Lane q of the quad gets the eight n of half q % 2 of block q / 2.
          TransposeInQuad(words, quad_lane_);
          StoreRun(params_, BeginM(), EndM(), offset_.m + row + quad_lane_ % 2 * 8 + lane_ / 4,
                   offset_.n + group * 16 + quad_lane_ / 2 * 8, words);
        }
      }
    }
  }

  // The same of a d of floats.
  __device__ void RunShareOfFloats(const PartialColumns<Shape>& partial,
                                   const KSlice<Shape, true>& slice) {
    const ColumnShare<Shape> share(slice, slice.rank);
#pragma unroll 1
    for (int group = share.begin; group < share.end; ++group) {
#pragma unroll
      for (int step = 0; step < Shape::kRowSteps; ++step) {
        const int row =
            (step * Shape::kGroupsOfTile + group_of_tile_) * 64 + warp_ * 16 + lane_ / 4;
        EpilogueState state;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 sum = partial.Sum(share, group, step, i);
          const int column = group * 16 + i * 8 + 2 * quad_lane_;
          const float2 scale = ScalePair(Shape::kSwapAb ? scales_a_ : scales_b_, column);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = row + 8 * half;
            const float row_scale = Scale(Shape::kSwapAb ? scales_b_ : scales_a_, at);
            const float2 pair = half == 0 ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
            if constexpr (Shape::kSwapAb) {
              StoreColumnPair(params_, EndM(), offset_.m + column, offset_.n + at,
                              Values(scale.x * pair.x * row_scale + biases_[at],
                                     scale.y * pair.y * row_scale + biases_[at], at, column,
                                     {2 * i + half, true, true}, state));
            } else {
              const float2 bias = Pair(biases_, column);
              StorePair(params_, EndM(), offset_.m + at, offset_.n + column,
                        Values(row_scale * pair.x * scale.x + bias.x,
                               row_scale * pair.y * scale.y + bias.y, at, column,
                               {2 * i + half, true, true}, state));
            }
          }
        }
      }
    }
  }

 private:
  using Sums = float[Shape::kSums];

  static constexpr bool kStoresAtOnce = kUsesBoxes && Shape::kStoresAtOnce;
  static constexpr bool kUsesStages = !kStoresAtOnce && Shape::kBoxesFitStages;

  // The first row of d that no tile before has. A last tile that begins early lies at no multiple
  // of its rows. Groups begin anywhere.
  __device__ int BeginM() const {
    if constexpr (Shape::kGroups || !Shape::kFullAlongM) {
      return offset_.m;
    } else {
      return (offset_.m + Shape::kTileM - 1) / Shape::kTileM * Shape::kTileM;
    }
  }

  // The row of d after the last that may be stored.
  __device__ int EndM() const {
    if constexpr (Shape::kGroups) {
      return offset_.group_end;
    } else {
      return params_.m;
    }
  }

  // Rounds two neighbours along the columns, after the epilogue of an open kernel.
  __device__ __forceinline__ unsigned Finish(float first, float second, int row, int column,
                                             EpilogueStep step, EpilogueState& state) const {
    if constexpr (Shape::kIsOpen) {
      const float2 values = Values(first, second, row, column, step, state);
      return Pack<Shape::kOut>(values.x, values.y);
    } else {
      return Pack<Shape::kOut>(first, second);
    }
  }

  // The same, not rounded.
  __device__ __forceinline__ float2 Values(float first, float second, int row, int column,
                                           EpilogueStep step, EpilogueState& state) const {
    if constexpr (Shape::kIsOpen) {
      int m_end = EndM();
      // The last of the shares of 16 columns may reach into the next tile.
      if constexpr (Shape::kColumns % 16 != 0) m_end = min(m_end, offset_.m + Shape::kTileM);
      int group = 0;
      if constexpr (Shape::kGroups) group = offset_.group;
      const EpiloguePair pair = {offset_.m + (Shape::kSwapAb ? column : row),
                                 offset_.n + (Shape::kSwapAb ? row : column),
                                 Shape::kSwapAb,
                                 m_end,
                                 params_.n,
                                 group,
                                 step.slot,
                                 step.is_first,
                                 step.is_last};
      return RunEpilogue(make_float2(first, second), pair, state, params_);
    } else {
      return make_float2(first, second);
    }
  }

  // Sends a box on its way to d.
  __device__ __forceinline__ void Send(const CUtensorMap* d_map, int first_m, int first_n) {
    bool accumulate = false;
    if constexpr (Shape::kFloatOut) accumulate = params_.accumulate;
    // The tile before stores all of this box: TMA stores nothing beyond d.
    if (first_m + Shape::kBoxM <= BeginM()) first_m = EndM();
    boxes_.Send(d_map, first_m, first_n, accumulate);
  }

  __device__ const CUtensorMap* MapOf(bool is_whole) const {
    if constexpr (Shape::kSmallerBoxes) {
      if (!is_whole) return &params_.smaller_d_map;
    }
    return &params_.d_map;
  }

  // Rows run along n: `row` is this warp's first.
  __device__ void StoreTransposed(const Sums& sums, int row) {
    float scale_b[2];
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale_b[half] = Scale(scales_b_, row + lane_ / 4 + 8 * half);
      bias[half] = biases_[row + lane_ / 4 + 8 * half];
    }
    EpilogueState state;
    constexpr int kColumnsAtOnce = kUsesBoxes ? Shape::kBoxColumns : 16;
#pragma unroll
    for (int column = 0; column + kColumnsAtOnce <= Shape::kColumns; column += kColumnsAtOnce) {
      StoreTransposedAt<kColumnsAtOnce>(sums, row, column, scale_b, bias, state);
    }
    constexpr int kLeft = Shape::kColumns % kColumnsAtOnce;
    if constexpr (kLeft > 0) {
      StoreTransposedAt<kLeft>(sums, row, Shape::kColumns - kLeft, scale_b, bias, state);
    }
  }

  // Some columns: a box, or two blocks of eight, or one.
  template <int kColumns>
  __device__ __forceinline__ void StoreTransposedAt(const Sums& sums, int row, int first_column,
                                                    const float (&scale_b)[2],
                                                    const float (&bias)[2], EpilogueState& state) {
    constexpr int kBlocks = kColumns / 8;
    // All of them before the box is written: no load passes a write to shared memory.
    float2 scale_a[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      scale_a[block] = ScalePair(scales_a_, first_column + block * 8 + 2 * quad_lane_);
    }
    if constexpr (kUsesBoxes) boxes_.Begin();
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      const int column = first_column + block * 8;
      const bool is_alone = block + 1 == kBlocks;
      unsigned words[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (block + i == kBlocks) continue;  // an odd number of blocks
        const int at = column + i * 8 + 2 * quad_lane_;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Two m of one n.
          const float* const pair = &sums[column / 2 + i * 4 + half * 2];
          const float first = scale_a[block + i].x * pair[0] * scale_b[half] + bias[half];
          const float second = scale_a[block + i].y * pair[1] * scale_b[half] + bias[half];
          const int n = row + lane_ / 4 + 8 * half;
          const EpilogueStep step = {is_alone ? -1 : 2 * i + half, column == 0,
                                     column + 16 >= Shape::kColumns};
          if constexpr (Shape::kFloatOut) {
            StoreColumnPair(params_, EndM(), offset_.m + at, offset_.n + n,
                            Values(first, second, n, at, step, state));
          } else {
            words[2 * i + half] = Finish(first, second, n, at, step, state);
          }
        }
      }
      if constexpr (Shape::kFloatOut) continue;
      if constexpr (kUsesBoxes) {
        if (is_alone) {
          // Written twice.
          words[2] = words[0];
          words[3] = words[1];
        }
        const int block_of_lane = block + (is_alone ? 0 : lane_matrix_ / 2);
        boxes_.template Write<Shape::kBoxN, true>(words, block_of_lane * 8 + lane_row_,
                                                  warp_ * 2 + lane_matrix_ % 2);
      } else {
        StoreTransposedRun(words, row, column / 8);
      }
    }
    if constexpr (kUsesBoxes) {
      Send(MapOf(kColumns == Shape::kBoxColumns), offset_.m + first_column,
           offset_.n + row - warp_ * 16);
    }
  }

  // Two blocks of eight m, each of two halves of eight n, from registers.
  __device__ void StoreTransposedRun(unsigned (&words)[4], int row, int block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = TransposeInWarp(words[i]);
    // Word 2 * i + half holds row lane / 4 of block + i, n of `half`. Lane q of the quad gets the
    // eight n of half q % 2 of that row of block + q / 2.
    TransposeInQuad(words, quad_lane_);
    if (Shape::kColumns % 16 != 0 && block + quad_lane_ / 2 == Shape::kColumns / 8) return;
    StoreRun(params_, BeginM(), EndM(), offset_.m + (block + quad_lane_ / 2) * 8 + lane_ / 4,
             offset_.n + row + quad_lane_ % 2 * 8, words);
  }

  // Rows run along m: `row` is this warp's first.
  __device__ void StoreStraight(const Sums& sums, int row) {
    static_assert(kUsesBoxes);
    const float scale_a[2] = {Scale(scales_a_, row + lane_ / 4),
                              Scale(scales_a_, row + lane_ / 4 + 8)};
    EpilogueState state;
#pragma unroll
    for (int column = 0; column + Shape::kBoxColumns <= Shape::kColumns;
         column += Shape::kBoxColumns) {
      StoreBoxAt<Shape::kBoxColumns>(&params_.d_map, sums, row, column, scale_a, state);
    }
    if constexpr (Shape::kSmallerBoxes) {
      StoreBoxAt<Shape::kLastBoxColumns>(&params_.smaller_d_map, sums, row,
                                         Shape::kColumns - Shape::kLastBoxColumns, scale_a, state);
    }
  }

  // From registers: four blocks of eight n of a row at a time, or two of two rows, by the lanes of
  // a quad.
  __device__ void StoreStraightRuns(const Sums& sums, int row) {
    const float scale_a[2] = {Scale(scales_a_, row + lane_ / 4),
                              Scale(scales_a_, row + lane_ / 4 + 8)};
    EpilogueState state;
    if constexpr (Shape::kColumns % 32 == 0) {
#pragma unroll
      for (int block = 0; block < Shape::kColumns / 8; block += 4) {
        unsigned words[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          words[i % 2][i / 2] = StraightWord(sums, row, block + i / 2, i % 2, scale_a, state);
        }
        // Lane q gets the eight n of block q.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          TransposeInQuad(words[half], quad_lane_);
          StoreRun(params_, BeginM(), EndM(), offset_.m + row + half * 8 + lane_ / 4,
                   offset_.n + (block + quad_lane_) * 8, words[half]);
        }
      }
    } else {
#pragma unroll
      for (int block = 0; block < Shape::kColumns / 8; block += 2) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = StraightWord(sums, row, block + i / 2, i % 2, scale_a, state);
        }
        // Lane q gets the eight n of half q % 2 of block q / 2.
        TransposeInQuad(words, quad_lane_);
        StoreRun(params_, BeginM(), EndM(), offset_.m + row + quad_lane_ % 2 * 8 + lane_ / 4,
                 offset_.n + (block + quad_lane_ / 2) * 8, words);
      }
    }
  }

  // This lane's two n of a block of eight, in row lane / 4 or, for half 1, the one 8 later.
  __device__ __forceinline__ unsigned StraightWord(const Sums& sums, int row, int block, int half,
                                                   const float (&scale_a)[2],
                                                   EpilogueState& state) const {
    const int column = block * 8 + 2 * quad_lane_;
    const float* const pair = &sums[block * 4 + half * 2];
    const float2 scale_b = ScalePair(scales_b_, column);
    const float2 bias = BiasPair(column);
    return Finish(scale_a[half] * pair[0] * scale_b.x + bias.x,
                  scale_a[half] * pair[1] * scale_b.y + bias.y, row + lane_ / 4 + 8 * half, column,
                  {block % 2 * 2 + half, block < 2, block / 2 * 2 + 2 == Shape::kColumns / 8},
                  state);
  }

  template <int kBoxColumns>
  __device__ void StoreBoxAt(const CUtensorMap* d_map, const Sums& sums, int row, int first_column,
                             const float (&scale_a)[2], EpilogueState& state) {
    constexpr int kBlocks = kBoxColumns / 8;
    float2 scale_b[kBlocks];
    float2 bias[kBlocks];
    // All of them before the box is written, where registers allow: no load passes a write to
    // shared memory.
    if constexpr (!Shape::kPingpong) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        scale_b[block] = ScalePair(scales_b_, first_column + block * 8 + 2 * quad_lane_);
        bias[block] = BiasPair(first_column + block * 8 + 2 * quad_lane_);
      }
    }
    if constexpr (!kStoresAtOnce) boxes_.Begin();
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      if constexpr (Shape::kPingpong) {
#pragma unroll
        for (int i = block; i < block + 2; ++i) {
          scale_b[i] = ScalePair(scales_b_, first_column + i * 8 + 2 * quad_lane_);
          bias[i] = Pair(biases_, first_column + i * 8 + 2 * quad_lane_);
        }
      }
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Two n of a block of eight, in row lane / 4 or the one 8 later.
        const int at = block + i / 2;
        const int half = i % 2;
        const float* const pair = &sums[first_column / 2 + at * 4 + half * 2];
        if constexpr (Shape::kFloatOut) {
          boxes_.WriteFloats(
              Values(
                  scale_a[half] * pair[0] * scale_b[at].x + bias[at].x,
                  scale_a[half] * pair[1] * scale_b[at].y + bias[at].y, row + lane_ / 4 + 8 * half,
                  first_column + at * 8 + 2 * quad_lane_,
                  {i, first_column + block == 0, first_column + block * 8 + 16 == Shape::kColumns},
                  state),
              warp_ * 16 + lane_ / 4 + 8 * half, at * 8 + 2 * quad_lane_);
        } else {
          words[i] = Finish(
              scale_a[half] * pair[0] * scale_b[at].x + bias[at].x,
              scale_a[half] * pair[1] * scale_b[at].y + bias[at].y, row + lane_ / 4 + 8 * half,
              first_column + at * 8 + 2 * quad_lane_,
              {i, first_column + block == 0, first_column + block * 8 + 16 == Shape::kColumns},
              state);
        }
      }
      if constexpr (!Shape::kFloatOut) {
        boxes_.template Write<kBoxColumns, false>(
            words, warp_ * 16 + lane_matrix_ % 2 * 8 + lane_row_, block + lane_matrix_ / 2);
      }
    }
    if constexpr (kStoresAtOnce) {
      boxes_.Next();
    } else {
      Send(d_map, offset_.m + row - warp_ * 16, offset_.n + first_column);
    }
  }

  static __device__ float Scale(const float* vector, int at) {
    return Shape::kHasVectorScales ? vector[at] : 1.0f;
  }

  static __device__ float2 ScalePair(const float* vector, int at) {
    return Shape::kHasVectorScales ? Pair(vector, at) : make_float2(1.0f, 1.0f);
  }

  // With kMultipliesScales the biases are shared only if there are some.
  __device__ float2 BiasPair(int at) const {
    if (Shape::kMultipliesScales && params_.bias == nullptr) return make_float2(0.0f, 0.0f);
    return Pair(biases_, at);
  }

  static __device__ float2 Pair(const float* vector, int at) {
    return *reinterpret_cast<const float2*>(vector + at);
  }

  const int thread_ = static_cast<int>(threadIdx.x);
  const int lane_ = thread_ % 32;
  const int quad_lane_ = lane_ % 4;
  const int warp_ = thread_ / 32 % 4;
  const int warp_group_ = thread_ / 128;
  // Among those that have rows of this tile.
  const int group_of_tile_ = Shape::kPingpong ? 0 : warp_group_;
  // The matrix and the row, of those that stmatrix writes, whose address this lane provides.
  const int lane_matrix_ = lane_ / 8;
  const int lane_row_ = lane_ % 8;

  const Params& params_;
  const TileOffset<Shape> offset_;
  const float* const scales_a_;
  const float* const scales_b_;
  const float* const biases_;
  Boxes<Shape> boxes_;
};

}  // namespace stoneware::gemm::sm90
