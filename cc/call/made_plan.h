// What a FastCall knows of a plan, read once from what `make` returned.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cc/call/native_launch.h"

namespace stoneware::call {

namespace nb = nanobind;

inline constexpr int kMaxTensors = 32;
inline constexpr int kMaxObjects = 8;

// What an op's calls look like.
struct Signature {
  int num_tensors = 0;          // the first arguments
  int num_objects = 0;          // the arguments after them
  std::vector<int> outs;        // the tensors that are allocated if they are None
  std::size_t num_results = 1;  // how many of `outs`, the first, are returned
  std::uint32_t optional = 0;   // a bit per tensor that may be None
  std::uint32_t aligned = 0;    // a bit per tensor on whose alignment the plan depends
  std::vector<int> plan_order;  // the tensors, in the order of a plan's arguments
  bool is_layer = false;        // whether calls follow gradients
  bool is_cast = false;         // whether those of a layer under autocast are usual
};

// An output that is allocated: shape, strides, dtype.
using Output = std::tuple<nb::object, nb::object, nb::object>;

// A native launch or a function in Python, and the positions of its tensors among a call's.
struct Launch {
  nb::object step;
  const NativeLaunch* native = nullptr;  // of the capsule `step`; nullptr: `step` is called
  std::vector<int> tensors;
  std::vector<nb::object> values;  // what a function takes after the tensors
  int result = -1;  // the position of the tensor that `step` returns; -1: it returns none
  std::optional<Output> workspace;  // of `native`
};

// What `make` returned. A plan may go from the table while a call still runs it.
struct MadePlan {
  nb::object plan;
  Launch direct;                 // `step` is empty unless the plan is direct
  std::vector<Launch> launches;  // the plan, or its native_launch
  bool is_native = false;        // whether one of them is native
  bool is_kept = false;
  nb::object device;
  std::vector<Output> outputs;  // in the order of Signature::outs
  std::uint32_t returned = 0;   // a bit for each output that a step returns
  // Unless a step in Python takes what is in between, that is one allocation, and no tensors: the
  // first byte of each output behind the results, and the whole, of bytes.
  std::vector<std::size_t> offsets;
  std::optional<Output> workspace;
};

// Reads (plan, is_kept, device, outputs); false with an exception.
bool ReadPlan(nb::object returned, const Signature& signature, nb::handle uint8, MadePlan* made);

}  // namespace stoneware::call
