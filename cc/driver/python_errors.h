// Makes driver::DriverError appear in Python as stoneware.errors.DriverError.

#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "cc/driver/driver_error.h"

namespace stoneware::driver {

// Sets the Python exception of an error. Needs the GIL. Imports stoneware.errors.
inline void SetPythonError(const DriverError& error) {
  namespace nb = nanobind;
  const nb::object type = nb::module_::import_("stoneware.errors").attr("DriverError");
  const nb::object instance = type(error.what(), error.call(), error.code(), error.code_name());
  PyErr_SetObject(type.ptr(), instance.ptr());
}

// Call once in a module's initialisation. Imports stoneware.errors only when an error is raised.
inline void RegisterPythonErrors() {
  namespace nb = nanobind;
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const DriverError& error) {
      SetPythonError(error);
    }
  });
}

}  // namespace stoneware::driver
