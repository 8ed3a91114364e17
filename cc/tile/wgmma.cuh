// A tile matmul by wgmma: each group of four warps multiplies blocks of 64 rows.
//
//   sum[rows, columns] += left[rows, k] * right[k, columns]
//
// Instruction is a struct with kColumns and Multiply(float (&sums)[kColumns / 2], descriptor of
// left, of right), which is one wgmma of 32 bytes of k.

#pragma once

#include "cc/tile/tile.cuh"

namespace stoneware::tile {

// The matrix descriptor of an operand (PTX ISA, "wgmma", "Matrix Descriptor Format"); addresses and
// offsets count units of 16 bytes.
//
// The stride offset leads to the next 8 lines of a slab. If the summed axis is contiguous, an
// instruction reads one piece, and the leading offset means nothing; otherwise it leads to the next
// slab.
template <class OperandType>
__device__ __forceinline__ constexpr unsigned long long Descriptor(unsigned address) {
  using Tile = typename OperandType::Tile;
  constexpr unsigned long long kLeading = OperandType::kIsKMajor ? 1 : Tile::kSlabBytes / 16;
  constexpr unsigned long long kStride = 8 * Tile::kPieceBytes / 16;
  constexpr unsigned long long kSwizzle = Tile::kPieceBytes == 128  ? 1
                                          : Tile::kPieceBytes == 64 ? 2
                                                                    : 3;
  return (address >> 4 & 0x3fff) | kLeading << 16 | kStride << 32 | kSwizzle << 62;
}

// The descriptor of what lies `num_bytes` later: the address does not leave its 14 bits.
//
// The sum has 64 bits so that neighbouring wgmma read different uniform registers. If only the
// lower word is added, ptxas moves each descriptor into the registers that the wgmma before it
// reads.
__device__ __forceinline__ unsigned long long Advanced(unsigned long long descriptor,
                                                       int num_bytes) {
  return descriptor + num_bytes / 16;
}

// The bytes from the operand's address to element `outer` of its outer axis and byte `k_byte` of
// the summed axis, where a swizzled block of 8 lines begins, or within one piece 32 bytes later.
template <class OperandType>
__device__ __forceinline__ constexpr int BlockOffset(int outer, int k_byte) {
  using Tile = typename OperandType::Tile;
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Tile::Element));
  if constexpr (OperandType::kIsKMajor) {
    return k_byte / Tile::kPieceBytes * Tile::kSlabBytes + outer * Tile::kPieceBytes +
           k_byte % Tile::kPieceBytes;
  } else {
    const int byte = outer * kElementBytes;
    return byte / Tile::kPieceBytes * Tile::kSlabBytes + k_byte / kElementBytes * Tile::kPieceBytes;
  }
}

// Starts the wgmma of this thread's group; WaitForMatmuls waits for them.
template <class Instruction, class Left, class Right, class SumType>
__device__ __forceinline__ void Start(SumType& sum, const typename Left::Tile& left,
                                      const typename Right::Tile& right) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Left::Tile::Element));
  constexpr int kStepBytes = 32;
  constexpr int kValues = Instruction::kColumns / 2;
  static_assert(SumType::kBlockRows == 64 && SumType::kBlockValues % kValues == 0);
  const unsigned long long left_descriptor =
      Descriptor<Left>(SharedAddress(left.bytes) + BlockOffset<Left>(SumType::FirstRow(), 0));
  const unsigned long long right_descriptor =
      Descriptor<Right>(SharedAddress(right.bytes) + BlockOffset<Right>(SumType::FirstColumn(), 0));

  sum.Settle();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k_byte = 0; k_byte < Left::kSummed * kElementBytes; k_byte += kStepBytes) {
#pragma unroll
    for (int row = 0; row < SumType::kRowBlocks; ++row) {
#pragma unroll
      for (int part = 0; part < SumType::kBlockValues / kValues; ++part) {
        Instruction::Multiply(
            *reinterpret_cast<float (*)[kValues]>(&sum.values[row][part * kValues]),
            Advanced(left_descriptor, BlockOffset<Left>(64 * row, k_byte)),
            Advanced(right_descriptor, BlockOffset<Right>(part * Instruction::kColumns, k_byte)));
      }
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

}  // namespace stoneware::tile
