// A failed driver call as an exception that says what failed, why, and what to do.

#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace stoneware::driver {

// Thrown for every CUresult but CUDA_SUCCESS, and where libcuda itself is missing or unfit.
// Python sees it as stoneware.errors.DriverError.
class DriverError : public std::runtime_error {
 public:
  // `code` is the CUresult, or 0 where the driver gave none.
  DriverError(std::string call, int code, std::string code_name, const std::string& message)
      : std::runtime_error(message),
        call_(std::move(call)),
        code_(code),
        code_name_(std::move(code_name)) {}

  const std::string& call() const { return call_; }
  int code() const { return code_; }
  const std::string& code_name() const { return code_name_; }

 private:
  std::string call_;
  int code_;
  std::string code_name_;
};

// Throws the DriverError of `result`. `doing` continues "... while ": "loading kernel X".
[[noreturn]] void ThrowDriverError(const char* call, CUresult result, std::string_view doing = {});

inline void Check(const char* call, CUresult result) {
  if (result != CUDA_SUCCESS) ThrowDriverError(call, result);
}

// For calls whose failure needs more context than the call's name. `doing` is a callable that makes
// the text, so that success pays nothing for it.
template <class Doing>
void CheckWhile(const char* call, CUresult result, const Doing& doing) {
  if (result != CUDA_SUCCESS) ThrowDriverError(call, result, doing());
}

}  // namespace stoneware::driver
