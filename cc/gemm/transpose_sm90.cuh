// How the accumulators of wgmma, two columns of a row in a thread, become 16 bytes of one row or
// column of 16-bit output.

#pragma once

#include "cc/gemm/config.h"

namespace stoneware::gemm::sm90 {

// Two values, rounded to the nearest of 16 bits, in one word.
template <DType kOut>
__device__ unsigned Pack(float low, float high) {
  static_assert(kOut == DType::kBF16 || kOut == DType::kFP16);
  unsigned pair;
  if constexpr (kOut == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  }
  return pair;
}

// How an element of d is read: its bits, or the number.
template <DType kOut>
struct Element {
  using Bits = unsigned short;
};

template <>
struct Element<DType::kFP32> {
  using Bits = float;
};

// The value of an element.
template <DType kOut>
__device__ float Unpack(typename Element<kOut>::Bits bits) {
  if constexpr (kOut == DType::kFP32) {
    return bits;
  } else if constexpr (kOut == DType::kBF16) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  } else {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
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
