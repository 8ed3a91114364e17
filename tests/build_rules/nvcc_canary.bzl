"""nvcc_canary: one source compiled from two folders, with the flags of the rules and without."""

load("//tools/build_rules/private:cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load("//tools/build_rules/private:nvcc.bzl", "NVCC_ATTRS", "gencode", "run_nvcc")

_FOLDERS = ["short", "a_folder_with_a_much_longer_name"]

# Extension to flags, as in cuda_cubin.bzl; the object is what else nvcc can make.
_KINDS = {
    "cubin": ["-O3", "-cubin"],
    # Without -O2 zig adds its undefined-behaviour sanitizer, which puts real paths into the object.
    "o": ["-O2", "-Xcompiler", "-fPIC,-g0", "-c"],
}

def _run_nvcc_without_path_flags(ctx, src, out, flags):
    """What run_nvcc does, less the two orig_src_path_name flags."""
    toolchain = ctx.toolchains[CUDA_TOOLCHAIN]
    ctx.actions.run(
        executable = ctx.executable._nvcc_wrapper,
        arguments = [
            toolchain.cuda.path + "/bin/nvcc",
            "-ccbin",
            toolchain.clang.path,
            "-x",
            "cu",
            "-std=c++17",
            "--frandom-seed=canary",
        ] + flags + [src.path, "-o", out.path],
        inputs = depset([src], transitive = [toolchain.files]),
        toolchain = CUDA_TOOLCHAIN,
        outputs = [out],
        env = {"PATH": "/bin:/usr/bin"},
        mnemonic = "NvccCanary",
        progress_message = "Compiling %{output}",
    )

def _nvcc_canary_impl(ctx):
    outputs = []
    for folder in _FOLDERS:
        src = ctx.actions.declare_file("{}/{}/canary.cu".format(ctx.label.name, folder))
        ctx.actions.expand_template(template = ctx.file.src, output = src, substitutions = {})
        for extension, flags in _KINDS.items():
            flags = [gencode("sm_90a")] + flags
            name = "{}/{{}}_path_flags/{}/canary.{}".format(ctx.label.name, folder, extension)
            fixed = ctx.actions.declare_file(name.format("with"))
            run_nvcc(
                ctx,
                src = src,
                out = fixed,
                flags = flags,
                defines = [],
                includes = [],
                inputs = depset(),
                mnemonic = "NvccCanary",
            )
            bare = ctx.actions.declare_file(name.format("without"))
            _run_nvcc_without_path_flags(ctx, src, bare, flags)
            outputs += [fixed, bare]
    return [DefaultInfo(files = depset(outputs))]

nvcc_canary = rule(
    implementation = _nvcc_canary_impl,
    doc = """Files NAME/{with,without}_path_flags/FOLDER/canary.{cubin,o}, for a test to compare.

Example:
    nvcc_canary(
        name = "nvcc_canary",
        src = "canary/canary.cu",
    )
""",
    attrs = {"src": attr.label(mandatory = True, allow_single_file = [".cu"])} | NVCC_ATTRS,
    toolchains = [CUDA_TOOLCHAIN],
)
