"""Kernels as another repository has them: cutlass_kernels knows nothing of their C++."""

_FAMILY = struct(
    name = "store",
    device = """\
#include "{config_header}"

extern "C" __global__ void {id}(float* out) {{ *out = own::{id}_config::kValue; }}
""",
    device_hdrs = [],
    host = """\
#include "tests/build_rules/own_family/entry.h"
""",
    host_entry = """\
#include "{config_header}"

extern "C" const char {cubin_begin}[];
extern "C" const char {cubin_end}[];
extern "C" const own::Entry {entry};
const own::Entry {entry} = {{own::{id}_config::kValue, {cubin_begin}, {cubin_end}}};
""",
    host_hdrs = [],
)

_HEADER = """\
#pragma once

namespace own {{

struct {id}_config {{
  static constexpr float kValue = {value};
}};

}}  // namespace own
"""

OWN_KERNELS = [
    struct(
        id = id,
        op = "store",
        arch = "sm_90a",
        config_json = json.encode({"value": value}),
        defines = [],
        family = _FAMILY,
        header = _HEADER.format(id = id, value = value),
    )
    for id, value in [
        ("store_1", "1.5F"),
        ("store_2", "2.5F"),
    ]
]
