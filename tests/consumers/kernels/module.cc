// kernels._kernels: the kernels inside this module.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels/entry.h"

#ifndef GRANITE_COPTS
#error "copts of nanobind_module must reach this file"
#endif

NB_MODULE(_kernels, m) {
  m.def("kernels", [] {
    std::vector<std::string> ids;
    for (std::size_t i = 0; i < granite::kNumKernelEntries; ++i) {
      ids.emplace_back(granite::kKernelEntries[i]->id);
    }
    return ids;
  });
}
