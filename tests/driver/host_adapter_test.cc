// The parts of DriverHostAdapter and of the shims that today's kernels do not use: each reaches the
// driver with its arguments, or is refused.
//
//   host_adapter_test LIBCUDA      the path of the fake libcuda.so.1

#include "cc/host_adapter/driver_host_adapter.h"

#include <dlfcn.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "tests/expect.h"

namespace {

using cutlass::Status;
using stoneware::driver::DriverApi;
using stoneware::driver::DriverError;
using stoneware::host_adapter::DriverHostAdapter;
using stoneware::tests::Expect;
using stoneware::tests::g_failures;

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (library == nullptr) {
    std::fprintf(stderr, "host_adapter_test takes the path of the fake libcuda.so.1\n");
    return 1;
  }
  const auto calls = reinterpret_cast<const char* (*)()>(dlsym(library, "fake_libcuda_calls"));
  const auto forget = reinterpret_cast<void (*)()>(dlsym(library, "fake_libcuda_forget_calls"));
  const auto fail =
      reinterpret_cast<void (*)(const char*, int)>(dlsym(library, "fake_libcuda_fail"));
  const auto push =
      reinterpret_cast<void (*)(int)>(dlsym(library, "fake_libcuda_push_new_context"));
  const auto recorded = [&](const char* call) {
    return std::string(calls()).find(call) != std::string::npos;
  };

  push(0);
  int function = 0;  // only its address is used
  const DriverHostAdapter adapter(DriverApi::Get(), reinterpret_cast<CUfunction>(&function));

  int sms = 0;
  int blocks_per_sm = 0;
  EXPECT(adapter.query_occupancy(&sms, &blocks_per_sm, 0, 128, 1024) == Status::kSuccess);
  EXPECT(sms == 108 && blocks_per_sm == 1);

  void* no_parameters[] = {nullptr};
  const dim3 grid(8, 1, 1), cluster(2, 1, 1), smaller(1, 1, 1), none(0, 0, 0), block(64, 1, 1);
  EXPECT(adapter.launch(grid, block, 0, nullptr, no_parameters, 0) == Status::kSuccess);
  EXPECT(recorded("cuLaunchKernelEx grid=8,1,1 cluster=0,0,0 block=64,1,1"));
  forget();
  EXPECT(adapter.launch(grid, cluster, none, block, 0, nullptr, no_parameters, 0) ==
         Status::kSuccess);
  EXPECT(recorded("cuLaunchKernelEx grid=8,1,1 cluster=2,1,1 block=64,1,1"));
  forget();
  EXPECT(adapter.launch(grid, cluster, smaller, block, 0, nullptr, no_parameters, 0) ==
         Status::kErrorNotSupported);
  EXPECT(!recorded("cuLaunchKernelEx"));
  try {
    adapter.launch(grid, block, 0, nullptr, no_parameters, 1);
    Expect(false, "a kernel index beyond the kernel count must throw");
  } catch (const std::out_of_range&) {
  }

  EXPECT(adapter.memsetDevice(nullptr, uint8_t{1}, 10, nullptr) == Status::kSuccess);
  EXPECT(recorded("cuMemsetD8Async value=1 count=10"));
  EXPECT(adapter.memsetDevice(nullptr, uint16_t{515}, 20, nullptr) == Status::kSuccess);
  EXPECT(recorded("cuMemsetD16Async value=515 count=20"));
  EXPECT(adapter.memsetDevice(nullptr, uint32_t{70000}, 30, nullptr) == Status::kSuccess);
  EXPECT(recorded("cuMemsetD32Async value=70000 count=30"));
  EXPECT(adapter.memsetDevice(nullptr, uint64_t{1}, 1, nullptr) == Status::kErrorNotSupported);
  fail("cuMemsetD32Async", CUDA_ERROR_ILLEGAL_ADDRESS);
  try {
    adapter.memsetDevice(nullptr, uint32_t{0}, 1, nullptr);
    Expect(false, "a failed memset must throw");
  } catch (const DriverError& error) {
    EXPECT(error.call() == "cuMemsetD32Async" && error.code() == CUDA_ERROR_ILLEGAL_ADDRESS);
  }

  CUtensorMap map;
  EXPECT(adapter.tensorMapReplaceAddress(&map, &map) == CUDA_SUCCESS);
  EXPECT(recorded("cuTensorMapReplaceAddress address="));
  EXPECT(adapter.tensorMapEncodeIm2col(
             &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, nullptr, nullptr, nullptr, nullptr, nullptr, 1,
             1, nullptr, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
  fail("cuTensorMapEncodeIm2col", CUDA_ERROR_INVALID_VALUE);
  EXPECT(adapter.tensorMapEncodeIm2col(
             &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, nullptr, nullptr, nullptr, nullptr, nullptr, 1,
             1, nullptr, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_ERROR_INVALID_VALUE);

  // The shims, which stand in for libcudart in this program.
  int device = -1;
  EXPECT(cudaGetDevice(&device) == cudaSuccess && device == 0);
  EXPECT(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
  EXPECT(sms == 108);
  void* entry = &map;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
  EXPECT(cudaGetDriverEntryPointByVersion("cuNothing", &entry, 12000, cudaEnableDefault, &found) ==
         cudaSuccess);
  EXPECT(entry == nullptr && found == cudaDriverEntryPointSymbolNotFound);

  if (g_failures == 0) std::puts("all as expected");
  return g_failures == 0 ? 0 : 1;
}
