// What a kernel of this family shows: nothing of Stoneware's.

#pragma once

#include <cstddef>

namespace own {

struct Entry {
  float value;
  const char* image_begin;
  const char* image_end;
};

extern const Entry* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

}  // namespace own
