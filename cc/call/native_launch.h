// A plan that one native module made and another can run, without Python between them.
//
// Modules share no C++ type: each has its own libc++ and its own nanobind. So what passes between
// them is this plain structure, in a capsule that a plan has as its attribute `native_launch`. A
// plan of several has a list there: for each the capsule, and which of its tensors that one takes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace stoneware::call {

inline constexpr char kNativeLaunchAttribute[] = "native_launch";
// The number changes with the structure: modules of two builds then do not take each other's.
inline constexpr char kNativeLaunchCapsule[] = "stoneware.native_launch.3";

struct NativeLaunch {
  // Queues the plan on `stream`, a CUstream. `tensors` are device addresses in the order of the
  // plan's arguments, nullptr for one that is absent. Called with the GIL held, which it releases
  // meanwhile. Behind them is the address of the workspace, if the plan has one. Returns 0, or -1
  // with a Python exception set; throws nothing.
  int (*launch)(const NativeLaunch* self, void* const* tensors, void* stream);
  std::uint32_t num_tensors;
  // Memory for one launch, at a multiple of 16 bytes; 0: it needs none. Other work may have it
  // after this launch on the stream.
  std::size_t workspace_bytes;
};

}  // namespace stoneware::call
