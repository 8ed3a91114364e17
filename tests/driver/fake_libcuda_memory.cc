// The fake libcuda's memory, which is only addresses, its streams, and what its graphs own.

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <utility>

#include "tests/driver/fake_libcuda_calls.h"

// An opaque type of cuda.h; a test never looks inside.
struct CUuserObject_st {
  void* pointer;
  CUhostFn destroy;
};

FAKE_EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  FAKE_CALL(Call("cuMemAlloc").With("bytes", bytes));
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  *address = (CUdeviceptr{1} << 40) + fake.allocated;
  fake.allocated += bytes;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  FAKE_CALL(Call("cuStreamCreate").With("flags", flags));
  *stream = reinterpret_cast<CUstream>(std::uintptr_t{0x5000});
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamDestroy(CUstream stream) {
  FAKE_CALL(Call("cuStreamDestroy").With("stream", stream));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  FAKE_CALL(Call("cuStreamSynchronize").With("stream", stream));
  return CUDA_SUCCESS;
}

// The default stream of each thread has its own, and the legacy one is the same by both its
// handles.
FAKE_EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
  FAKE_CALL(Call("cuStreamGetId").With("stream", stream));
  static thread_local const char of_thread = 0;
  *id = reinterpret_cast<std::uintptr_t>(stream == CU_STREAM_PER_THREAD ? &of_thread : nullptr);
  if (stream != CU_STREAM_PER_THREAD && stream != CU_STREAM_LEGACY) {
    *id = reinterpret_cast<std::uintptr_t>(stream);
  }
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status,
                                            cuuint64_t*, CUgraph* graph, const CUgraphNode**,
                                            const CUgraphEdgeData**, size_t*) {
  FAKE_CALL(Call("cuStreamGetCaptureInfo").With("stream", stream));
  *graph = Fake().capturing;
  *status = *graph == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  FAKE_CALL(Call("cuThreadExchangeStreamCaptureMode").With("mode", *mode));
  static thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, current);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuUserObjectCreate(CUuserObject* object, void* pointer, CUhostFn destroy,
                                        unsigned references, unsigned flags) {
  FAKE_CALL(Call("cuUserObjectCreate").With("references", references).With("flags", flags));
  *object = new CUuserObject_st{pointer, destroy};
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  FAKE_CALL(Call("cuUserObjectRelease").With("count", count));
  object->destroy(object->pointer);
  delete object;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count,
                                             unsigned flags) {
  FAKE_CALL(Call("cuGraphRetainUserObject")
                .With("graph", graph)
                .With("count", count)
                .With("flags", flags));
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  fake.owned.emplace(graph, object);
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemsetD8Async(CUdeviceptr, unsigned char value, size_t count, CUstream) {
  FAKE_CALL(Call("cuMemsetD8Async").With("value", int{value}).With("count", count));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemsetD16Async(CUdeviceptr, unsigned short value, size_t count, CUstream) {
  FAKE_CALL(Call("cuMemsetD16Async").With("value", value).With("count", count));
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemsetD32Async(CUdeviceptr, unsigned value, size_t count, CUstream) {
  FAKE_CALL(Call("cuMemsetD32Async").With("value", value).With("count", count));
  return CUDA_SUCCESS;
}

// What follows is for tests alone.

// From now on every stream captures into `graph`; 0: none captures.
FAKE_EXPORT void fake_libcuda_capture(std::uintptr_t graph) {
  Fake().capturing = reinterpret_cast<CUgraph>(graph);
}

// Destroys what `graph` owns, as the driver does when neither it nor an executable is left.
FAKE_EXPORT void fake_libcuda_destroy_graph(std::uintptr_t graph) {
  State& fake = Fake();
  const std::lock_guard<std::mutex> lock(fake.mutex);
  const auto [first, last] = fake.owned.equal_range(reinterpret_cast<CUgraph>(graph));
  for (auto found = first; found != last; ++found) {
    found->second->destroy(found->second->pointer);
    delete found->second;
  }
  fake.owned.erase(first, last);
}
