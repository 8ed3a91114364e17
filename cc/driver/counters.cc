#include "cc/driver/counters.h"

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace stoneware::driver {
namespace {

constexpr std::size_t kBytesPerLaunch = kCountersPerLaunch * sizeof(unsigned);
constexpr std::size_t kLaunchesPerAllocation = 256;

struct Counters {
  std::vector<CUdeviceptr> free;
  std::map<unsigned long long, CUdeviceptr> by_stream;
};

// The counters of every context, by its id. The driver is never called with the mutex held: while
// it destroys a graph it calls GiveBack, which waits for the mutex.
struct Store {
  std::mutex mutex;
  std::map<unsigned long long, Counters> by_context;
};

Store& TheStore() {
  // Never destroyed: a thread may launch while the process ends.
  static auto& store = *new Store;
  return store;
}

// Counters that a graph owns.
struct GraphCounters {
  unsigned long long context;
  CUdeviceptr counters;
};

void CUDA_CB GiveBack(void* pointer) {
  const std::unique_ptr<GraphCounters> owned(static_cast<GraphCounters*>(pointer));
  Store& store = TheStore();
  const std::lock_guard<std::mutex> lock(store.mutex);
  store.by_context[owned->context].free.push_back(owned->counters);
}

// While it lives, this thread may allocate although a stream is capturing.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DriverApi& api) : api_(api) {
    Check("cuThreadExchangeStreamCaptureMode", api_.cuThreadExchangeStreamCaptureMode(&mode_));
  }
  ~RelaxedCapture() { api_.cuThreadExchangeStreamCaptureMode(&mode_); }

  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const DriverApi& api_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Counters of many launches, at 0. They are zeroed on a stream of their own, because the caller's
// may be capturing.
CUdeviceptr Allocate(const DriverApi& api) {
  constexpr std::size_t kBytes = kLaunchesPerAllocation * kBytesPerLaunch;
  const RelaxedCapture relaxed(api);
  CUdeviceptr counters = 0;
  CheckWhile("cuMemAlloc", api.cuMemAlloc(&counters, kBytes), [] {
    return "allocating " + std::to_string(kBytes) +
           " bytes for the counters of kernels that split k; free memory "
           "(torch.cuda.empty_cache()), or use splits=1";
  });
  // A failure from here on leaves the context unusable, so nothing is given back.
  CUstream stream = nullptr;
  Check("cuStreamCreate", api.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  Check("cuMemsetD32Async", api.cuMemsetD32Async(counters, 0, kBytes / sizeof(unsigned), stream));
  Check("cuStreamSynchronize", api.cuStreamSynchronize(stream));
  Check("cuStreamDestroy", api.cuStreamDestroy(stream));
  return counters;
}

CUdeviceptr Take(const DriverApi& api, unsigned long long context) {
  Store& store = TheStore();
  const auto take = [&]() -> CUdeviceptr {
    std::vector<CUdeviceptr>& free = store.by_context[context].free;
    if (free.empty()) return 0;
    const CUdeviceptr counters = free.back();
    free.pop_back();
    return counters;
  };
  {
    const std::lock_guard<std::mutex> lock(store.mutex);
    if (const CUdeviceptr counters = take()) return counters;
  }
  const CUdeviceptr allocated = Allocate(api);
  const std::lock_guard<std::mutex> lock(store.mutex);
  for (std::size_t i = 0; i < kLaunchesPerAllocation; ++i) {
    store.by_context[context].free.push_back(allocated + i * kBytesPerLaunch);
  }
  return take();
}

CUdeviceptr CountersForGraph(const DriverApi& api, unsigned long long context, CUgraph graph) {
  auto owned = std::make_unique<GraphCounters>(GraphCounters{context, Take(api, context)});
  const CUdeviceptr counters = owned->counters;
  CUuserObject object = nullptr;
  const CUresult created =
      api.cuUserObjectCreate(&object, owned.get(), &GiveBack, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  GraphCounters* const given = owned.release();
  if (created != CUDA_SUCCESS) GiveBack(given);
  Check("cuUserObjectCreate", created);
  const CUresult retained =
      api.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (retained != CUDA_SUCCESS) Check("cuUserObjectRelease", api.cuUserObjectRelease(object, 1));
  Check("cuGraphRetainUserObject", retained);
  return counters;
}

}  // namespace

CUdeviceptr CountersFor(const DriverApi& api, CUstream stream) {
  unsigned long long context = 0;
  Check("cuCtxGetId", api.cuCtxGetId(nullptr, &context));
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  Check("cuStreamGetCaptureInfo",
        api.cuStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
  if (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) return CountersForGraph(api, context, graph);

  // Unlike a handle, it is never given to another stream.
  unsigned long long id = 0;
  Check("cuStreamGetId", api.cuStreamGetId(stream, &id));
  Store& store = TheStore();
  {
    const std::lock_guard<std::mutex> lock(store.mutex);
    const auto& by_stream = store.by_context[context].by_stream;
    if (const auto found = by_stream.find(id); found != by_stream.end()) return found->second;
  }
  const CUdeviceptr taken = Take(api, context);
  const std::lock_guard<std::mutex> lock(store.mutex);
  Counters& counters = store.by_context[context];
  const auto [found, is_new] = counters.by_stream.emplace(id, taken);
  if (!is_new) counters.free.push_back(taken);  // another thread was faster
  return found->second;
}

}  // namespace stoneware::driver
