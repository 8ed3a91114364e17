// A family's host side and one config, as the plain KernelEntry that the module binds.

#pragma once

#include "cc/gemm/config.h"
#include "cc/gemm/kernel_entry.h"

namespace stoneware::gemm {

// `cubin_begin` and `cubin_end`: the cubin's first byte and the byte after its last, from the
// generated assembler file.
template <class Config, template <class> class Host>
constexpr KernelEntry MakeKernelEntry(const char* cubin_begin, const char* cubin_end) {
  static_assert(BytesOf(Config::kA) == BytesOf(Config::kB), "a and b have elements of one size");
  return {
      Config::kId,
      cubin_begin,
      cubin_end,
      Host<Config>::kParameterBytes,
      Host<Config>::kSharedBytes,
      Config::kAIsMMajor,
      Config::kBIsNMajor,
      BytesOf(Config::kA),
      BytesOf(Config::kOut),
      &Host<Config>::CanImplement,
      &Host<Config>::Launch,
  };
}

}  // namespace stoneware::gemm
