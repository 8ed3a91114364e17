// The host side of the same family.

#pragma once

#include "tests/build_rules/own_family/entry.h"

namespace own {

template <class Config>
constexpr Entry MakeEntry(const char* image_begin, const char* image_end) {
  return {Config::kValue, image_begin, image_end};
}

}  // namespace own
