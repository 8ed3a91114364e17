"""cuda_library: host code that needs CUDA's dialect (CUTLASS types), linked like any cc_library."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain", "use_cpp_toolchain")
load(":nvcc.bzl", "NVCC_ATTRS", "gencode", "run_nvcc")

def _cuda_library_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    context = deps.compilation_context
    root = ctx.label.workspace_root or "."
    objects = []
    for src in ctx.files.srcs:
        out = ctx.actions.declare_file("_objs/{}/{}.pic.o".format(ctx.label.name, src.basename))
        run_nvcc(
            ctx,
            src = src,
            out = out,
            flags = [
                gencode(ctx.attr.arch),
                "-O2",
                "-Xcompiler",
                # zig turns the undefined-behaviour sanitizer on where no optimisation is asked for.
                "-fPIC,-g0,-fno-sanitize=all,-fvisibility=hidden,-ffunction-sections,-fdata-sections",
                "-c",
            ] + ctx.attr.nvcc_flags,
            defines = ctx.attr.defines + context.defines.to_list(),
            includes = [root] + context.quote_includes.to_list() + context.includes.to_list(),
            inputs = depset(ctx.files.hdrs, transitive = [context.headers]),
            mnemonic = "CudaHostCompile",
        )
        objects.append(out)
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [deps.linking_context],
        name = ctx.label.name,
        disallow_dynamic_library = True,
    )
    compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([root]),
    )
    return [
        DefaultInfo(files = depset(objects)),
        cc_common.merge_cc_infos(
            direct_cc_infos = [CcInfo(
                compilation_context = compilation_context,
                linking_context = linking_context,
            )],
            cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
        ),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    doc = """Compiles host code with nvcc into a library for cc_* rules.

Example:
    cuda_library(
        name = "gemm_host",
        srcs = ["gemm_host.cc"],
        hdrs = ["gemm.cuh"],
        arch = "sm_90a",
        deps = ["//cc/host_adapter"],
    )
""",
    attrs = {
        "arch": attr.string(mandatory = True, doc = "the architecture whose types the code uses"),
        "defines": attr.string_list(doc = "NAME=VALUE"),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "nvcc_flags": attr.string_list(doc = "further flags"),
        "srcs": attr.label_list(mandatory = True, allow_files = [".cc", ".cu"]),
    } | NVCC_ATTRS,
    fragments = ["cpp"],
    toolchains = use_cpp_toolchain(),
)
