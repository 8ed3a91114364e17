"""cuda_library: host code that needs CUDA's dialect (CUTLASS types), linked like any cc_library."""

load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")
load("@rules_cc//cc/common:cc_common.bzl", "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")
load(":cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load(":nvcc.bzl", "NVCC_ATTRS", "cuda_includes")

# CUTLASS asks for nvcc's version to know what its headers have.
_NVCC_VERSION = ["__CUDACC_VER_MAJOR__=13", "__CUDACC_VER_MINOR__=0"]

_COPTS = [
    "-x",
    "cuda",
    "--cuda-host-only",
    # clang's own wrappers know CUDA 12.3 at most; cuda_on_host.h stands in for them.
    "-nocudainc",
    "-nocudalib",
    "-Wno-cuda-compat",
    "-Wno-unknown-cuda-version",
    "-std=c++17",
    "-O2",
    "-DNDEBUG",
    "-g0",
    "-fPIC",
    # zig turns the undefined-behaviour sanitizer on where nothing is said of it.
    "-fno-sanitize=all",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-fdata-sections",
]

# Measured: 0.5 GB for one CUTLASS kernel, 0.9 GB for nine.
def _memory(_os, _num_inputs):
    return {"cpu": 1, "memory": 1000}

def _compile(ctx, src, context):
    toolchain = ctx.toolchains[CUDA_TOOLCHAIN]
    out = ctx.actions.declare_file("_objs/{}/{}.pic.o".format(ctx.label.name, src.basename))
    roots = [root for root in [ctx.label.workspace_root] if root] or ["."]
    generated = "/".join([part for part in [ctx.bin_dir.path, ctx.label.workspace_root] if part])
    args = ctx.actions.args()
    args.add_all(_COPTS)
    if toolchain.host_target:
        args.add("-target", toolchain.host_target)
    args.add(toolchain.cuda.path, format = "--cuda-path=%s")
    args.add_all(_NVCC_VERSION + ctx.attr.defines, format_each = "-D%s")
    args.add_all(context.defines, format_each = "-D%s")
    args.add_all(ctx.attr.copts)
    args.add_all(roots + [generated], before_each = "-I")
    args.add_all(context.quote_includes, before_each = "-I", uniquify = True)
    args.add_all(context.includes, before_each = "-I", uniquify = True)
    args.add_all(context.system_includes, before_each = "-isystem", uniquify = True)
    args.add_all(cuda_includes(ctx), before_each = "-I")
    args.add("-include", ctx.file._cuda_on_host)
    args.add("-c", src)
    args.add("-o", out)
    ctx.actions.run(
        executable = toolchain.clang,
        arguments = [args],
        inputs = depset(
            [src, ctx.file._cuda_on_host, ctx.file._cutlass] + ctx.files.hdrs,
            transitive = [context.headers, toolchain.files],
        ),
        toolchain = CUDA_TOOLCHAIN,
        outputs = [out],
        env = {"PATH": "/bin:/usr/bin"},
        mnemonic = "CudaHostCompile",
        progress_message = "Compiling the host side of %{label}",
        resource_set = _memory,
    )
    return out

def _cuda_library_impl(ctx):
    toolchain = find_cc_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    objects = depset([_compile(ctx, src, deps.compilation_context) for src in ctx.files.srcs])
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = objects,
            pic_objects = objects,
        ),
        linking_contexts = [deps.linking_context],
        name = ctx.label.name,
        disallow_dynamic_library = True,
    )
    compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset([ctx.label.workspace_root or "."]),
    )
    return [
        DefaultInfo(files = objects),
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
    doc = """Compiles the host side of CUDA code into a library for cc_* rules.

By zig's clang, as CUDA for the host alone: nvcc would compile CUTLASS's templates three times, for
the device, by cudafe++ and by its host compiler, and takes three to four times as long. What the
source launches is a cubin (cuda_cubin); a `__global__` function of its own is not compiled.

Example:
    cuda_library(
        name = "gemm_host",
        srcs = ["gemm_host.cc"],
        hdrs = ["gemm.cuh"],
        deps = ["//cc/host_adapter"],
    )
""",
    attrs = {
        "copts": attr.string_list(doc = "further flags of clang"),
        "defines": attr.string_list(doc = "NAME=VALUE"),
        "deps": attr.label_list(providers = [CcInfo], doc = "libraries of C++ and of CUDA"),
        "hdrs": attr.label_list(allow_files = True, doc = "headers, by their path in their repository"),
        "srcs": attr.label_list(mandatory = True, allow_files = [".cc", ".cu"], doc = "sources"),
        "_cuda_on_host": attr.label(
            default = Label("//tools/build_rules/private:cuda_on_host.h"),
            allow_single_file = True,
        ),
    } | NVCC_ATTRS,
    fragments = ["cpp"],
    toolchains = use_cc_toolchain() + [CUDA_TOOLCHAIN],
)
