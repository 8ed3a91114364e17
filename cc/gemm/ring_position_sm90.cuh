// Where a warp is in the ring of a kernel's stages.

#pragma once

namespace stoneware::gemm::sm90 {

// The stage, and the parity of the round through the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Advances by `num_stages`.
  __device__ void Skip(int num_stages) {
    const int end = stage + num_stages;
    parity ^= end / kStages % 2;
    stage = end % kStages;
  }
};

}  // namespace stoneware::gemm::sm90
