// The host side of half_mm.h.

#pragma once

#include "kernels/entry.h"
#include "kernels/half_mm.h"

namespace granite {

template <class Config>
constexpr Entry MakeHalfMmEntry(const char* image_begin, const char* image_end) {
  using Mm = HalfMm<Config>;
  return {Config::kId, image_begin, image_end, sizeof(typename Mm::Params),
          sizeof(typename Mm::SharedStorage)};
}

}  // namespace granite
