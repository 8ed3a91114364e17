// What the way to the driver costs: nanoseconds that cc/driver and cc/host_adapter add to a call.
//
//   driver_overhead LIBCUDA
//
// LIBCUDA is a fake libcuda whose entry points return at once (//tests/driver:fake_libcuda). Each
// round measures the fake's function through a plain pointer and through our indirections, one
// after the other, so that a drift of the clock meets all alike. Prints JSON on standard output and
// a readable line per call on standard error.

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cc/driver/driver_api.h"
#include "cc/driver/launch.h"
#include "cc/host_adapter/tensor_map_memo.h"

namespace {

using stoneware::driver::DriverApi;

constexpr int kRounds = 201;
constexpr int kCallsPerRound = 20000;

// Distinct from any value that the compiler could assume, so that no loop is optimised away.
volatile int g_sink = 0;

template <class Function>
double NanosecondsPerCall(const Function& function) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kCallsPerRound; ++i) g_sink = static_cast<int>(function());
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
  return taken.count() / kCallsPerRound;
}

// Median and interquartile range.
struct Spread {
  double median_ns;
  double spread_ns;
};

Spread Summarise(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t count = samples.size();
  return {samples[count / 2], samples[count * 3 / 4] - samples[count / 4]};
}

std::string Json(const Spread& spread) {
  char text[96];
  std::snprintf(text, sizeof(text), "{\"median_ns\": %.2f, \"spread_ns\": %.2f}", spread.median_ns,
                spread.spread_ns);
  return text;
}

template <class Direct, class Indirect>
std::string Compare(const char* call, const Direct& direct, const Indirect& indirect) {
  std::vector<double> direct_ns;
  std::vector<double> indirect_ns;
  std::vector<double> added_ns;
  for (int round = 0; round < kRounds; ++round) {
    direct_ns.push_back(NanosecondsPerCall(direct));
    indirect_ns.push_back(NanosecondsPerCall(indirect));
    added_ns.push_back(indirect_ns.back() - direct_ns.back());
  }
  const Spread direct_spread = Summarise(direct_ns);
  const Spread indirect_spread = Summarise(indirect_ns);
  const Spread added = Summarise(added_ns);
  std::fprintf(stderr, "%-24s direct %6.2f ns, ours %6.2f ns, added %6.2f ns (spread %.2f)\n", call,
               direct_spread.median_ns, indirect_spread.median_ns, added.median_ns,
               added.spread_ns);
  return std::string("{\"call\": \"") + call + "\", \"direct\": " + Json(direct_spread) +
         ", \"ours\": " + Json(indirect_spread) + ", \"added\": " + Json(added) + "}";
}

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "driver_overhead: %s\n", message.c_str());
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) Fail("takes one argument, the path of the fake libcuda.so.1");
  // Its soname is libcuda.so.1, so the driver's own dlopen finds this one and no other.
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) Fail(std::string("cannot open the fake libcuda: ") + dlerror());
  const auto set_recording =
      reinterpret_cast<void (*)(int)>(dlsym(library, "fake_libcuda_set_recording"));
  const auto encode = reinterpret_cast<decltype(&::cuTensorMapEncodeTiled)>(
      dlsym(library, "cuTensorMapEncodeTiled"));
  const auto launch =
      reinterpret_cast<decltype(&::cuLaunchKernelEx)>(dlsym(library, "cuLaunchKernelEx"));
  if (set_recording == nullptr || encode == nullptr || launch == nullptr) {
    Fail(std::string(argv[1]) +
         " must be the fake libcuda of //tests/driver, but lacks its "
         "functions; pass the path of its libcuda.so.1");
  }
  set_recording(0);

  CUtensorMap map;
  const cuuint64_t dims[] = {4096, 4096, 1};
  const cuuint64_t strides[] = {4096, 0};
  const cuuint32_t box[] = {128, 128, 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  const auto encode_with = [&](auto function) {
    return function(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, nullptr, dims, strides, box,
                    element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  const std::string encode_json = Compare(
      "cuTensorMapEncodeTiled", [&] { return encode_with(encode); },
      [&] { return encode_with(&stoneware::host_adapter::EncodeTiled); });

  const stoneware::driver::LaunchShape shape = {{132, 1, 1}, {2, 1, 1}, {384, 1, 1}, 200000};
  CUlaunchConfig config{};
  CUlaunchAttribute cluster{};
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* parameters[] = {&map};
  const std::string launch_json = Compare(
      "cuLaunchKernelEx", [&] { return launch(&config, nullptr, parameters, nullptr); },
      [&] {
        stoneware::driver::Launch(DriverApi::Get(), nullptr, shape, nullptr, parameters);
        return CUDA_SUCCESS;
      });

  std::printf("{\"rounds\": %d, \"calls_per_round\": %d, \"calls\": [%s, %s]}\n", kRounds,
              kCallsPerRound, encode_json.c_str(), launch_json.c_str());
  return 0;
}
