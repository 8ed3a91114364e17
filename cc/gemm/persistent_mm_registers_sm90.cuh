// How a thread of persistent_mm stores neighbours of d from its registers, where there is no box.

#pragma once

#include "cc/gemm/persistent_mm_sm90.h"

namespace stoneware::gemm::sm90 {

// Stores eight neighbours in n of one row of d, if it lies between rows begin_m and end_m.
__device__ void StoreRun(const PersistentMmScalars& params, int begin_m, int end_m, int m, int n,
                         const unsigned (&words)[4]) {
  if (m >= begin_m && m < end_m && n < params.n) {
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(params.d) + m * params.ldd + n) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Stores two neighbours in n of one row of a d of floats, or adds them, if it lies before row
// end_m.
template <class Params>
__device__ void StorePair(const Params& params, int end_m, int m, int n, float2 values) {
  if (m < end_m && n < params.n) {
    auto* const d = reinterpret_cast<float2*>(static_cast<float*>(params.d) + m * params.ldd + n);
    if (params.accumulate) {
      const float2 before = *d;
      values.x += before.x;
      values.y += before.y;
    }
    *d = values;
  }
}

// Stores two neighbours in m of one column of a d of floats, or adds them, as far as they lie
// before row end_m.
template <class Params>
__device__ void StoreColumnPair(const Params& params, int end_m, int m, int n, float2 values) {
  if (n >= params.n) return;
  auto* const d = static_cast<float*>(params.d) + m * params.ldd + n;
  const float pair[2] = {values.x, values.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (m + i < end_m) {
      float& element = d[i * params.ldd];
      element = params.accumulate ? element + pair[i] : pair[i];
    }
  }
}

}  // namespace stoneware::gemm::sm90
