"""kernel_family and kernel_config: kernels for cubin_library whose C++ is in files."""

_HEADER = """\
// Generated: the config of {id}.

#pragma once

namespace {namespace} {{

struct {id}_config {{
{members}
}};

}}  // namespace {namespace}
"""

_DEVICE = """\
// Generated: the device side of {{id}}.

#include "{{device_header}}"
#include "{{config_header}}"

using Kernel = {kernel}<{namespace}::{{id}}_config>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads)
{{id}}(__grid_constant__ const Kernel::Params params) {{{{
  extern __shared__ __align__(Kernel::kSharedAlignment) char shared[];
  Kernel::Run(params, shared);
}}}}
"""

_OPEN = """\
// Generated: open kernels.

#include "{device_header}"
"""

_OPEN_KERNEL = """\
#include "{{config_header}}"

extern "C" __global__ void __launch_bounds__({kernel}<{namespace}::{{id}}_config>::kThreads)
{{id}}(__grid_constant__ const {kernel}<{namespace}::{{id}}_config>::Params params) {{{{
  extern __shared__ __align__({kernel}<{namespace}::{{id}}_config>::kSharedAlignment) char shared[];
  {kernel}<{namespace}::{{id}}_config>::Run(params, shared);
}}}}
"""

_HOST_ENTRY = """\
#include "{{host_header}}"
#include "{{config_header}}"

extern "C" const char {{image_begin}}[];
extern "C" const char {{image_end}}[];
extern "C" const {{entry_type}} {{entry}};
const {{entry_type}} {{entry}} = {make_entry}<{namespace}::{{id}}_config>({{image_begin}}, {{image_end}});
"""

def kernel_family(name, *, namespace, device, kernel, host, make_entry, device_hdrs = [], host_hdrs = [], open_kernel = None):
    """Kernels that share their C++: one header for the device, one for the host.

    Both headers see a config as a struct of constants, Config. In `device` the class template
    `kernel`<Config> has

        struct Params;                         // what a launch passes, trivially copyable
        static constexpr int kThreads;         // of a block
        static constexpr int kSharedAlignment; // of the dynamic shared memory, in bytes
        static __device__ void Run(const Params& params, char* shared);

    In `host` a function template makes the entry of a kernel, all that a module knows of it, of the
    entry_type of the cubin_library:

        template <class Config>
        constexpr Entry MakeEntry(const char* image_begin, const char* image_end);

    The image is a fat binary with the kernel's cubin, compressed: what cuLibraryLoadData takes.

    Config has `kId`, the kernel's id, and the `constants` of its kernel_config().

    Example:
        SCALE = kernel_family(
            "scale",
            namespace = "acme",
            device = "scale.cuh",
            kernel = "acme::ScaleKernel",
            host = "scale_host.h",
            make_entry = "acme::MakeScaleEntry",
        )

    Args:
      name: a C identifier, part of the names of targets.
      namespace: of the generated structs of configs.
      device: label of the header of the device side, by the package of the cubin_library.
      kernel: its class template, with the namespace.
      host: label of the header of the host side.
      make_entry: its function template, with the namespace.
      device_hdrs: labels of what `device` includes, by the path in this repository.
      host_hdrs: labels of what `host` includes and no library in `deps` offers.
      open_kernel: a class template like `kernel` that calls a `__device__` function without a definition;
        with it the kernels are also built as LTO-IR, which is linked later with that function.

    Returns:
      A family for kernel_config().
    """
    open_texts = {} if open_kernel == None else {
        "open": _OPEN,
        "open_kernel": _OPEN_KERNEL.format(kernel = open_kernel, namespace = namespace),
    }
    return struct(
        name = name,
        device = _DEVICE.format(kernel = kernel, namespace = namespace),
        device_hdrs = device_hdrs + [device],
        device_header = device,
        host = "// Generated: the host side of {}.\n".format(name),
        host_entry = _HOST_ENTRY.format(make_entry = make_entry, namespace = namespace),
        host_hdrs = host_hdrs + [host],
        host_header = host,
        namespace = namespace,
        **open_texts
    )

def _value(id, name, value):
    if type(value) == "bool":
        return "true" if value else "false"
    if type(value) in ("int", "string"):
        return str(value)
    fail("kernel_config: a constant must be a bool, an int or a string with a C++ expression, but {} of {} is {}; write it as a string"
        .format(name, id, repr(value)))

def kernel_config(family, *, id, op, arch, constants = {}, config = None, serves = ["forward"], backward = "inherit"):
    """One kernel of a family.

    Example:
        kernel_config(SCALE, id = "scale_sm90_256", op = "scale", arch = "sm_90", constants = {"kTile": 256})

    Args:
      family: of kernel_family().
      id: a C identifier: the kernel's symbol, and its id in the manifest.
      op: the op that it serves.
      arch: the architecture that it is compiled for, such as "sm_90a".
      constants: members of the config's struct: a bool, an int, or a string, which is a C++ expression.
      config: the manifest's "config"; by default `constants`.
      serves: the matmuls that it computes, of "forward", "dgrad" and "wgrad".
      backward: whether it serves gradients: "on", "off" or "inherit", what the cubin_library says.

    Returns:
      A config for cubin_library.
    """
    members = ["  static constexpr char kId[] = \"{}\";".format(id)] + [
        "  static constexpr auto {} = {};".format(name, _value(id, name, value))
        for name, value in constants.items()
    ]
    return struct(
        arch = arch,
        backward = backward,
        config_json = json.encode(constants if config == None else config),
        defines = [],
        family = family,
        header = _HEADER.format(id = id, members = "\n".join(members), namespace = family.namespace),
        id = id,
        op = op,
        serves = serves,
    )
