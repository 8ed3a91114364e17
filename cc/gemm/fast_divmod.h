// Division by a number that the host knows before the launch, without a division on the device.

#pragma once

#include <cstdint>

namespace stoneware::gemm {

// A quotient is a multiplication and a shift: for every 0 <= dividend < 2^31, dividend / divisor is
// dividend * multiplier / 2^(32 + shift_right), rounded down, where multiplier is
// 2^(32 + shift_right) / divisor rounded up (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication", 1994, section 4).
struct FastDivmod {
  std::int32_t divisor;
  std::uint32_t multiplier;
  std::uint32_t shift_right;

  FastDivmod() = default;

  explicit FastDivmod(int divisor_value) : divisor(divisor_value), multiplier(0), shift_right(0) {
    if (divisor == 1) return;
    unsigned log2 = 0;  // rounded up
    while ((std::uint64_t{1} << log2) < static_cast<std::uint64_t>(divisor)) ++log2;
    const auto unsigned_divisor = static_cast<std::uint64_t>(divisor);
    multiplier = static_cast<std::uint32_t>(
        ((std::uint64_t{1} << (31 + log2)) + unsigned_divisor - 1) / unsigned_divisor);
    shift_right = log2 - 1;
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ void operator()(int& quotient, int& remainder, int dividend) const {
    quotient = divisor != 1 ? __umulhi(dividend, multiplier) >> shift_right : dividend;
    remainder = dividend - quotient * divisor;
  }
#else
  void operator()(int& quotient, int& remainder, int dividend) const {
    quotient = divisor != 1 ? static_cast<int>(static_cast<std::uint64_t>(dividend) * multiplier >>
                                               (32 + shift_right))
                            : dividend;
    remainder = dividend - quotient * divisor;
  }
#endif
};

}  // namespace stoneware::gemm
