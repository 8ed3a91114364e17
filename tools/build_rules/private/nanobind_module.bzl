"""nanobind_module: one Python extension module, for the host's Python and for the stable ABI."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load(":platform.bzl", "to_outer_platform")
load(":providers.bzl", "PythonExtensionInfo")

_COPTS = [
    "-std=c++17",
    "-O2",
    "-DNDEBUG",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-fdata-sections",
    # nanobind 3.1.0 prints to stderr but leaves <stdio.h> to Python.h, which the stable ABI of 3.11
    # and later no longer includes. Drop when nanobind includes it.
    "-include",
    "stdio.h",
]

def _stub(ctx):
    """The module's stub, which nanobind makes of what the module says of itself once it is imported."""
    module_name = ctx.attr.module_name

    # Python finds a module by its file's name alone.
    module = ctx.actions.declare_file("{}_stub/{}.so".format(ctx.label.name, module_name))
    ctx.actions.symlink(output = module, target_file = ctx.file.module)
    stub = ctx.actions.declare_file("{}_stub/{}.pyi".format(ctx.label.name, module_name))
    ctx.actions.run(
        executable = ctx.executable._stubgen,
        arguments = ["-q", "-m", module_name, "-i", module.dirname, "-o", stub.path],
        inputs = [module],
        outputs = [stub],
        mnemonic = "NanobindStub",
        progress_message = "Writing the stub of " + module_name,
    )
    return stub

def _python_extension_impl(ctx):
    host = ctx.attr.host[0] if ctx.attr.host else None  # A transition makes a list of it.
    return [
        DefaultInfo(files = depset([ctx.file.module])),
        PythonExtensionInfo(
            module = ctx.file.module,
            module_name = ctx.attr.module_name,
            stub = host[PythonExtensionInfo].stub if host else _stub(ctx),
        ),
    ]

_python_extension = rule(
    implementation = _python_extension_impl,
    attrs = {
        "host": attr.label(
            cfg = to_outer_platform,
            providers = [PythonExtensionInfo],
            doc = "the same module for the host's Python, which can import it to write the stub; of abi3 alone",
        ),
        "module": attr.label(mandatory = True, allow_single_file = [".so"]),
        "module_name": attr.string(mandatory = True),
        "_stubgen": attr.label(
            default = Label("@stoneware_nanobind//:stubgen"),
            executable = True,
            cfg = "exec",
        ),
    },
)

def extension_for_abi(label, abi):
    """The target of a nanobind_module for one ABI, by the label that the calling BUILD file has for it."""
    return str(native.package_relative_label(label)) + ("_abi3" if abi == "abi3" else "")

def nanobind_module(
        name,
        srcs,
        deps = [],
        module_name = None,
        copts = [],
        tags = [],
        target_compatible_with = None,
        visibility = None,
        testonly = None):
    """A nanobind extension module that exports nothing but its PyInit function.

    libc++ and nanobind are linked in; at run time it needs glibc alone. `name` is the module for the
    host's Python, `name`_abi3 that for the stable ABI: only the latter needs headers of CPython 3.12
    or later.

    Example:
        nanobind_module(
            name = "_driver",
            srcs = ["driver_module.cc"],
            deps = [":driver"],
        )

    Args:
      name: the target.
      srcs: its sources.
      deps: cc_library, cuda_library or cubin_library targets.
      module_name: the module's name, as in NB_MODULE(module_name, m); by default `name`.
      copts: further flags for `srcs`.
      tags: of every target, "manual" for a module that `bazel build //...` shall not build.
      target_compatible_with: of every target, as everywhere.
      visibility: of `name`.
      testonly: as everywhere.
    """
    exports = Label("//tools/build_rules/private:python_extension.lds")
    module_name = module_name or name
    shared = {"tags": tags, "target_compatible_with": target_compatible_with, "testonly": testonly}
    defines = ["NB_DOMAIN=stoneware" + module_name, "NB_COMPACT_ASSERTIONS"]
    for abi in ("host", "abi3"):
        headers = Label("//third_party/python:headers_" + abi)
        cc_library(
            name = "{}_nanobind_{}".format(name, abi),
            srcs = [Label("@stoneware_nanobind//:tree/src/nb_combined.cpp")],
            copts = _COPTS + ["-fno-strict-aliasing"],
            linkstatic = True,
            # Each module keeps nanobind's state to itself: exceptions must not cross two libc++.
            local_defines = defines,
            deps = [Label("@stoneware_nanobind//:internal_headers"), headers],
            **shared
        )
        cc_binary(
            name = "{}/{}.so".format(abi, name),
            srcs = srcs,
            additional_linker_inputs = [exports],
            copts = _COPTS + copts,
            linkopts = ["-Wl,--gc-sections", "-Wl,--version-script=$(location {})".format(exports)],
            linkshared = True,
            local_defines = defines,
            deps = deps + [
                ":{}_nanobind_{}".format(name, abi),
                Label("@stoneware_nanobind//:headers"),
                headers,
            ],
            **shared
        )
        _python_extension(
            name = name + ("_abi3" if abi == "abi3" else ""),
            host = ":" + name if abi == "abi3" else None,
            module = ":{}/{}.so".format(abi, name),
            module_name = module_name,
            visibility = visibility,
            **shared
        )
