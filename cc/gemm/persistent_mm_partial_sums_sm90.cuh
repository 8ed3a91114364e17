// How the blocks that share the k of a tile add up their sums: those of a cluster, or of the grid.

#pragma once

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/persistent_mm_sm90.h"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// Adds to this block's share of a tile what the other blocks of the cluster have summed of it, and
// sends them theirs. Returns whether this warp has some to store. All threads that multiply call.
template <class Shape, bool kSplitsK>
__device__ bool AddPartialSums(const SharedMemory<Shape>& shared,
                               const KSlice<Shape, kSplitsK>& slice,
                               float (&sums)[Shape::kRowSteps][Shape::kSums]) {
  constexpr int kWordsOfStep = Shape::kSums / 4;  // of four sums
  constexpr int kWords = Shape::kRowSteps * kWordsOfStep;
  const int thread = static_cast<int>(threadIdx.x);
  const int num_warps = Shape::kConsumerThreads / 32 / slice.splits;  // that store, of a block
  const int warp = thread / 32 % num_warps;
  const int rank = thread / 32 / num_warps;  // of the block that stores what this warp has
  // Each sender stores the words of each warp, lane by lane.
  const int sender_bytes = num_warps * kWords * 32 * 16;
  const std::uint32_t partial = SharedAddress(shared.partial) +
                                static_cast<std::uint32_t>((warp * kWords * 32 + thread % 32) * 16);
  WaitForClusterToArrive();
  if (rank != slice.rank) {
    const int slot = slice.rank - (slice.rank > rank);
    const std::uint32_t address = AddressInBlock(partial + slot * sender_bytes, rank);
    const std::uint32_t barrier = AddressInBlock(shared.summed->Address(), rank);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float* const word = &sums[i / kWordsOfStep][i % kWordsOfStep * 4];
      StoreToBlock(address + i * 32 * 16, barrier, word[0], word[1], word[2], word[3]);
    }
    return false;
  }
  shared.summed->WaitForCluster();
  // In the order of k, so that the bits of an element do not depend on which block adds them.
  float totals[Shape::kRowSteps][Shape::kSums] = {};
#pragma unroll 1
  for (int from = 0; from < slice.splits; ++from) {
    const std::uint32_t part =
        partial + static_cast<std::uint32_t>((from - (from > rank)) * sender_bytes);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float* const own = &sums[i / kWordsOfStep][i % kWordsOfStep * 4];
      float* const total = &totals[i / kWordsOfStep][i % kWordsOfStep * 4];
      float4 word = make_float4(own[0], own[1], own[2], own[3]);
      if (from != rank) word = LoadShared(part + i * 32 * 16);
      total[0] += word.x;
      total[1] += word.y;
      total[2] += word.z;
      total[3] += word.w;
    }
  }
#pragma unroll
  for (int step = 0; step < Shape::kRowSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[step][i] = totals[step][i];
  }
  return true;
}

// Puts this block's sums of a tile into the workspace. If those of all clusters that share its k
// are there, adds them up in the order of k, and returns true: this block stores the tile. All
// threads that multiply call.
template <class Shape>
__device__ __forceinline__ bool AddGridSums(const typename Shape::Params& params,
                                            const KSlice<Shape, false>& slice,
                                            float (&sums)[Shape::kRowSteps][Shape::kSums]) {
  constexpr int kWordsOfStep = Shape::kSums / 4;  // of four sums
  constexpr int kWords = Shape::kRowSteps * kWordsOfStep;
  constexpr int kPartWords = kWords * Shape::kConsumerThreads;
  static_assert(kPartWords * 16 == Shape::kGridPartBytes);
  const int thread = static_cast<int>(threadIdx.x);
  float4* const own = static_cast<float4*>(params.partial_sums) +
                      static_cast<std::int64_t>(blockIdx.x) * kPartWords + thread;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float* const word = &sums[i / kWordsOfStep][i % kWordsOfStep * 4];
    __stcg(own + i * Shape::kConsumerThreads, make_float4(word[0], word[1], word[2], word[3]));
  }
  SyncAtNamedBarrier(Shape::kConsumerThreads, kAmongConsumers);
  // A tile of the cluster, counted over the grid.
  const int block = static_cast<int>(blockIdx.x) % Shape::kSharingBlocks;
  bool is_last = false;
  if (thread == 0) {
    unsigned* const arrivals = params.arrivals + slice.first_tile * Shape::kSharingBlocks + block;
    is_last = CountArrival(arrivals) + 1 == static_cast<unsigned>(slice.splits);
    if (is_last) *arrivals = 0;  // for the next kernel
  }
  if (!AnyAtNamedBarrier(Shape::kConsumerThreads, kAmongConsumers, is_last)) return false;
  const float4* part =
      own - static_cast<std::int64_t>(slice.rank) * (Shape::kSharingBlocks * kPartWords);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float4 first = __ldcg(part + i * Shape::kConsumerThreads);
    float* const word = &sums[i / kWordsOfStep][i % kWordsOfStep * 4];
    word[0] = first.x;
    word[1] = first.y;
    word[2] = first.z;
    word[3] = first.w;
  }
