// A family of somebody else's, with a namespace, an entry and sources of its own, is in the library
// that cubin_library makes: each kernel with its config's value and its cubin, in a fat binary.

#include <cstdio>
#include <cstring>

#include "tests/build_rules/own_family/entry.h"

int main() {
  const float expected[] = {1.5F, 2.5F};
  if (own::kNumKernelEntries != 2) return 1;
  for (std::size_t i = 0; i < own::kNumKernelEntries; ++i) {
    const own::Entry& entry = *own::kKernelEntries[i];
    if (entry.value != expected[i]) return 2;
    if (entry.image_end - entry.image_begin < 64) return 3;
    if (std::memcmp(entry.image_begin, "\x50\xed\x55\xba", 4) != 0) return 4;
  }
  std::puts("all as expected");
  return 0;
}
