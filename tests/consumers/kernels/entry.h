// What the module knows of a kernel.

#pragma once

#include <cstddef>

namespace granite {

struct Entry {
  const char* id;
  const char* image_begin;
  const char* image_end;
  std::size_t parameter_bytes;
  std::size_t shared_bytes;
};

extern const Entry* const kKernelEntries[];
extern const std::size_t kNumKernelEntries;

}  // namespace granite
