// The device side of one config: a cubin with one kernel, named by the config's id.
// matmul_sm90.cuh says what it computes; matmul_sm90.cc is its host side.

#include "cc/gemm/matmul_sm90.cuh"

using stoneware::gemm::matmul_sm90::Kernel;

extern "C" __global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock,
                                             Kernel::MinBlocksPerMultiprocessor)
STONEWARE_KERNEL_ID(__grid_constant__ const Kernel::Params params) {
  extern __shared__ char shared_storage[];
  Kernel{}(params, shared_storage);
}
