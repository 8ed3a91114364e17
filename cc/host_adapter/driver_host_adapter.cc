#include "cc/host_adapter/driver_host_adapter.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cc/driver/launch.h"

namespace stoneware::host_adapter {
namespace {

driver::Extent ToExtent(dim3 dims) { return {dims.x, dims.y, dims.z}; }

}  // namespace

CUfunction DriverHostAdapter::Function(int32_t kernel_index) const {
  if (kernel_index < 0 || kernel_index >= kernel_count) {
    throw std::out_of_range("kernel_index=" + std::to_string(kernel_index) +
                            " must be below the adapter's kernel count " +
                            std::to_string(kernel_count) +
                            "; give the adapter the kernel's function");
  }
  return static_cast<CUfunction>(kernel_handles[kernel_index]);
}

cutlass::Status DriverHostAdapter::query_occupancy(int32_t* device_sms, int32_t* sm_occupancy,
                                                   int32_t kernel_index, int32_t thread_count,
                                                   int32_t smem_bytes) const {
  CUdevice device = -1;
  driver::Check("cuCtxGetDevice", api_.cuCtxGetDevice(&device));
  driver::Check(
      "cuDeviceGetAttribute",
      api_.cuDeviceGetAttribute(device_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
  driver::Check(
      "cuOccupancyMaxActiveBlocksPerMultiprocessor",
      api_.cuOccupancyMaxActiveBlocksPerMultiprocessor(
          sm_occupancy, Function(kernel_index), thread_count, static_cast<size_t>(smem_bytes)));
  return Status::kSuccess;
}

cutlass::Status DriverHostAdapter::launch(dim3 grid, dim3 block, size_t smem_bytes,
                                          cudaStream_t stream, void** parameters,
                                          int32_t kernel_index) const {
  return launch(grid, dim3(1, 1, 1), block, smem_bytes, stream, parameters, kernel_index);
}

cutlass::Status DriverHostAdapter::launch(dim3 grid, dim3 cluster, dim3 block, size_t smem_bytes,
                                          cudaStream_t stream, void** parameters,
                                          int32_t kernel_index) const {
  driver::Launch(
      api_, Function(kernel_index),
      {ToExtent(grid), ToExtent(cluster), ToExtent(block), static_cast<unsigned>(smem_bytes)},
      stream, parameters);
  return Status::kSuccess;
}

cutlass::Status DriverHostAdapter::launch(dim3 grid, dim3 cluster, dim3 fallback_cluster,
                                          dim3 block, size_t smem_bytes, cudaStream_t stream,
                                          void** parameters, int32_t kernel_index) const {
  const bool no_fallback =
      fallback_cluster.x == 0 && fallback_cluster.y == 0 && fallback_cluster.z == 0;
  const bool same = fallback_cluster.x == cluster.x && fallback_cluster.y == cluster.y &&
                    fallback_cluster.z == cluster.z;
  if (!no_fallback && !same) return Status::kErrorNotSupported;
  return launch(grid, cluster, block, smem_bytes, stream, parameters, kernel_index);
}

CUresult DriverHostAdapter::tensorMapEncodeIm2col(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dims, const cuuint64_t* strides, const int* box_lower, const int* box_upper,
    cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) const {
  return api_.cuTensorMapEncodeIm2col(map, type, rank, address, dims, strides, box_lower, box_upper,
                                      channels, pixels, element_strides, interleave, swizzle,
                                      l2_promotion, fill);
}

CUresult DriverHostAdapter::tensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) const {
  return api_.cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, box, element_strides,
                                     interleave, swizzle, l2_promotion, fill);
}

CUresult DriverHostAdapter::tensorMapReplaceAddress(CUtensorMap* map, void* address) const {
  return api_.cuTensorMapReplaceAddress(map, address);
}

cutlass::Status DriverHostAdapter::memsetDeviceImpl(void* destination, void const* fill_value,
                                                    size_t fill_bytes, size_t count,
                                                    cudaStream_t stream) const {
  const auto address = reinterpret_cast<CUdeviceptr>(destination);
  // The driver fills with little-endian integers, as the host holds them.
  uint32_t value = 0;
  if (fill_bytes <= sizeof(value)) std::memcpy(&value, fill_value, fill_bytes);
  switch (fill_bytes) {
    case 1:
      driver::Check(
          "cuMemsetD8Async",
          api_.cuMemsetD8Async(address, static_cast<unsigned char>(value), count, stream));
      return Status::kSuccess;
    case 2:
      driver::Check(
          "cuMemsetD16Async",
          api_.cuMemsetD16Async(address, static_cast<unsigned short>(value), count, stream));
      return Status::kSuccess;
    case 4:
      driver::Check("cuMemsetD32Async", api_.cuMemsetD32Async(address, value, count, stream));
      return Status::kSuccess;
    default:
      return Status::kErrorNotSupported;
  }
}

}  // namespace stoneware::host_adapter
