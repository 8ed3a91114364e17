// The device side of one config: a cubin with one kernel, named by the config's id.
// scaled_mm_block_sm90.cuh says what it computes; scaled_mm_block_sm90.cc is its host side.

#include "cc/gemm/scaled_mm_block_sm90.cuh"

using stoneware::gemm::sm90_block::Kernel;

extern "C" __global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock,
                                             Kernel::MinBlocksPerMultiprocessor)
STONEWARE_KERNEL_ID(__grid_constant__ const Kernel::Params params) {
  extern __shared__ char shared_storage[];
  Kernel{}(params, shared_storage);
}
