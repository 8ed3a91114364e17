"""epilogue: the LTO-IR of an epilogue, as nvcc makes it."""

load("//tools/build_rules/private:cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load("//tools/build_rules/private:nvcc.bzl", "NVCC_ATTRS", "compile_lto_ir")

def _epilogue_impl(ctx):
    file = ctx.actions.declare_file(ctx.label.name + ".fatbin")
    compile_lto_ir(
        ctx,
        src = ctx.file.src,
        out = file,
        arch = "sm_90a",
        hdrs = [ctx.file.hdr],
        mnemonic = "Epilogue",
    )
    return [DefaultInfo(files = depset([file]))]

epilogue = rule(
    implementation = _epilogue_impl,
    doc = """Compiles a definition of stoneware_epilogue to NAME.fatbin.

Example:
    epilogue(
        name = "identity",
        src = "identity.cu",
        hdr = "//cc/gemm:epilogue_sm90.h",
    )
""",
    attrs = {
        "hdr": attr.label(mandatory = True, allow_single_file = [".h"]),
        "src": attr.label(mandatory = True, allow_single_file = [".cu"]),
    } | NVCC_ATTRS,
    toolchains = [CUDA_TOOLCHAIN],
)
