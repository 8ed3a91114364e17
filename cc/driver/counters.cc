#include "cc/driver/counters.h"

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace stoneware::driver {
namespace {

constexpr std::size_t kBytesOfLaunch = kCountersOfLaunch * sizeof(unsigned);
constexpr std::size_t kLaunchesOfAllocation = 256;

struct Counters {
  std::vector<CUdeviceptr> free;
  std::map<unsigned long long, CUdeviceptr> of_stream;
};

// Of all contexts, by their ids. The driver is never called with the mutex held: while it destroys
// a graph it calls GiveBack, which waits for the mutex.
struct Store {
  std::mutex mutex;
  std::map<unsigned long long, Counters> of_context;
};

Store& TheStore() {
  // Never destroyed: a thread may launch while the process ends.
  static auto& store = *new Store;
  return store;
}

// What a graph owns.
struct Lent {
  unsigned long long context;
  CUdeviceptr counters;
};

void CUDA_CB GiveBack(void* pointer) {
  const std::unique_ptr<Lent> lent(static_cast<Lent*>(pointer));
  Store& store = TheStore();
  const std::lock_guard<std::mutex> lock(store.mutex);
  store.of_context[lent->context].free.push_back(lent->counters);
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
  constexpr std::size_t kBytes = kLaunchesOfAllocation * kBytesOfLaunch;
  const RelaxedCapture relaxed(api);
  CUdeviceptr counters = 0;
  CheckWhile("cuMemAlloc", api.cuMemAlloc(&counters, kBytes),
             [] { return "allocating " + std::to_string(kBytes) + " bytes for counters"; });
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
    std::vector<CUdeviceptr>& free = store.of_context[context].free;
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
  for (std::size_t i = 0; i < kLaunchesOfAllocation; ++i) {
    store.of_context[context].free.push_back(allocated + i * kBytesOfLaunch);
  }
  return take();
}

CUdeviceptr OfGraph(const DriverApi& api, unsigned long long context, CUgraph graph) {
  auto lent = std::make_unique<Lent>(Lent{context, Take(api, context)});
  CUuserObject object = nullptr;
  Check("cuUserObjectCreate", api.cuUserObjectCreate(&object, lent.get(), &GiveBack, 1,
                                                     CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
  const CUdeviceptr counters = lent.release()->counters;
  Check("cuGraphRetainUserObject",
        api.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE));
  return counters;
}

// What tells a stream of a context from others: its handle, which another stream may only have when
// the work of this one is done. One handle stands for the default stream of each thread.
unsigned long long IdOf(const DriverApi& api, CUstream stream) {
  if (stream == CU_STREAM_LEGACY) return 0;
  if (stream != CU_STREAM_PER_THREAD) return reinterpret_cast<std::uintptr_t>(stream);
  unsigned long long id = 0;
  Check("cuStreamGetId", api.cuStreamGetId(stream, &id));
  // Handles are addresses or small numbers.
  return id | 1ULL << 63;
}

}  // namespace

CUdeviceptr CountersFor(const DriverApi& api, CUstream stream) {
  unsigned long long context = 0;
  Check("cuCtxGetId", api.cuCtxGetId(nullptr, &context));
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  Check("cuStreamGetCaptureInfo",
        api.cuStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
  if (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) return OfGraph(api, context, graph);

  const unsigned long long id = IdOf(api, stream);
  Store& store = TheStore();
  {
    const std::lock_guard<std::mutex> lock(store.mutex);
    const auto& of_stream = store.of_context[context].of_stream;
    if (const auto found = of_stream.find(id); found != of_stream.end()) return found->second;
  }
  const CUdeviceptr taken = Take(api, context);
  const std::lock_guard<std::mutex> lock(store.mutex);
  Counters& counters = store.of_context[context];
  const auto [found, is_new] = counters.of_stream.emplace(id, taken);
  if (!is_new) counters.free.push_back(taken);  // another thread was faster
  return found->second;
}

}  // namespace stoneware::driver
