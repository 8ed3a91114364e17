// Boxes: how persistent_mm stores a tile by way of shared memory.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "cc/gemm/persistent_mm_block_sm90.cuh"
#include "cc/gemm/ptx_sm90.cuh"

namespace stoneware::gemm::sm90 {

// The boxes of a warp group: parts of its tile in shared memory, on their way to d, one after the
// other. All its threads call together.
template <class Shape>
class Boxes {
 public:
  // With `uses_stages`, for a block's last tile, when nothing is left to be loaded or multiplied:
  // each box has a place where this warp group alone has read its rows of a stage.
  __device__ Boxes(const SharedMemory<Shape>& shared, int warp_group, int tile_idx,
                   bool uses_stages)
      : uses_stages_(uses_stages), barrier_(kAmongWarpGroup + warp_group) {
    if (uses_stages) {
      // All have read them.
      SyncAtNamedBarrier(128, barrier_);
      address_ = SharedAddress(shared.rows) + warp_group * Shape::kBoxBytes;
      place_bytes_ = Shape::kRows * Shape::kChunkBytes;
    } else {
      address_ = SharedAddress(shared.boxes) + warp_group * Shape::kGroupBoxesBytes;
      place_ = tile_idx * Shape::kBoxesWanted % kNumPlaces;
    }
  }

  // Waits until what the next place held has been read.
  __device__ void Begin() const {
    if (uses_stages_) return;
    if (IsSender()) WaitForStoredBoxes<kNumPlaces - 1>();
    SyncAtNamedBarrier(128, barrier_);
  }

  // Writes four matrices in the layout of StoreMatrices: `row` and `chunk`, in units of 16 bytes,
  // are the destination of this lane's row.
  template <int kColumnsOfBox, bool kTransposes>
  __device__ void Write(const unsigned (&words)[4], int row, int chunk) const {
    constexpr int kRowBytes = kColumnsOfBox * 2;
    StoreMatrices<kTransposes>(Address() + row * kRowBytes + ChunkAt<kRowBytes>(row, chunk) * 16,
                               words);
  }

  // Writes two neighbours of a row of floats.
  __device__ void WriteFloats(float2 values, int row, int column) const {
    StoreShared(Address() + row * 128 + ChunkAt<128>(row, column / 4) * 16 + column % 4 * 4,
                values.x, values.y);
  }

  // Boxes with a place each are written one after the other and then stored, without a wait
  // between: BeginAll; Write and Next of each; SendAll, whose `send` calls SendNext for each.
  __device__ void BeginAll() const {
    if (IsSender()) WaitForStoredBoxes<0>();
    SyncAtNamedBarrier(128, barrier_);
  }

  __device__ void Next() { ++place_; }

  template <class Send>
  __device__ void SendAll(Send&& send) {
    FenceSharedForTma();
    SyncAtNamedBarrier(128, barrier_);
    place_ = 0;
    if (IsSender()) send();
  }

  __device__ void SendNext(const CUtensorMap* d_map, int first_m, int first_n) {
    StoreBox(d_map, Address(), first_n, first_m);
    Next();
  }

  // Stores it, or adds it to d, as far as it lies in d, and waits for nothing.
  __device__ void Send(const CUtensorMap* d_map, int first_m, int first_n, bool accumulate) {
    FenceSharedForTma();
    SyncAtNamedBarrier(128, barrier_);
    if (IsSender()) {
      if (accumulate) {
        AddBox(d_map, Address(), first_n, first_m);
      } else {
        StoreBox(d_map, Address(), first_n, first_m);
      }
    }
    ++place_;
    if (!uses_stages_) place_ %= kNumPlaces;
  }

  // No block leaves before its last boxes have been read.
  static __device__ void End() {
    if (IsSender()) WaitForStoredBoxes<0>();
  }

 private:
  static __device__ bool IsSender() { return threadIdx.x % 128 == 0; }

  __device__ std::uint32_t Address() const { return address_ + place_ * place_bytes_; }

  // Rows of 128 and 64 bytes have their 16-byte chunks permuted as the swizzles of a tensor map do,
  // so that a matrix meets each bank once; of others, one after the other, it meets some twice.
  template <int kRowBytes>
  static __device__ int ChunkAt(int row, int chunk) {
    if constexpr (kRowBytes == 128) return chunk ^ (row % 8);
    if constexpr (kRowBytes == 64) return chunk ^ (row / 2 % 4);
    return chunk;
  }

  static constexpr int kNumPlaces = Shape::kBoxes > 0 ? Shape::kBoxes : 1;

  bool uses_stages_;
  unsigned barrier_;
  std::uint32_t address_;
  int place_ = 0;
  int place_bytes_ = Shape::kBoxBytes;
};

}  // namespace stoneware::gemm::sm90
