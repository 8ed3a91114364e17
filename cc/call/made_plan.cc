#include "cc/call/made_plan.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace stoneware::call {
namespace {

// Bytes; that of torch's allocations on a GPU is a multiple.
constexpr std::size_t kWorkspaceAlignment = 256;

// Whether an output is memory for what is in between.
bool IsInBetween(const Signature& signature, int position) {
  const auto results_end = signature.outs.begin() + static_cast<int>(signature.num_results);
  return std::find(results_end, signature.outs.end(), position) != signature.outs.end();
}

// From tensors of a plan to those of a call; false with an exception.
bool ToPositions(const Signature& signature, std::vector<int>* tensors) {
  for (int& tensor : *tensors) {
    if (tensor < 0 || static_cast<std::size_t>(tensor) >= signature.plan_order.size()) {
      PyErr_Format(PyExc_ValueError, "a step must name tensors of the plan, 0 to %zu, but names %d",
                   signature.plan_order.size() - 1, tensor);
      return false;
    }
    tensor = signature.plan_order[tensor];
  }
  return true;
}

bool ReadDirect(const Signature& signature, MadePlan* made) {
  nb::object found = nb::steal(PyObject_GetAttrString(made->plan.ptr(), "direct"));
  if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
  PyErr_Clear();
  if (!found || found.is_none()) return true;
  std::tuple<nb::object, std::vector<int>, std::vector<nb::object>> direct;
  auto& [function, tensors, values] = direct;
  if (!nb::try_cast(found, direct) || PyCallable_Check(function.ptr()) == 0 ||
      tensors.size() + values.size() > static_cast<std::size_t>(kMaxTensors)) {
    PyErr_Format(PyExc_TypeError,
                 "direct must be a function, the positions of its tensors, and the values that it "
                 "takes after them, at most %d of both, but is something else; correct the plan",
                 kMaxTensors);
    return false;
  }
  if (!ToPositions(signature, &tensors)) return false;
  made->direct.step = std::move(function);
  made->direct.tensors = std::move(tensors);
  made->direct.values = std::move(values);
  return true;
}

// Memory as a tensor of bytes.
Output Bytes(std::size_t number, nb::handle uint8) {
  return {nb::make_tuple(number), nb::make_tuple(1), nb::borrow(uint8)};
}

bool ReadLaunches(const Signature& signature, nb::handle uint8, MadePlan* made) {
  if (made->direct.step && PyCallable_Check(made->plan.ptr()) == 0) return true;
  nb::object found = nb::steal(PyObject_GetAttrString(made->plan.ptr(), kNativeLaunchAttribute));
  if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) return false;
  PyErr_Clear();
  // A plan in Python is one step, and so is a plan with one native launch.
  if (!found || found.is_none()) found = made->plan;
  const std::size_t num_tensors = signature.plan_order.size();
  std::vector<std::tuple<nb::object, std::vector<int>, int>> steps(1);
  if (PyList_Check(found.ptr())) {
    if (!nb::try_cast(found, steps)) {
      PyErr_SetString(PyExc_TypeError,
                      "native_launch must be a capsule, or a list of (step, positions of tensors, "
                      "position of what it returns or -1), but is something else; correct the "
                      "plan");
      return false;
    }
  } else {
    steps[0] = {found, std::vector<int>(num_tensors), -1};
    std::iota(std::get<1>(steps[0]).begin(), std::get<1>(steps[0]).end(), 0);
  }
  for (auto& [step, tensors, result] : steps) {
    const NativeLaunch* native = nullptr;
    if (PyCallable_Check(step.ptr()) == 0) {
      native =
          static_cast<const NativeLaunch*>(PyCapsule_GetPointer(step.ptr(), kNativeLaunchCapsule));
      if (native == nullptr) return false;
      made->is_native = true;
    }
    const std::size_t takes = native != nullptr ? native->num_tensors : tensors.size();
    if (takes != tensors.size() || takes > static_cast<std::size_t>(kMaxTensors)) {
      PyErr_Format(PyExc_TypeError,
                   "a plan of this op must take %zu tensors, but its native launch takes %zu",
                   tensors.size(), takes);
      return false;
    }
    if (!ToPositions(signature, &tensors)) return false;
    std::vector<int> results(result >= 0 ? 1 : 0, result);
    if (!ToPositions(signature, &results)) return false;
    for (const int position : results) {
      const bool is_out =
          std::find(signature.outs.begin(), signature.outs.end(), position) != signature.outs.end();
      if (native == nullptr && is_out) continue;
      PyErr_Format(PyExc_ValueError,
                   "a step in Python may return an output of the call, but step %zu returns tensor "
                   "%d; correct the plan",
                   made->launches.size(), result);
      return false;
    }
    result = results.empty() ? -1 : results[0];
    if (result >= 0) made->returned |= std::uint32_t{1} << result;
    std::optional<Output> workspace;
    if (native != nullptr && native->workspace_bytes != 0) {
      workspace = Bytes(native->workspace_bytes, uint8);
    }
    made->launches.push_back(
        {std::move(step), native, std::move(tensors), {}, result, std::move(workspace)});
  }
  return true;
}

