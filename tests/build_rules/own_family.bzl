"""Kernels as another repository has them: cubin_library knows nothing of their C++."""

load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

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
    open = """\
extern "C" __device__ float own_epilogue(float value);
""",
    open_kernel = """\
#include "{config_header}"

extern "C" __global__ void {id}(float* out) {{ *out = own_epilogue(own::{id}_config::kValue); }}
""",
)

_HEADER = """\
#pragma once

namespace own {{

struct {id}_config {{
  static constexpr float kValue = {value};
}};

}}  // namespace own
"""

def own_kernel(id, value, **others):
    """A config for cubin_library.

    Args:
      id: of the kernel.
      value: what it stores.
      **others: further members of a config.

    Returns:
      The struct.
    """
    return struct(
        id = id,
        op = "store",
        arch = "sm_90a",
        config_json = json.encode({"value": value}),
        defines = [],
        family = _FAMILY,
        header = _HEADER.format(id = id, value = value),
        **others
    )

OWN_KERNELS = [
    own_kernel(id, value)
    for id, value in [
        ("store_1", "1.5F"),
        ("store_2", "2.5F"),
    ]
]

def _links_in_any_order_test_impl(ctx):
    inputs = ctx.attr.kernels[CcInfo].linking_context.linker_inputs.to_list()
    own = [one for one in inputs if one.owner == ctx.attr.kernels.label]
    is_whole = [library.alwayslink for one in own for library in one.libraries]
    return [AnalysisTestResultInfo(
        success = bool(is_whole) and all(is_whole),
        message = "{} must be linked as a whole: GNU ld reads an archive once, and its cubins are ".format(
            ctx.attr.kernels.label,
        ) + "needed by host objects that it needs itself",
    )]

links_in_any_order_test = rule(
    implementation = _links_in_any_order_test_impl,
    doc = "A library of cubin_library links by a linker that reads each archive once.",
    attrs = {"kernels": attr.label(mandatory = True, providers = [CcInfo])},
    analysis_test = True,
)
