"""open_kernels: the LTO-IR of kernels that call a device function which is linked later."""

load(":cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load(":nvcc.bzl", "NVCC_ATTRS", "compile_lto_ir")
load(":providers.bzl", "KernelInfo", "OpenKernelsInfo")

def _open_kernels_impl(ctx):
    ids = [
        kernel.id
        for target in ctx.attr.kernels
        for kernel in target[KernelInfo].kernels.to_list()
    ]
    if not ids:
        return [DefaultInfo(), OpenKernelsInfo(files = depset())]
    texts = [
        text
        for target, text in ctx.attr.kernels.items()
        if target[KernelInfo].kernels
    ]
    source = ctx.actions.declare_file("{}/{}.cu".format(ctx.label.name, ctx.attr.file_name))
    ctx.actions.write(source, "\n".join([ctx.attr.head] + texts))
    file = ctx.actions.declare_file("{}/{}.fatbin".format(ctx.label.name, ctx.attr.file_name))
    compile_lto_ir(
        ctx,
        src = source,
        out = file,
        arch = ctx.attr.arch,
        hdrs = ctx.files.hdrs,
        mnemonic = "OpenKernels",
    )
    return [
        DefaultInfo(files = depset([file])),
        OpenKernelsInfo(files = depset([struct(arch = ctx.attr.arch, file = file, kernels = tuple(ids))])),
    ]

open_kernels = rule(
    implementation = _open_kernels_impl,
    doc = """Compiles kernels of one family to one file of LTO-IR.

Together, since they share most of their code: 238 kernels take 1.7 MB in 24 files; of 209 it was 1.5 MB,
and 4.8 MB one by one.
A linker takes one of them out (-kernels-used), and reads all of them. Kernels that are not built are left out.
""",
    attrs = {
        "arch": attr.string(mandatory = True, doc = "for example sm_90a"),
        "file_name": attr.string(mandatory = True, doc = "of the LTO-IR, without .fatbin"),
        "hdrs": attr.label_list(allow_files = True, doc = "headers, by their path in their repository"),
        "head": attr.string(mandatory = True, doc = "how the source begins"),
        "kernels": attr.label_keyed_string_dict(
            providers = [KernelInfo],
            doc = "the closed kernel: the source of the open one",
        ),
    } | NVCC_ATTRS,
    toolchains = [CUDA_TOOLCHAIN],
)
