// What a kernel of this family shows: nothing of Stoneware's.

#pragma once

#include <cstddef>

namespace own {

struct Entry {
  float value;
  const char* cubin_begin;
  const char* cubin_end;
};

extern const Entry* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

}  // namespace own
