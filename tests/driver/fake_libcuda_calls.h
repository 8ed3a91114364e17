// The fake libcuda's record of its calls, and of those that must fail.

#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace fake_libcuda {

inline std::string Environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

struct State {
  std::mutex mutex;
  std::vector<std::string> calls;
  std::map<std::string, CUresult> failures;
  std::vector<size_t> parameter_bytes;
  std::map<int, CUcontext> primary;
  std::uintptr_t allocated = 0;  // bytes, of device memory that is only an address
  CUgraph capturing = nullptr;   // what every stream captures into
  std::multimap<CUgraph, CUuserObject> owned;
  unsigned long long num_contexts = 0;

  const int version = std::stoi(Environment("FAKE_LIBCUDA_VERSION", "13000"));
  const int num_devices = std::stoi(Environment("FAKE_LIBCUDA_DEVICES", "1"));
  std::string missing = Environment("FAKE_LIBCUDA_MISSING", "");
  const int slow_ms = std::stoi(Environment("FAKE_LIBCUDA_SLOW_MS", "0"));
};

inline State& Fake() {
  static State* state = new State;  // outlives every thread that may still call
  return *state;
}

// Off while a benchmark measures the way to a call: an unrecorded call costs next to nothing.
inline bool g_recording = true;

// One call being recorded: collects the arguments, and knows whether it is to fail.
class Call {
 public:
  explicit Call(const char* name) : name_(name) { text_ << name; }

  template <class Value>
  Call& With(const char* argument, const Value& value) {
    text_ << ' ' << argument << '=';
    if constexpr (std::is_pointer_v<Value> && !std::is_same_v<Value, const char*>) {
      text_ << reinterpret_cast<uintptr_t>(value);
    } else {
      text_ << value;
    }
    return *this;
  }

  template <class Value>
  Call& WithList(const char* argument, const Value* values, size_t count) {
    text_ << ' ' << argument << '=';
    for (size_t i = 0; i < count; ++i) text_ << (i == 0 ? "" : ",") << values[i];
    return *this;
  }

  CUresult Done() {
    State& fake = Fake();
    const std::lock_guard<std::mutex> lock(fake.mutex);
    fake.calls.push_back(text_.str());
    const auto failure = fake.failures.find(name_);
    return failure == fake.failures.end() ? CUDA_SUCCESS : failure->second;
  }

 private:
  const char* name_;
  std::ostringstream text_;
};

}  // namespace fake_libcuda

using namespace fake_libcuda;

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

// A macro and not a function: the fake's entry points return early from it.
#define FAKE_CALL(call)                                                                 \
  do {                                                                                  \
    if (g_recording) {                                                                  \
      if (const CUresult result = (call).Done(); result != CUDA_SUCCESS) return result; \
    }                                                                                   \
  } while (false)
