// The counters that kernels find at 0: which launches share them, and when they are used again.
//
//   counters_test LIBCUDA      the path of the fake libcuda.so.1

#include "cc/driver/counters.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/expect.h"

namespace {

using stoneware::driver::CountersFor;
using stoneware::driver::DriverApi;
using stoneware::driver::DriverError;
using stoneware::driver::kCountersPerLaunch;
using stoneware::tests::Expect;
using stoneware::tests::g_failures;

CUstream Stream(std::uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }

CUdeviceptr For(std::uintptr_t stream) { return CountersFor(DriverApi::Get(), Stream(stream)); }

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (library == nullptr) {
    std::fprintf(stderr, "counters_test takes the path of the fake libcuda.so.1\n");
    return 1;
  }
  const auto calls = reinterpret_cast<const char* (*)()>(dlsym(library, "fake_libcuda_calls"));
  const auto forget = reinterpret_cast<void (*)()>(dlsym(library, "fake_libcuda_forget_calls"));
  const auto fail =
      reinterpret_cast<void (*)(const char*, int)>(dlsym(library, "fake_libcuda_fail"));
  const auto push =
      reinterpret_cast<void (*)(int)>(dlsym(library, "fake_libcuda_push_new_context"));
  const auto capture =
      reinterpret_cast<void (*)(std::uintptr_t)>(dlsym(library, "fake_libcuda_capture"));
  const auto destroy =
      reinterpret_cast<void (*)(std::uintptr_t)>(dlsym(library, "fake_libcuda_destroy_graph"));
  const auto recorded = [&](const std::string& call) {
    return std::string(calls()).find(call) != std::string::npos;
  };
  constexpr std::uintptr_t kSome = 0x1000, kOther = 0x2000;
  constexpr std::uintptr_t kLegacy = 1, kPerThread = 2;  // CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

  push(0);
  fail("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY);
  try {
    For(kSome);
    Expect(false, "a failed allocation must throw");
  } catch (const DriverError& error) {
    EXPECT(error.call() == "cuMemAlloc" && error.code() == CUDA_ERROR_OUT_OF_MEMORY);
  }
  fail("cuMemAlloc", 0);

  // Launches on one stream share, and those on others do not.
  forget();
  const CUdeviceptr some = For(kSome);
  EXPECT(recorded("mode=2\ncuMemAlloc"));  // relaxed
  EXPECT(recorded("cuMemsetD32Async value=0 count=" + std::to_string(256 * kCountersPerLaunch) +
                  "\ncuStreamSynchronize stream=20480\n"));
  EXPECT(recorded("cuThreadExchangeStreamCaptureMode mode=0\n"));  // as before: global
  forget();
  EXPECT(For(kSome) == some);
  EXPECT(!recorded("cuMemAlloc"));
  EXPECT(For(kOther) != some);
  EXPECT(For(kLegacy) == For(0) && For(0) != some);
  EXPECT(For(kPerThread) == For(kPerThread));
  CUdeviceptr of_thread = 0;
  std::thread([&] {
    push(0);
    of_thread = For(kPerThread);
  }).join();
  EXPECT(of_thread != For(kPerThread));

  // Each captured launch has its own, until its graph is destroyed.
  capture(7);
  std::set<CUdeviceptr> of_graph = {For(kSome), For(kSome)};
  EXPECT(recorded("cuGraphRetainUserObject graph=7 count=1 flags=1"));
  capture(8);
  const CUdeviceptr of_other_graph = For(kSome);
  EXPECT(of_graph.size() == 2 && of_graph.count(of_other_graph) == 0 && of_graph.count(some) == 0);
  destroy(7);
  EXPECT(of_graph.count(For(kSome)) == 1);
  capture(0);
  EXPECT(For(kSome) == some);

  // A graph that could not own its counters leaves them to the next.
  capture(10);
  const CUdeviceptr first = For(kSome);
  destroy(10);
  for (const char* call : {"cuUserObjectCreate", "cuGraphRetainUserObject"}) {
    fail(call, CUDA_ERROR_INVALID_VALUE);
    try {
      For(kSome);
      Expect(false, "a graph that owns nothing must throw");
    } catch (const DriverError& error) {
      EXPECT(error.call() == call);
    }
    fail(call, 0);
    EXPECT(For(kSome) == first);
    destroy(10);
  }
  capture(0);

  // Threads that meet on a new stream share its counters.
  CUcontext context = nullptr;
  DriverApi::Get().cuCtxGetCurrent(&context);
  CUdeviceptr of_threads[8] = {};
  std::vector<std::thread> threads;
  for (CUdeviceptr& counters : of_threads) {
    threads.emplace_back([&counters, context] {
      DriverApi::Get().cuCtxPushCurrent(context);
      counters = For(0x3000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(std::set<CUdeviceptr>(std::begin(of_threads), std::end(of_threads)).size() == 1);

  // There are always more.
  capture(9);
  std::set<CUdeviceptr> many;
  for (int i = 0; i < 1000; ++i) many.insert(For(kSome));
  EXPECT(many.size() == 1000);
  capture(0);

  // Another context has other memory.
  push(0);
  EXPECT(For(kSome) != some);

  std::printf("%d failures\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
