// The device side of half_mm.h.

#pragma once

#include "kernels/half_mm.h"

namespace granite {

template <class Config>
struct HalfMmKernel {
  using Mm = HalfMm<Config>;
  using Params = typename Mm::Params;
  static constexpr int kThreads = Mm::kThreadCount;
  static constexpr int kSharedAlignment = 16;

  static __device__ void Run(const Params& params, char* shared) {
    Mm()(params, *reinterpret_cast<typename Mm::SharedStorage*>(shared));
  }
};

}  // namespace granite
