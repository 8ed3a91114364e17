"""cuda_cubin: one kernel for one architecture."""

load(":backward.bzl", "BACKWARD_ATTRS", "served")
load(":cuda_archs.bzl", "NVCC_ARCHS", "check_arch")
load(":cuda_toolchain.bzl", "CUDA_TOOLCHAIN")
load(":nvcc.bzl", "NVCC_ATTRS", "gencode", "run_nvcc", "source_includes")
load(":providers.bzl", "KernelInfo")

def _compressed(ctx, cubin):
    """A fat binary with the cubin, which the driver takes as well and decompresses: a quarter of its size."""
    image = ctx.actions.declare_file(ctx.attr.kernel_id + ".fatbin")
    toolchain = ctx.toolchains[CUDA_TOOLCHAIN]
    ctx.actions.run(
        executable = toolchain.cuda.path + "/bin/fatbinary",
        arguments = [
            "--64",
            "--compress-all",
            "--compress-mode=size",
            "--image3=kind=elf,sm={},file={}".format(ctx.attr.arch.removeprefix("sm_"), cubin.path),
            "--create=" + image.path,
        ],
        inputs = depset([cubin], transitive = [toolchain.files]),
        toolchain = CUDA_TOOLCHAIN,
        outputs = [image],
        mnemonic = "CompressCubin",
        progress_message = "Compressing %{input}",
    )
    return image

def _cuda_cubin_impl(ctx):
    check_arch(ctx.label, ctx.attr.arch, NVCC_ARCHS)
    serves = served(ctx)
    about = {
        "arch": ctx.attr.arch,
        "backend": ctx.attr.backend,
        "config": ctx.attr.config,
        "id": ctx.attr.kernel_id,
        "op": ctx.attr.op,
        "serves": json.encode(serves),
    }
    if not any(serves.values()):
        return [DefaultInfo(), KernelInfo(kernels = depset(), removed = depset([struct(**about)]))]
    cubin = ctx.actions.declare_file(ctx.attr.kernel_id + ".cubin")
    run_nvcc(
        ctx,
        src = ctx.file.src,
        out = cubin,
        flags = [gencode(ctx.attr.arch), "-O3", "-Xptxas", "-v", "-cubin"],
        defines = ctx.attr.defines,
        includes = source_includes(ctx, ctx.files.hdrs),
        inputs = depset(ctx.files.hdrs),
        mnemonic = "CudaCubin",
    )
    kernel = struct(cubin = cubin, image = _compressed(ctx, cubin), json = None, **about)
    return [
        DefaultInfo(files = depset([cubin])),
        KernelInfo(kernels = depset([kernel]), removed = depset()),
    ]

cuda_cubin = rule(
    implementation = _cuda_cubin_impl,
    doc = """Compiles one CUDA source for one architecture into a cubin.

Fails on spilled registers and on wgmma that ptxas serialises. A kernel that serves gradients alone
is not compiled where backward is off (backward.bzl). It is compiled even if //:cuda_archs leaves out `arch`.
kernel_manifest fails if the cubin has no kernel `kernel_id`.

Example:
    cuda_cubin(
        name = "add_sm90",
        kernel_id = "add_sm90",
        src = "add.cu",
        arch = "sm_90a",
        op = "add",
        backend = "cuda",
        config = json.encode({"tile": 128}),
        defines = ["TILE=128"],
    )
""",
    attrs = {
        "arch": attr.string(mandatory = True, doc = "for example sm_90a"),
        "backend": attr.string(mandatory = True, doc = "the backend that launches it"),
        "config": attr.string(default = "{}", doc = "the kernel's config as JSON, for the manifest"),
        "defines": attr.string_list(doc = "NAME=VALUE"),
        "hdrs": attr.label_list(allow_files = True, doc = "headers, by their path in their repository"),
        "kernel_id": attr.string(mandatory = True, doc = "unique name, also of the cubin"),
        "op": attr.string(mandatory = True, doc = "the op it serves"),
        "src": attr.label(
            mandatory = True,
            allow_single_file = [".cu"],
            doc = "the source of the kernel, extern \"C\" under the name `kernel_id`",
        ),
    } | BACKWARD_ATTRS | NVCC_ATTRS,
    toolchains = [CUDA_TOOLCHAIN],
)
