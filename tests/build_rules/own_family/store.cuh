// The device side of a family that is not Stoneware's: *out = Config::kValue, or, open, what the
// function that is linked later makes of it.

#pragma once

namespace own {

template <class Config>
struct StoreKernel {
  struct Params {
    float* out;
  };
  static constexpr int kThreads = 1;
  static constexpr int kSharedAlignment = 16;

  static __device__ void Run(const Params& params, char*) { *params.out = Config::kValue; }
};

extern "C" __device__ float own_epilogue(float value);

template <class Config>
struct OpenStoreKernel : StoreKernel<Config> {
  static __device__ void Run(const typename StoreKernel<Config>::Params& params, char*) {
    *params.out = own_epilogue(Config::kValue);
  }
};

}  // namespace own
