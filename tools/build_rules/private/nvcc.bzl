"""nvcc with zig as its preprocessor: what cuda_cubin and, of headers, cuda_library share."""

NVCC_ATTRS = {
    "_clang": attr.label(
        default = Label("//third_party/zig:clang++"),
        allow_single_file = True,
        cfg = "exec",
    ),
    "_cuda": attr.label(
        default = Label("@stoneware_cuda//:tree"),
        allow_single_file = True,
        cfg = "exec",
    ),
    "_cutlass": attr.label(default = Label("@stoneware_cutlass//:tree"), allow_single_file = True),
    "_nvcc": attr.label(
        default = Label("//tools/build_rules/private:nvcc"),
        allow_single_file = True,
        executable = True,
        cfg = "exec",
    ),
    "_zig": attr.label(
        default = Label("@stoneware_zig//:tree"),
        allow_single_file = True,
        cfg = "exec",
    ),
}

def gencode(arch):
    """nvcc's flag for machine code of one architecture ("sm_90a"), without PTX."""
    return "-gencode=arch=compute_{0},code=sm_{0}".format(arch.removeprefix("sm_"))

def cuda_includes(ctx):
    """Folders of CUDA's and CUTLASS's headers, of a rule with NVCC_ATTRS."""
    cuda = ctx.file._cuda.path
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

def run_nvcc(ctx, *, src, out, flags, defines, includes, inputs, mnemonic):
    """One nvcc action, the same bytes from any folder.

    Args:
      ctx: rule context with NVCC_ATTRS.
      src: File, the source.
      out: File, what nvcc's -o names.
      flags: list of strings for this kind of output.
      defines: list of "NAME=VALUE".
      includes: list of include folders, execution-root relative.
      inputs: depset of Files beside the toolchain.
      mnemonic: the action's mnemonic.
    """

    # cudafe++ and cicc put the source's real path and nvcc its process id into symbol names; both are
    # replaced by the label. The two orig_src_path_name flags are undocumented: tests/build_rules has
    # a canary.
    name = "{}:{}".format(ctx.label.package, ctx.label.name)
    seed = "{}/{}".format(name, src.basename)
    args = ctx.actions.args()
    args.add_all([
        ctx.file._cuda.path + "/bin/nvcc",
        "-ccbin",
        ctx.file._clang,
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
        executable = ctx.executable._nvcc,
        arguments = [args],
        inputs = depset(
            [src, ctx.file._clang, ctx.file._cuda, ctx.file._cutlass, ctx.file._zig],
            transitive = [inputs],
        ),
        outputs = [out],
        env = {"PATH": "/bin:/usr/bin"},
        mnemonic = mnemonic,
        progress_message = "Compiling %{label}",
        resource_set = _memory,
    )
