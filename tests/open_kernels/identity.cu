// The epilogue that changes nothing.

#include "cc/gemm/epilogue_sm90.h"

namespace sm90 = stoneware::gemm::sm90;

extern "C" __device__ float2 stoneware_epilogue(float2 values, sm90::EpiloguePair,
                                                sm90::EpilogueState*, const sm90::EpilogueParams*) {
  return values;
}

extern "C" __device__ void stoneware_prefetch(sm90::EpilogueTile, const sm90::EpilogueParams*) {}
