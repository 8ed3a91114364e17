// A tile matmul by mma.sync: each warp multiplies blocks of 16 rows and 8 columns.
//
//   sum[rows, columns] += left[rows, k] * right[k, columns]
//
// Instruction is a struct with Multiply(float (&sums)[4], words of left, words of right), which is
// one mma.sync of 32 bytes of k.

#pragma once

#include "cc/tile/tile.cuh"

namespace stoneware::tile {

// Reads kMatrices blocks of 8 outer elements and 16 bytes of k; word i of a thread is of block i.
// Blocks follow each other first along the outer axis, kOuterBlocks of them, then along k.
template <class OperandType, int kMatrices, int kOuterBlocks>
__device__ __forceinline__ void LoadBlocks(unsigned (&words)[kMatrices], unsigned address,
                                           int outer, int k_byte) {
  using Tile = typename OperandType::Tile;
  using Element = typename Tile::Element;
  constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  constexpr int kElements = 16 / kElementBytes;  // of k in a block
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (!OperandType::kIsKMajor && kElementBytes == 4) {
    // ldmatrix transposes 16-bit elements alone.
    const int k = k_byte / kElementBytes + lane % 4;
#pragma unroll
    for (int i = 0; i < kMatrices; ++i) {
      const int line = k + i / kOuterBlocks * kElements;
      const int byte = (outer + i % kOuterBlocks * 8 + lane / 4) * kElementBytes;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(words[i])
                   : "r"(address + Tile::OffsetInLine(line, byte))
                   : "memory");
    }
  } else {
    static_assert(OperandType::kIsKMajor || kElementBytes == 2);
    const int block = lane / 8 % kMatrices;
    const int block_outer = outer + block % kOuterBlocks * 8;
    const int block_k = k_byte + block / kOuterBlocks * 16;
    const int line =
        OperandType::kIsKMajor ? block_outer + lane % 8 : block_k / kElementBytes + lane % 8;
    const int byte = OperandType::kIsKMajor ? block_k : block_outer * kElementBytes;
    const unsigned from = address + Tile::OffsetInLine(line, byte);
    if constexpr (kMatrices == 4 && OperandType::kIsKMajor) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from)
                   : "memory");
    } else if constexpr (kMatrices == 4) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(from)
                   : "memory");
    } else if constexpr (OperandType::kIsKMajor) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(from)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                   : "=r"(words[0]), "=r"(words[1])
                   : "r"(from)
                   : "memory");
    }
  }
}

// Multiplies the part of this thread's warp, at once.
template <class Instruction, class Left, class Right, class SumType>
__device__ __forceinline__ void Start(SumType& sum, const typename Left::Tile& left,
                                      const typename Right::Tile& right) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Left::Tile::Element));
  constexpr int kStepBytes = 32;
  constexpr int kColumnBlocks = SumType::kPartColumns / 8;
  static_assert(SumType::kBlockRows == 16);
  const unsigned left_address = SharedAddress(left.bytes);
  const unsigned right_address = SharedAddress(right.bytes);
  const int first_row = SumType::FirstRow();
  const int first_column = SumType::FirstColumn();

#pragma unroll
  for (int k_byte = 0; k_byte < Left::kSummed * kElementBytes; k_byte += kStepBytes) {
    unsigned left_words[SumType::kRowBlocks][4];
    unsigned right_words[kColumnBlocks][2];
#pragma unroll
    for (int row = 0; row < SumType::kRowBlocks; ++row) {
      LoadBlocks<Left, 4, 2>(left_words[row], left_address, first_row + 16 * row, k_byte);
    }
#pragma unroll
    for (int column = 0; column + 1 < kColumnBlocks; column += 2) {
      unsigned words[4];
      LoadBlocks<Right, 4, 2>(words, right_address, first_column + 8 * column, k_byte);
      right_words[column][0] = words[0];
      right_words[column + 1][0] = words[1];
      right_words[column][1] = words[2];
      right_words[column + 1][1] = words[3];
    }
    if constexpr (kColumnBlocks % 2 == 1) {
      LoadBlocks<Right, 2, 1>(right_words[kColumnBlocks - 1], right_address,
                              first_column + 8 * (kColumnBlocks - 1), k_byte);
    }
#pragma unroll
    for (int row = 0; row < SumType::kRowBlocks; ++row) {
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
        Instruction::Multiply(*reinterpret_cast<float (*)[4]>(&sum.values[row][4 * column]),
                              left_words[row], right_words[column]);
      }
    }
  }
}

}  // namespace stoneware::tile
