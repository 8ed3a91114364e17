// The host side of epilogue_sm90.h.

#pragma once

#include <cstring>

#include "cc/gemm/epilogue_sm90.h"
#include "cc/gemm/kernel_entry.h"

namespace stoneware::gemm::sm90 {

static_assert(EpilogueParams::kBytes == kEpilogueBytes);

// For the launch of an open kernel; a closed one does not have this part.
template <class Params>
void CopyEpilogue(OpenParams<Params>* params, const GemmTensors& tensors) {
  if (tensors.epilogue != nullptr) {
    std::memcpy(params->epilogue.bytes, tensors.epilogue, kEpilogueBytes);
  }
}

}  // namespace stoneware::gemm::sm90
