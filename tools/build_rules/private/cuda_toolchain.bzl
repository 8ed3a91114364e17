"""The CUDA toolchain: what compiles device code, and the host side of it."""

CUDA_TOOLCHAIN = Label("//tools/build_rules:cuda_toolchain_type")

def _cuda_toolchain_impl(ctx):
    return [platform_common.ToolchainInfo(
        clang = ctx.file.clang,
        cuda = ctx.file.cuda,
        host_target = ctx.attr.host_target,
        files = depset([ctx.file.clang, ctx.file.cuda] + ctx.files.clang_files),
    )]

cuda_toolchain = rule(
    implementation = _cuda_toolchain_impl,
    doc = """A CUDA toolkit and the clang that works with it.

clang is nvcc's preprocessor, for cuda_cubin, and compiles what cuda_library has.

Example:
    cuda_toolchain(
        name = "cuda",
        clang = "//third_party/zig:clang++",
        clang_files = ["@stoneware_zig//:tree"],
        cuda = "@stoneware_cuda//:tree",
    )

    toolchain(
        name = "cuda_toolchain",
        toolchain = ":cuda",
        toolchain_type = "@stoneware//tools/build_rules:cuda_toolchain_type",
    )
""",
    attrs = {
        "clang": attr.label(
            mandatory = True,
            allow_single_file = True,
            cfg = "exec",
            doc = "a program called clang++, as nvcc demands of its host compiler",
        ),
        "clang_files": attr.label_list(allow_files = True, cfg = "exec", doc = "what it reads"),
        "cuda": attr.label(
            mandatory = True,
            allow_single_file = True,
            cfg = "exec",
            doc = "the toolkit's folder: bin, include, nvvm",
        ),
        "host_target": attr.string(
            doc = "what clang's -target is for cuda_library, if it is not the processor that the build runs on",
        ),
    },
)
