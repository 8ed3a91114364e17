"""cutlass_kernels: a family of CUTLASS kernels, from configs to one library with its cubins inside."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load(":cuda_cubin.bzl", "cuda_cubin")
load(":cuda_library.bzl", "cuda_library")
load(":providers.bzl", "CudaArchsInfo", "KernelInfo")

_EMBED_ONE = """\
    .section .rodata.{id}_cubin, "a", @progbits
    .balign 16
    .globl {id}_cubin_begin
    .hidden {id}_cubin_begin
{id}_cubin_begin:
    .incbin "{path}"
    .globl {id}_cubin_end
    .hidden {id}_cubin_end
{id}_cubin_end:
    .byte 0
"""

def _embedded_kernels_impl(ctx):
    archs = ctx.attr._cuda_archs[CudaArchsInfo].archs
    kernels = [
        kernel
        for target in ctx.attr.kernels
        for kernel in target[KernelInfo].kernels.to_list()
        if kernel.arch in archs
    ]
    assembler = ctx.actions.declare_file(ctx.label.name + "_cubins.S")
    ctx.actions.write(assembler, "".join([
        _EMBED_ONE.format(id = kernel.id, path = kernel.cubin.path)
        for kernel in kernels
    ]) + "    .section .note.GNU-stack, \"\", @progbits\n")
    registry = ctx.actions.declare_file(ctx.label.name + "_registry.cc")
    ctx.actions.write(registry, "\n".join(
        ["#include \"cc/gemm/kernel_entry.h\""] +
        ["extern \"C\" const stoneware::gemm::KernelEntry {}_entry;".format(kernel.id) for kernel in kernels] +
        ["namespace stoneware::gemm {", "const KernelEntry* const kKernelEntries[] = {"] +
        ["    &{}_entry,".format(kernel.id) for kernel in kernels] +
        # An array of no elements is not C++.
        ["    nullptr,", "};", "const std::size_t kNumKernelEntries = {};".format(len(kernels)), "}", ""],
    ))

    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    ids = [kernel.id for kernel in kernels]
    hosts = [host for host in ctx.attr.hosts if host.label.name.removesuffix("_host") in ids]
    deps = [dep[CcInfo] for dep in ctx.attr.deps + hosts]
    compilation_context, outputs = cc_common.compile(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        name = ctx.label.name,
        srcs = [assembler, registry],
        compilation_contexts = [dep.compilation_context for dep in deps],
        additional_inputs = [kernel.cubin for kernel in kernels],
        user_compile_flags = ["-fvisibility=hidden"],
    )
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = outputs,
        linking_contexts = [dep.linking_context for dep in deps],
        name = ctx.label.name,
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset([kernel.cubin for kernel in kernels])),
        CcInfo(compilation_context = compilation_context, linking_context = linking_context),
        KernelInfo(kernels = depset(kernels)),
    ]

_embedded_kernels = rule(
    implementation = _embedded_kernels_impl,
    doc = "Cubins as data in an object file, with the registry that lists their entries.",
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "hosts": attr.label_list(providers = [CcInfo], doc = "`<id>_host` of each kernel"),
        "kernels": attr.label_list(providers = [KernelInfo]),
        "_cuda_archs": attr.label(default = Label("//:cuda_archs"), providers = [CudaArchsInfo]),
    },
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain(),
)

def cutlass_kernels(
        name,
        backend,
        configs,
        deps,
        nvcc_flags = [],
        visibility = None):
    """One cubin and one host object per config, and the library `name` that holds them all.

    Editing one config recompiles that kernel alone. An architecture that //:cuda_archs leaves out is
    neither compiled nor listed.

    Example:
        cutlass_kernels(
            name = "kernels_sm90",
            backend = "cutlass_sm90",
            configs = SCALED_MM_SM90 + MATMUL_SM90,
            deps = [":kernel_entry", "//cc/host_adapter"],
        )

    Args:
      name: the library; it offers CcInfo to modules and KernelInfo to manifests.
      backend: the backend that launches them.
      configs: structs with id, op, source, arch, defines and config_json. `<source>.cu` is the
        source of the cubin; `<source>.cc` that of the host object, compiled with the same defines,
        which defines `<id>_entry`; `<source>.cuh` a header of both. One with `device_hdrs` (a list)
        names further headers of its cubin.
      deps: libraries of the host side; one of them offers cc/gemm/kernel_entry.h.
      nvcc_flags: further flags for the host side.
      visibility: of `name`.
    """
    for config in configs:
        cuda_cubin(
            name = config.id + "_cubin",
            src = config.source + ".cu",
            hdrs = [config.source + ".cuh"] + getattr(config, "device_hdrs", []),
            arch = config.arch,
            backend = backend,
            config = config.config_json,
            defines = config.defines,
            kernel_id = config.id,
            op = config.op,
        )
        cuda_library(
            name = config.id + "_host",
            srcs = [config.source + ".cc"],
            hdrs = [config.source + ".cuh"],
            arch = config.arch,
            defines = config.defines,
            nvcc_flags = nvcc_flags,
            deps = deps,
        )
    _embedded_kernels(
        name = name,
        hosts = [":" + config.id + "_host" for config in configs],
        kernels = [":" + config.id + "_cubin" for config in configs],
        visibility = visibility,
        deps = deps,
    )