#pragma unroll 1
  for (int rank = 1; rank < slice.splits; ++rank) {
    part += Shape::kSharingBlocks * kPartWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float4 other = __ldcg(part + i * Shape::kConsumerThreads);
      float* const word = &sums[i / kWordsOfStep][i % kWordsOfStep * 4];
      word[0] += other.x;
      word[1] += other.y;
      word[2] += other.z;
      word[3] += other.w;
    }
  }
  return true;
}

// The partial sums of a tile whose columns are shared. Four sums of each thread are a word; a group
// of 16 columns is word after word, and groups lie one after the other.
template <class Shape>
class PartialColumns {
 public:
  __device__ PartialColumns(const SharedMemory<Shape>& shared, const KSlice<Shape, true>& slice)
      : slice_(slice),
        own_(SharedAddress(shared.partial)),
        arriving_(own_ + Shape::kOwnBytes),
        sender_bytes_((Shape::kColumnGroups - 1 + slice.splits) / slice.splits *
                      Shape::kGroupBytes) {}

  // Sends each other block the sums that it stores. Returns when those for this one have come.
  __device__ void Exchange(const SharedMemory<Shape>& shared,
                           const float (&sums)[Shape::kRowSteps][Shape::kSums]) const {
    const int thread = static_cast<int>(threadIdx.x);
    // This warp has read its stages. Own sums are written when this block's warps have.
    ArriveAtCluster();
    SyncAtNamedBarrier(Shape::kConsumerThreads, kAmongConsumers);
#pragma unroll
    for (int block = 0; block < Shape::kColumns / 8; ++block) {
#pragma unroll
      for (int step = 0; step < Shape::kRowSteps; ++step) {
        const float* const word = &sums[step][block * 4];
        StoreShared(own_ + block / 2 * Shape::kGroupBytes + WordAt(step, block % 2), word[0],
                    word[1], word[2], word[3]);
      }
    }
    FenceSharedForTma();
    SyncAtNamedBarrier(Shape::kConsumerThreads, kAmongConsumers);
    WaitForClusterToArrive();
    // A warp for each block, or for each fourth where there are more blocks than warps.
    constexpr int kWarps = Shape::kConsumerThreads / 32;
#pragma unroll
    for (int first = 0; first < Shape::kMaxSplits; first += kWarps) {
      SendShare(shared, thread, first + thread / 32);
    }
    shared.summed->WaitForCluster();
    ArriveAtCluster();
  }

  // No block leaves before its sums have been copied.
  __device__ void End() const { WaitForClusterToArrive(); }

  // Adds up a word of a group of this block's share, in the order of k, so that the sums of an
  // element do not depend on which block adds them.
  __device__ float4 Sum(const ColumnShare<Shape>& share, int group, int step, int half) const {
    const std::uint32_t own = own_ + group * Shape::kGroupBytes + WordAt(step, half);
    const std::uint32_t arrived =
        arriving_ + (group - share.begin) * Shape::kGroupBytes + WordAt(step, half);
    // No load waits for another.
    float4 parts[Shape::kMaxSplits];
#pragma unroll
    for (int from = 0; from < Shape::kMaxSplits; ++from) {
      if (from < slice_.splits) {
        parts[from] = LoadShared(
            from == slice_.rank ? own : arrived + (from - (from > slice_.rank)) * sender_bytes_);
      }
    }
    float4 sum = parts[0];
#pragma unroll
    for (int from = 1; from < Shape::kMaxSplits; ++from) {
      if (from < slice_.splits) {
        sum.x += parts[from].x;
        sum.y += parts[from].y;
        sum.z += parts[from].z;
        sum.w += parts[from].w;
      }
    }
    return sum;
  }

 private:
  // Copies the sums that another block stores into its shared memory. All threads of a warp call.
  __device__ void SendShare(const SharedMemory<Shape>& shared, int thread, int to) const {
    if (to < slice_.splits && to != slice_.rank && thread % 32 == 0) {
      const ColumnShare<Shape> share(slice_, to);
      const int slot = slice_.rank - (slice_.rank > to);
      // With more blocks than groups of columns, some store none.
      if (Shape::kMaxSplits <= Shape::kColumnGroups || share.begin < share.end) {
        const int block = slice_.BlockOf(to);
        CopyToBlock(AddressInBlock(arriving_ + slot * sender_bytes_, block),
                    AddressInBlock(shared.summed->Address(), block),
                    own_ + share.begin * Shape::kGroupBytes,
                    (share.end - share.begin) * Shape::kGroupBytes);
      }
    }
  }

  // Of this thread's word, in its group.
  static __device__ int WordAt(int step, int half) {
    return ((step * 2 + half) * Shape::kConsumerThreads + static_cast<int>(threadIdx.x)) * 16;
  }

  const KSlice<Shape, true>& slice_;
  const std::uint32_t own_;
  const std::uint32_t arriving_;
  const int sender_bytes_;
};

}  // namespace stoneware::gemm::sm90
