// How the accumulators of wgmma, two columns of a row in a thread, become 16 bytes of one row or
// column of 16-bit output.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cute/numeric/numeric_types.hpp"
#include "cutlass/numeric_types.h"

namespace stoneware::gemm::sm90 {

// Two values, rounded to 16 bits, in one word.
template <class Out>
__device__ unsigned Pack(float low, float high) {
  static_assert(sizeof(Out) == 2);
  if constexpr (cute::is_same_v<Out, cutlass::bfloat16_t>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(pair);
  }
}

// Transposes the 4 x 4 words that four neighbouring lanes hold: afterwards word i of lane q is what
// word q of lane i was.
__device__ inline void TransposeInQuad(unsigned (&words)[4], int quad_lane) {
  const bool is_odd = quad_lane & 1;
  const bool is_high = quad_lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned sent = is_odd ? words[i] : words[i + 1];
    const unsigned received = __shfl_xor_sync(0xffffffffu, sent, 1);
    words[i] = is_odd ? received : words[i];
    words[i + 1] = is_odd ? words[i + 1] : received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned sent = is_high ? words[i] : words[i + 2];
    const unsigned received = __shfl_xor_sync(0xffffffffu, sent, 2);
    words[i] = is_high ? received : words[i];
    words[i + 2] = is_high ? words[i + 2] : received;
  }
}

// Transposes the 8 x 8 elements of 16 bits that a warp holds, row lane / 4, columns 2 * (lane % 4)
// and the next.
__device__ inline unsigned TransposeInWarp(unsigned pair) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace stoneware::gemm::sm90
