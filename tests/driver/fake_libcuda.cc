// A libcuda.so.1 for tests: it has no GPU, records its calls, and fails on demand.
//
// It implements the entry points of cc/driver/driver_api.h with cuda.h's own signatures; those of
// memory, streams and graphs are in fake_libcuda_memory.cc. Contexts
// are numbered objects with a stack per thread, as in the driver. Each call is recorded as one line
// "name argument=value ..." in the order of arrival.
//
// Environment, read when it is loaded:
//   FAKE_LIBCUDA_VERSION    what cuDriverGetVersion reports (default 13000)
//   FAKE_LIBCUDA_DEVICES    number of devices (default 1)
//   FAKE_LIBCUDA_MISSING    an entry point that cuGetProcAddress_v2 does not find
//   FAKE_LIBCUDA_SLOW_MS    milliseconds that cuInit and cuLibraryLoadData take: threads meet there
// From a test, through ctypes: the fake_libcuda_* functions at the end.

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/driver/fake_libcuda_calls.h"

// The opaque types of cuda.h; a test never looks inside.
struct CUctx_st {
  int device;
  unsigned long long id;
};
struct CUlib_st {};
struct CUkern_st {
  std::string symbol;
};
struct CUfunc_st {};

namespace {

std::vector<CUcontext>& Stack() {
  static thread_local std::vector<CUcontext> stack;
  return stack;
}

// What a tensor map of the fake's begins with.
constexpr std::uint64_t kMapMark = 0x70616d726f736e74;

// The tensor maps in a parameter, as address:shape.
std::string TensorMaps(const void* parameter, size_t bytes) {
  std::string maps;
  for (size_t offset = 0; offset + sizeof(CUtensorMap) <= bytes; offset += 64) {
    std::uint64_t words[3];
    std::memcpy(words, static_cast<const char*>(parameter) + offset, sizeof(words));
    if (words[0] != kMapMark) continue;
    if (!maps.empty()) maps += ',';
    maps += std::to_string(words[1]) + ':' + std::to_string(words[2]);
  }
  return maps;
}

void BeSlow() { std::this_thread::sleep_for(std::chrono::milliseconds(Fake().slow_ms)); }

bool IsDevice(int device) { return device >= 0 && device < Fake().num_devices; }

CUcontext NewContext(int device) {
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  return new CUctx_st{device, ++fake.num_contexts};
}

}  // namespace

