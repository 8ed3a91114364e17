// CUTLASS's view of the CUDA driver.
//
// CUTLASS leaves launching a kernel and encoding tensor maps to a CudaHostAdapter. This one does
// both through cc/driver, so that a module links neither libcuda nor libcudart. What includes it is
// a cuda_library: without CUDA's version the class has other virtual functions.

#pragma once

#include "cutlass/cuda_host_adapter.hpp"

#include "cc/driver/driver_api.h"

#if !defined(CUDA_HOST_ADAPTER_TENSORMAP_ENABLED) || !CUTLASS_ENABLE_CUDA_HOST_ADAPTER
#error "driver_host_adapter.h needs cuda_library and CUTLASS_ENABLE_CUDA_HOST_ADAPTER=1"
#endif

namespace stoneware::host_adapter {

// Its only state is its kernels, as cuLaunchKernelEx expects them, at most three. Cheap enough to
// make for each launch. A failed launch throws driver::DriverError, which says more than
// cutlass::Status can; the tensor map calls return the driver's result, as their signature asks.
class DriverHostAdapter final : public cutlass::CudaHostAdapter {
 public:
  using Status = cutlass::Status;

  // Without kernels, for tensor maps alone.
  explicit DriverHostAdapter(const driver::DriverApi& api) : api_(api) {}

  DriverHostAdapter(const driver::DriverApi& api, CUfunction function) : api_(api) {
    kernel_handles[0] = function;
    kernel_count = 1;
  }

  Status query_occupancy(int32_t* device_sms, int32_t* sm_occupancy, int32_t kernel_index,
                         int32_t thread_count, int32_t smem_bytes) const override;

  Status launch(dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream, void** parameters,
                int32_t kernel_index) const override;

  Status launch(dim3 grid, dim3 cluster, dim3 block, size_t smem_bytes, cudaStream_t stream,
                void** parameters, int32_t kernel_index) const override;

  // `fallback_cluster` is {0, 0, 0}, or equal to `cluster`: a preferred size with a smaller
  // fallback is a feature of sm_100 kernels, and refused as kErrorNotSupported.
  Status launch(dim3 grid, dim3 cluster, dim3 fallback_cluster, dim3 block, size_t smem_bytes,
                cudaStream_t stream, void** parameters, int32_t kernel_index) const override;

  CUresult tensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                 void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                 const int* box_lower, const int* box_upper, cuuint32_t channels,
                                 cuuint32_t pixels, const cuuint32_t* element_strides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion l2_promotion,
                                 CUtensorMapFloatOOBfill fill) const override;

  CUresult tensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2_promotion,
                                CUtensorMapFloatOOBfill fill) const override;

  CUresult tensorMapReplaceAddress(CUtensorMap* map, void* address) const override;

 protected:
  // Fill values of 1, 2 and 4 bytes, as the driver has them; else kErrorNotSupported.
  Status memsetDeviceImpl(void* destination, void const* fill_value, size_t fill_bytes,
                          size_t count, cudaStream_t stream) const override;

 private:
  CUfunction Function(int32_t kernel_index) const;

  const driver::DriverApi& api_;
};

}  // namespace stoneware::host_adapter
