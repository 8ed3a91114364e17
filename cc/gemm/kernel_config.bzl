"""Makes a checked config for cubin_library, with its C++ code."""

load("//py/stoneware:ops.bzl", "served_matmuls")

_DTYPES = ["bf16", "e4m3", "e5m2", "fp16", "fp32"]

_SCHEDULES = {
    "cooperative": "Schedule::kCooperative",
    "pingpong": "Schedule::kPingpong",
    "warpspecialized": "Schedule::kWarpSpecialized",
}

# Widths of wgmma that CuTe has without CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED: with it a tile of 160
# columns is not computed by five of 32, but its headers are twice as long.
_USUAL_WIDTHS = [8, 16, 32, 64, 96, 128, 192, 256]

_HEADER = """\
// Generated from the config of {id}.

#pragma once

#include "cc/gemm/config.h"

namespace stoneware::gemm {{

struct {id}_config {{
{members}
}};

}}  // namespace stoneware::gemm
"""

_DEVICE = """\
// Generated: the device side of {{id}}, a cubin with one kernel of that name.

#include "{{config_header}}"
#include "cc/gemm/{family}.cuh"

using Kernel = stoneware::gemm::sm90::{template}Kernel<stoneware::gemm::{{id}}_config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1)
{{id}}(__grid_constant__ const Kernel::Params params) {{{{
  extern __shared__ __align__(Kernel::kSharedAlignment) char shared_storage[];
  Kernel::Run(params, shared_storage);
}}}}
"""

# The kernels of one op, open: cc/gemm/epilogue_sm90.h.
_OPEN = """\
// Generated: open kernels of {family}.

#include "cc/gemm/{family}.cuh"

using namespace stoneware::gemm;

template <class Config>
using Kernel = sm90::{template}Kernel<sm90::Open<Config>>;
"""

_OPEN_KERNEL = """\
#include "{config_header}"

extern "C" __global__ void __launch_bounds__(Kernel<{id}_config>::kThreads, 1)
{id}(__grid_constant__ const sm90::OpenParams<Kernel<{id}_config>::Params> params) {{
  extern __shared__ __align__(Kernel<{id}_config>::kSharedAlignment) char shared_storage[];
  Kernel<{id}_config>::Run(params, shared_storage);
}}
"""

_HOST = """\
// Generated: the host side of every kernel of {family}.

#include "cc/gemm/kernel_entry.h"
#include "cc/gemm/{family}_host.h"
"""

_HOST_ENTRY = """\
#include "{{config_header}}"

extern "C" const char {{image_begin}}[];
extern "C" const char {{image_end}}[];
extern "C" const stoneware::gemm::KernelEntry {{entry}};
const stoneware::gemm::KernelEntry {{entry}} =
    stoneware::gemm::MakeKernelEntry<stoneware::gemm::{{id}}_config,
                                     stoneware::gemm::sm90::{template}Host>({{image_begin}},
                                                                            {{image_end}});
"""

def kernel_family(name, template, device_hdrs, host_hdrs, is_open = False):
    """A family: what its kernels' generated sources include and name.

    Args:
      name: <name>.cuh has the class template <template>Kernel, <name>_host.h <template>Host.
      template: the first part of both names.
      device_hdrs: labels of the headers of a cubin.
      host_hdrs: labels of those of the host object.
      is_open: whether its kernels are built open, too (epilogue_sm90.h).

    Returns:
      A struct for cubin_library.
    """
    names = {"family": name, "template": template}
    open_texts = {"open": _OPEN.format(**names), "open_kernel": _OPEN_KERNEL} if is_open else {}
    return struct(
        name = name,
        device = _DEVICE.format(**names),
        device_hdrs = device_hdrs,
        host = _HOST.format(**names),
        host_entry = _HOST_ENTRY.format(**names),
        host_hdrs = host_hdrs,
        **open_texts
    )

def _member(name, value):
    if type(value) == "bool":
        return "  static constexpr bool {} = {};".format(name, "true" if value else "false")
    if type(value) == "int":
        return "  static constexpr int {} = {};".format(name, value)
    if value in _DTYPES:
        return "  static constexpr DType {} = DType::k{};".format(name, value.upper())
    if value in _SCHEDULES:
        return "  static constexpr Schedule {} = {};".format(name, _SCHEDULES[value])
    return "  static constexpr char {}[] = \"{}\";".format(name, value)

def kernel_config(
        family,
        id,
        op,
        a,
        b,
        out,
        tile,
        swap_ab,
        layout = "nt",
        constants = {},
        uses_cute = True,
        json_fields = {}):
    """One kernel of a family, from values that were checked.

    Args:
      family: of kernel_family().
      id: a C identifier, the kernel's symbol; measurements name it for good.
      op: the op that it serves.
      a: dtype of the left operand.
      b: dtype of the right operand.
      out: dtype of the result.
      tile: (m, n, k) of the matmul that is computed.
      swap_ab: whether that is d^T = b^T a^T.
      layout: of a and b, "n" for row-major and "t" for column-major.
      constants: dict of further members of the config's struct; bool, int, dtype or schedule.
      uses_cute: whether its device side takes wgmma from CuTe.
      json_fields: of the manifest's "config", in addition to a, b, out, swap_ab and tile.

    Returns:
      A struct for cubin_library: id, op, arch, family, header, defines (of the device side), serves
      and config_json.
    """
    arch = "sm_90a"  # wgmma exists on exactly this one.
    members = {
        "kId": id,
        "kOp": op,
        "kArch": arch,
        "kA": a,
        "kB": b,
        "kOut": out,
        "kTileM": tile[0],
        "kTileN": tile[1],
        "kTileK": tile[2],
        "kSwapAb": swap_ab,
        "kAIsMMajor": layout[0] == "t",
        "kBIsNMajor": layout[1] == "n",
    } | constants
    is_wide = uses_cute and tile[1] not in _USUAL_WIDTHS
    return struct(
        id = id,
        op = op,
        arch = arch,
        family = family,
        serves = served_matmuls(op, a, layout),
        header = _HEADER.format(
            id = id,
            members = "\n".join([_member(name, value) for name, value in members.items()]),
        ),
        defines = ["CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"] if is_wide else [],
        config_json = json.encode({
            "a": a,
            "b": b,
            "out": out,
            "swap_ab": swap_ab,
            "tile": tile,
        } | json_fields),
    )

def join(*parts):
    """The parts of a kernel's id that are not empty; a tuple of ints is written as 128x64."""
    words = [
        "x".join([str(x) for x in part]) if type(part) in ["list", "tuple"] else part
        for part in parts
    ]
    return "_".join([word for word in words if word])