// Places the outputs behind the results in one workspace; false with an exception.
bool PlaceInWorkspace(const Signature& signature, nb::handle uint8, MadePlan* made) {
  for (const Launch& launch : made->launches) {
    const auto is_in_between = [&signature](int position) {
      return IsInBetween(signature, position);
    };
    if (launch.native == nullptr &&
        std::any_of(launch.tensors.begin(), launch.tensors.end(), is_in_between)) {
      return true;
    }
  }
  std::size_t end = 0;
  for (std::size_t i = signature.num_results; i < signature.outs.size(); ++i) {
    const auto& [shape, strides, dtype] = made->outputs[i];
    std::vector<std::int64_t> extents;
    std::vector<std::int64_t> steps;
    if (!nb::try_cast(shape, extents) || !nb::try_cast(strides, steps) ||
        extents.size() != steps.size()) {
      PyErr_SetString(PyExc_TypeError,
                      "shape and strides of an output must be tuples of ints of one length; "
                      "correct make");
      return false;
    }
    const nb::object itemsize = nb::steal(PyObject_GetAttrString(dtype.ptr(), "itemsize"));
    const std::size_t item_bytes = itemsize ? PyLong_AsSize_t(itemsize.ptr()) : 0;
    if (PyErr_Occurred() != nullptr) return false;
    std::int64_t num_items = 1;
    for (std::size_t dim = 0; dim < extents.size(); ++dim) {
      num_items = extents[dim] == 0 ? 0 : num_items + (extents[dim] - 1) * steps[dim];
      if (num_items == 0) break;
    }
    made->offsets.push_back(end);
    const bool is_returned = (made->returned >> signature.outs[i] & 1) != 0;
    const std::size_t bytes = is_returned ? 0 : static_cast<std::size_t>(num_items) * item_bytes;
    end += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  }
  if (!made->offsets.empty()) {
    made->workspace = Bytes(end, uint8);
  }
  return true;
}

}  // namespace

bool ReadPlan(nb::object returned, const Signature& signature, nb::handle uint8, MadePlan* made) {
  std::tuple<nb::object, bool, nb::object, std::vector<Output>> parts;
  if (!nb::try_cast(returned, parts) || std::get<3>(parts).size() < signature.outs.size()) {
    PyErr_SetString(PyExc_TypeError,
                    "make must return a tuple (plan, is_kept, device, outputs), with the shape, "
                    "strides and dtype of each output, but returned something else; correct make");
    return false;
  }
  std::tie(made->plan, made->is_kept, made->device, made->outputs) = std::move(parts);
  return ReadDirect(signature, made) && ReadLaunches(signature, uint8, made) &&
         PlaceInWorkspace(signature, uint8, made);
}

}  // namespace stoneware::call
