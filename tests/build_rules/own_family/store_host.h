// The host side of the same family.

#pragma once

#include "tests/build_rules/own_family/entry.h"

namespace own {

template <class Config>
constexpr Entry MakeEntry(const char* cubin_begin, const char* cubin_end) {
  return {Config::kValue, cubin_begin, cubin_end};
}

}  // namespace own
