"""nvcc with zig as its preprocessor: what cuda_cubin and, of headers, cuda_library share."""

load(":cuda_toolchain.bzl", "CUDA_TOOLCHAIN")

# Of rules that compile CUDA, which also have toolchains = [CUDA_TOOLCHAIN].
NVCC_ATTRS = {
    "_cutlass": attr.label(default = Label("@stoneware_cutlass//:tree"), allow_single_file = True),
    "_nvcc_wrapper": attr.label(
        default = Label("//tools/build_rules/private:nvcc_wrapper"),
        executable = True,
        cfg = "exec",
    ),
}

def gencode(arch):
    """nvcc's flag for machine code of one architecture ("sm_90a"), without PTX."""
    return "-gencode=arch=compute_{0},code=sm_{0}".format(arch.removeprefix("sm_"))

def source_includes(ctx, hdrs):
    """Include folders, written and generated, for headers by their path in their repository.

    Args:
      ctx: context of a rule that compiles CUDA.
      hdrs: list of Files, of the target's own repository or of others.

    Returns:
      Paths below the execution root, those of the target's own repository first.
    """
    roots = {ctx.label.workspace_root: None} | {hdr.owner.workspace_root: None for hdr in hdrs}
    return [
        folder
        for root in roots
        for folder in [root or ".", "/".join([part for part in [ctx.bin_dir.path, root] if part])]
    ]

def cuda_includes(ctx):
    """Folders of CUDA's and CUTLASS's headers, of a rule that compiles CUDA."""
    cuda = ctx.toolchains[CUDA_TOOLCHAIN].cuda.path
    cutlass = ctx.file._cutlass.path
    return [
        cuda + "/include",
        cuda + "/include/cccl",
        cutlass + "/include",
        cutlass + "/tools/util/include",
    ]

# Measured: 3.1 to 4.2 GB for an sm_90a CUTLASS kernel.
def _memory(_os, _num_inputs):
    return {"cpu": 1, "memory": 4300}

def run_nvcc(ctx, *, src, out, flags, defines, includes, inputs, mnemonic, env = {}):
    """One nvcc action, the same bytes from any folder.

    Args:
      ctx: context of a rule with NVCC_ATTRS and CUDA_TOOLCHAIN.
      src: File, the source.
      out: File, what nvcc's -o names.
      flags: list of strings for this kind of output.
      defines: list of "NAME=VALUE".
      includes: list of include folders, execution-root relative.
      inputs: depset of Files in addition to the toolchain.
      mnemonic: the action's mnemonic.
      env: further environment variables of nvcc.
    """

    # cudafe++ and cicc put the source's real path and nvcc its process id into symbol names; both are
    # replaced by the label. The two orig_src_path_name flags are undocumented: tests/build_rules has
    # a canary.
    name = "{}:{}".format(ctx.label.package, ctx.label.name)
    seed = "{}/{}".format(name, src.basename)
    toolchain = ctx.toolchains[CUDA_TOOLCHAIN]
    args = ctx.actions.args()
    args.add_all([
        toolchain.cuda.path + "/bin/nvcc",
        "-ccbin",
        toolchain.clang,
        "-x",
        "cu",
        "-std=c++17",
        "-DNDEBUG",
        "--expt-relaxed-constexpr",
        "--frandom-seed=" + seed,
        "-Xcudafe",
        "--orig_src_path_name=" + seed,
        "-Xcicc",
        "--orig_src_path_name=" + seed,
    ])
    args.add_all(flags)
    args.add_all(includes, before_each = "-I", uniquify = True)
    args.add_all(cuda_includes(ctx), before_each = "-I")
    args.add_all(defines, format_each = "-D%s")
    args.add(src)
    args.add("-o", out)
    ctx.actions.run(
        executable = ctx.executable._nvcc_wrapper,
        arguments = [args],
        inputs = depset([src, ctx.file._cutlass], transitive = [inputs, toolchain.files]),
        toolchain = CUDA_TOOLCHAIN,
        outputs = [out],
        env = {"PATH": "/bin:/usr/bin"} | env,
        mnemonic = mnemonic,
        progress_message = "Compiling %{label}",
        resource_set = _memory,
    )

def compile_lto_ir(ctx, *, src, out, arch, hdrs, mnemonic):
    """One nvcc action that makes LTO-IR, in a fatbin, which nvcc compresses.

    LTO-IR has the working folder, by $PWD, and paths of sources, which are relative to it. So it is the same in
    any folder, but not under another -c option.

    Args:
      ctx: context of a rule with NVCC_ATTRS and CUDA_TOOLCHAIN.
      src: File, the source.
      out: File, the fatbin.
      arch: for example "sm_90a".
      hdrs: list of Files, headers by their path in their repository.
      mnemonic: the action's mnemonic.
    """
    run_nvcc(
        ctx,
        src = src,
        out = out,
        flags = [
            "-gencode=arch=compute_{0},code=lto_{0}".format(arch.removeprefix("sm_")),
            "-rdc=true",
            "-O3",
            "--compress-mode=size",
            "-fatbin",
        ],
        defines = [],
        includes = source_includes(ctx, hdrs),
        inputs = depset(hdrs),
        mnemonic = mnemonic,
        env = {"PWD": "/proc/self/cwd"},
    )