FAKE_EXPORT CUresult cuInit(unsigned flags) {
  BeSlow();
  FAKE_CALL(Call("cuInit").With("flags", flags));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDriverGetVersion(int* version) {
  FAKE_CALL(Call("cuDriverGetVersion"));
  *version = Fake().version;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  if (static_cast<int>(error) != 99999) return CUDA_ERROR_INVALID_VALUE;
  *name = "CUDA_ERROR_FROM_THE_FUTURE";
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetCount(int* count) {
  FAKE_CALL(Call("cuDeviceGetCount"));
  *count = Fake().num_devices;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CALL(Call("cuDeviceGet").With("ordinal", ordinal));
  if (!IsDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  FAKE_CALL(Call("cuDeviceGetName").With("device", device));
  std::strncpy(name, "Fake GPU", bytes);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                          CUdevice device) {
  FAKE_CALL(Call("cuDeviceGetAttribute").With("attribute", attribute).With("device", device));
  // An A100, so that a cubin for sm_90a does not fit.
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 8;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 108;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *value = 41943040;
      break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      *value = 1215000;
      break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      *value = 5120;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 166912;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// cuda.h maps cuDeviceTotalMem, cuCtxPushCurrent and others to their _v2 names; so it does here.
FAKE_EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  FAKE_CALL(Call("cuDeviceTotalMem").With("device", device));
  *bytes = size_t{40} << 30;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  FAKE_CALL(Call("cuDevicePrimaryCtxRetain").With("device", device));
  CUcontext& primary = Fake().primary[device];
  if (primary == nullptr) primary = NewContext(device);
  *context = primary;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_CALL(Call("cuCtxGetCurrent"));
  *context = Stack().empty() ? nullptr : Stack().back();
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  FAKE_CALL(Call("cuCtxGetDevice"));
  if (Stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = Stack().back()->device;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  FAKE_CALL(Call("cuCtxGetId"));
  if (context == nullptr && Stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *id = static_cast<unsigned long long>((context != nullptr ? context : Stack().back())->id);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  FAKE_CALL(Call("cuCtxPushCurrent").With("device", context->device));
  Stack().push_back(context);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  FAKE_CALL(Call("cuCtxPopCurrent"));
  if (Stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = Stack().back();
  Stack().pop_back();
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* /*code*/,
                                       CUjit_option* /*jit_options*/, void** /*jit_values*/,
                                       unsigned num_jit_options,
                                       CUlibraryOption* /*library_options*/,
                                       void** /*library_values*/, unsigned num_library_options) {
  BeSlow();
  FAKE_CALL(Call("cuLibraryLoadData")
                .With("num_jit_options", num_jit_options)
                .With("num_library_options", num_library_options));
  *library = new CUlib_st;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary /*library*/,
                                        const char* symbol) {
  auto* const made = new CUkern_st{symbol};
  FAKE_CALL(Call("cuLibraryGetKernel").With("symbol", symbol).With("kernel", made));
  *kernel = made;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  FAKE_CALL(Call("cuKernelGetFunction").With("symbol", kernel->symbol));
  *function = new CUfunc_st;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuKernelGetParamInfo(CUkernel /*kernel*/, size_t index, size_t* offset,
                                          size_t* bytes) {
  FAKE_CALL(Call("cuKernelGetParamInfo").With("index", index));
  const std::vector<size_t>& all = Fake().parameter_bytes;
  if (index >= all.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  *bytes = all[index];
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value,
                                          CUkernel kernel, CUdevice device) {
  FAKE_CALL(Call("cuKernelSetAttribute")
                .With("attribute", attribute)
                .With("value", value)
                .With("symbol", kernel->symbol)
                .With("device", device));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                      void** parameters, void** /*extra*/) {
  if (!g_recording) return CUDA_SUCCESS;
  const unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  unsigned cluster[] = {0, 0, 0};  // not asked for
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return CUDA_ERROR_NOT_SUPPORTED;
    cluster[0] = attribute.value.clusterDim.x;
    cluster[1] = attribute.value.clusterDim.y;
    cluster[2] = attribute.value.clusterDim.z;
  }
  std::string bytes;  // of all parameters, in hexadecimal
  const std::vector<size_t>& sizes = Fake().parameter_bytes;
  for (size_t i = 0; i < sizes.size() && sizes[i] <= 8; ++i) {
    static const char digits[] = "0123456789abcdef";
    if (i != 0) bytes += ',';
    for (size_t j = 0; j < sizes[i]; ++j) {
      const unsigned char byte = static_cast<unsigned char*>(parameters[i])[j];
      bytes += digits[byte >> 4];
      bytes += digits[byte & 15];
    }
  }
  FAKE_CALL(Call("cuLaunchKernelEx")
                .WithList("grid", grid, 3)
                .WithList("cluster", cluster, 3)
                .WithList("block", block, 3)
                .With("shared_bytes", config->sharedMemBytes)
                .With("stream", config->hStream)
                .With("function", function)
                .With("device", Stack().empty() ? -1 : Stack().back()->device)
                .With("context", Stack().empty() ? 0 : Stack().back()->id)
                .With("parameters", bytes)
                .With("maps", sizes.empty() ? "" : TensorMaps(parameters[0], sizes[0])));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction,
                                                                 int /*block_threads*/,
                                                                 size_t /*shared_bytes*/) {
  FAKE_CALL(Call("cuOccupancyMaxActiveBlocksPerMultiprocessor"));
  *blocks = 1;
  return CUDA_SUCCESS;
}

// Clusters of four and eight blocks as on an H200.
FAKE_EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction,
                                                  const CUlaunchConfig* config) {
  const unsigned blocks = config->numAttrs > 0 ? config->attrs[0].value.clusterDim.x : 1;
  FAKE_CALL(Call("cuOccupancyMaxActiveClusters").With("blocks", blocks));
  *clusters = static_cast<int>(120 / blocks);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) {
  FAKE_CALL(Call("cuTensorMapEncodeTiled")
                .With("type", type)
                .With("rank", rank)
                .With("address", address)
                .WithList("dims", dims, rank)
                .WithList("strides", strides, rank - 1)
                .WithList("box", box, rank)
                .WithList("element_strides", element_strides, rank)
                .With("interleave", interleave)
                .With("swizzle", swizzle)
                .With("l2_promotion", l2_promotion)
                .With("fill", fill)
                .With("context", Stack().empty() ? 0 : Stack().back()->id));
  // What a launch shows of a map (TensorMaps): a mark, the address, and a digest of the rest.
  std::string shape = std::to_string(type) + ' ' + std::to_string(rank);
  for (cuuint32_t i = 0; i < rank; ++i) {
    shape += ' ' + std::to_string(dims[i]) + ' ' + std::to_string(i == 0 ? 0 : strides[i - 1]) +
             ' ' + std::to_string(box[i]) + ' ' + std::to_string(element_strides[i]);
  }
  const std::uint64_t words[] = {kMapMark, reinterpret_cast<std::uintptr_t>(address),
                                 std::hash<std::string>()(shape)};
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, words, sizeof(words));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuTensorMapEncodeIm2col(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                             const cuuint64_t*, const cuuint64_t*, const int*,
                                             const int*, cuuint32_t, cuuint32_t, const cuuint32_t*,
                                             CUtensorMapInterleave, CUtensorMapSwizzle,
                                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  FAKE_CALL(Call("cuTensorMapEncodeIm2col"));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  FAKE_CALL(Call("cuTensorMapReplaceAddress").With("address", address));
  std::memcpy(reinterpret_cast<char*>(map) + 8, &address, sizeof(address));
  return CUDA_SUCCESS;
}

#define FAKE_ENTRY(name) {#name, reinterpret_cast<void*>(&::name)}

FAKE_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                                      cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  static const std::map<std::string, void*> entries = {
      FAKE_ENTRY(cuInit),
      FAKE_ENTRY(cuGetErrorName),
      FAKE_ENTRY(cuDeviceGet),
      FAKE_ENTRY(cuDeviceGetCount),
      FAKE_ENTRY(cuDeviceGetName),
      FAKE_ENTRY(cuDeviceGetAttribute),
      FAKE_ENTRY(cuDeviceTotalMem),
      FAKE_ENTRY(cuDevicePrimaryCtxRetain),
      FAKE_ENTRY(cuCtxGetCurrent),
      FAKE_ENTRY(cuCtxGetDevice),
      FAKE_ENTRY(cuCtxGetId),
      FAKE_ENTRY(cuCtxPushCurrent),
      FAKE_ENTRY(cuCtxPopCurrent),
      FAKE_ENTRY(cuLibraryLoadData),
      FAKE_ENTRY(cuLibraryGetKernel),
      FAKE_ENTRY(cuKernelGetFunction),
      FAKE_ENTRY(cuKernelGetParamInfo),
      FAKE_ENTRY(cuKernelSetAttribute),
      FAKE_ENTRY(cuLaunchKernelEx),
      FAKE_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
      FAKE_ENTRY(cuOccupancyMaxActiveClusters),
      FAKE_ENTRY(cuTensorMapEncodeTiled),
      FAKE_ENTRY(cuTensorMapEncodeIm2col),
      FAKE_ENTRY(cuTensorMapReplaceAddress),
      FAKE_ENTRY(cuMemsetD8Async),
      FAKE_ENTRY(cuMemsetD16Async),
      FAKE_ENTRY(cuMemsetD32Async),
      FAKE_ENTRY(cuMemAlloc),
      FAKE_ENTRY(cuStreamCreate),
      FAKE_ENTRY(cuStreamDestroy),
      FAKE_ENTRY(cuStreamGetCaptureInfo),
      FAKE_ENTRY(cuStreamGetId),
      FAKE_ENTRY(cuStreamSynchronize),
      FAKE_ENTRY(cuThreadExchangeStreamCaptureMode),
      FAKE_ENTRY(cuUserObjectCreate),
      FAKE_ENTRY(cuUserObjectRelease),
      FAKE_ENTRY(cuGraphRetainUserObject),
  };
  FAKE_CALL(Call("cuGetProcAddress_v2")
                .With("symbol", symbol)
                .With("version", version)
                .With("flags", flags));
  const auto found = entries.find(symbol);
  if (found == entries.end() || Fake().missing == symbol) {
    *function = nullptr;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND;
  }
  *function = found->second;
  *status = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

// What follows is for tests alone.

// Every recorded call, a line each. Valid until the next call of this function.
FAKE_EXPORT const char* fake_libcuda_calls() {
  static std::string text;
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  text.clear();
  for (const std::string& call : fake.calls) text += call + "\n";
  return text.c_str();
}

FAKE_EXPORT void fake_libcuda_forget_calls() {
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.calls.clear();
}

// From now on `call` returns `result`; 0 makes it succeed again.
FAKE_EXPORT void fake_libcuda_fail(const char* call, int result) {
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.failures[call] = static_cast<CUresult>(result);
}

// The entry point that cuGetProcAddress_v2 does not find; "" for none.
FAKE_EXPORT void fake_libcuda_set_missing(const char* symbol) { Fake().missing = symbol; }

// The sizes of every kernel's parameters, as cuKernelGetParamInfo reports them.
FAKE_EXPORT void fake_libcuda_set_parameter_bytes(const size_t* bytes, size_t count) {
  Fake().parameter_bytes.assign(bytes, bytes + count);
}

// Makes a new context of `device` current on this thread, above those that are.
FAKE_EXPORT void fake_libcuda_push_new_context(int device) {
  Stack().push_back(NewContext(device));
}

// Ids of the thread's contexts, topmost last, as "1,2,".
FAKE_EXPORT const char* fake_libcuda_context_stack() {
  static thread_local std::string text;
  text.clear();
  for (const CUcontext context : Stack()) text += std::to_string(context->id) + ",";
  return text.c_str();
}

FAKE_EXPORT void fake_libcuda_set_recording(int recording) { g_recording = recording != 0; }
