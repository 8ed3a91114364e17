// What native modules bind alike: driver::DriverError as stoneware.errors.DriverError, and plans,
// for Python and for other modules (cc/call/native_launch.h).
//
// A Plan is a class with
//
//   std::uint32_t num_tensors() const;
//   std::size_t workspace_bytes() const;
//   void Launch(void* const* tensors, CUstream stream) const;
//
// Launch takes device addresses, nullptr for a tensor that is absent, and last the workspace's
// unless that has 0 bytes. It is called without the GIL: the driver may wait for room in the
// stream's queue, and a callback that frees some may need the interpreter.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cc/call/native_launch.h"
#include "cc/driver/driver_error.h"

namespace stoneware::driver {

namespace nb = nanobind;

// Sets the Python exception of an error. Needs the GIL. Imports stoneware.errors.
inline void SetPythonError(const DriverError& error) {
  const nb::object type = nb::module_::import_("stoneware.errors").attr("DriverError");
  const nb::object instance = type(error.what(), error.call(), error.code(), error.code_name());
  PyErr_SetObject(type.ptr(), instance.ptr());
}

// Call once in a module's initialisation. Imports stoneware.errors only when an error is raised.
inline void RegisterPythonErrors() {
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const DriverError& error) {
      SetPythonError(error);
    }
  });
}

template <class Plan>
struct PlanLaunch : call::NativeLaunch {
  const Plan* plan;
  nb::object owner;  // of the plan
};

template <class Plan>
int LaunchPlan(const call::NativeLaunch* self, void* const* tensors, void* stream) {
  const Plan& plan = *static_cast<const PlanLaunch<Plan>*>(self)->plan;
  try {
    // The exception is caught with the GIL held again.
    const nb::gil_scoped_release release;
    plan.Launch(tensors, static_cast<CUstream>(stream));
    return 0;
  } catch (const DriverError& error) {
    SetPythonError(error);
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return -1;
}

template <class Plan>
nb::capsule NativeLaunchOf(nb::handle owner) {
  const auto& plan = nb::cast<const Plan&>(owner);
  auto launch = std::make_unique<PlanLaunch<Plan>>();
  launch->launch = &LaunchPlan<Plan>;
  launch->num_tensors = plan.num_tensors();
  launch->workspace_bytes = plan.workspace_bytes();
  launch->plan = &plan;
  launch->owner = nb::borrow(owner);
  const call::NativeLaunch* shown = launch.get();
  nb::capsule capsule(shown, call::kNativeLaunchCapsule, [](void* pointer) noexcept {
    delete static_cast<PlanLaunch<Plan>*>(static_cast<call::NativeLaunch*>(pointer));
  });
  launch.release();
  return capsule;
}

template <class Plan>
void Call(const Plan& plan, std::uint64_t stream, const std::vector<std::uint64_t>& addresses) {
  const bool has_workspace = plan.workspace_bytes() != 0;
  const std::size_t num_addresses = plan.num_tensors() + (has_workspace ? 1 : 0);
  if (addresses.size() != num_addresses) {
    std::string message = "the plan takes " + std::to_string(num_addresses) +
                          " addresses, but got " + std::to_string(addresses.size()) +
                          "; pass one for each tensor, 0 for none";
    if (has_workspace) {
      message +=
          ", and last that of " + std::to_string(plan.workspace_bytes()) + " bytes of workspace";
    }
    throw nb::type_error(message.c_str());
  }
  std::vector<void*> tensors;
  for (const std::uint64_t address : addresses) tensors.push_back(reinterpret_cast<void*>(address));
  const nb::gil_scoped_release release;
  plan.Launch(tensors.data(), reinterpret_cast<CUstream>(stream));
}

// Adds the ways to launch it to a plan's class.
template <class Plan>
void BindLaunches(nb::class_<Plan>& type) {
  type.def("__call__", &Call<Plan>, nb::arg("stream"), nb::arg("addresses"),
           "Queues the plan on a stream.\n\n"
           "Args:\n"
           "  stream: a CUstream as an int; 0 is the default stream.\n"
           "  addresses: the device address of each tensor, 0 for none, and behind them that of\n"
           "    `workspace_bytes` at a multiple of 16 bytes, unless these are 0.\n\n"
           "Raises:\n"
           "  DriverError: the driver refused, or a cubin does not fit the device.\n"
           "  TypeError, ValueError: an address is missing or misaligned.")
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes,
                   "Bytes of memory that a launch needs for itself.")
      .def("native_launch", &NativeLaunchOf<Plan>, nb::is_method(),
           "A capsule by which another native module launches the plan (cc/call/native_launch.h).\n"
           "Keeps the plan alive.");
}

}  // namespace stoneware::driver
