// What tests of C++ code expect.

#pragma once

#include <cstdio>

namespace stoneware::tests {

// Of all expectations of the program.
inline int g_failures = 0;

inline void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  ++g_failures;
}

}  // namespace stoneware::tests

#define EXPECT(condition) stoneware::tests::Expect(condition, #condition)
