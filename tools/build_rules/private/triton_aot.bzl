"""triton_aot: a Triton kernel, compiled ahead of time for several architectures."""

load(":backward.bzl", "BACKWARD_ATTRS", "served")
load(":cuda_archs.bzl", "check_arch")
load(":providers.bzl", "CudaArchsInfo", "KernelInfo")

def _id(ctx, arch):
    return ctx.attr.kernel_id.format(arch = arch.replace("_", ""))

def _compile(ctx, archs, config):
    """The action that compiles the kernels of `archs`: arch -> (cubin, launch description).

    One for all, since starting Python and Triton takes as long as compiling a kernel.
    """
    built = {
        arch: (
            ctx.actions.declare_file(_id(ctx, arch) + ".cubin"),
            ctx.actions.declare_file(_id(ctx, arch) + ".json"),
        )
        for arch in archs
    }
    outputs = [file for files in built.values() for file in files]
    args = ctx.actions.args()
    args.add("--verbosity=-1")
    args.add("--src", ctx.file.src)
    args.add("--function", ctx.attr.function)
    args.add("--signature", ctx.attr.signature)
    args.add("--num_warps", ctx.attr.num_warps)
    args.add("--num_stages", ctx.attr.num_stages)
    args.add_joined("--archs", archs, join_with = ",")
    args.add("--op", ctx.attr.op)
    args.add("--id", ctx.attr.kernel_id)
    args.add("--config", config)
    args.add("--out_dir", outputs[0].dirname)
    ctx.actions.run(
        executable = ctx.executable._triton_aot,
        arguments = [args],
        inputs = [ctx.file.src],
        outputs = outputs,
        env = {"PATH": "/bin:/usr/bin"},
        mnemonic = "TritonAot",
        progress_message = "Compiling {} for {} with Triton".format(ctx.label, ", ".join(archs)),
    )
    return built

def _triton_aot_impl(ctx):
    config = json.encode(json.decode(ctx.attr.config) | {
        "num_stages": ctx.attr.num_stages,
        "num_warps": ctx.attr.num_warps,
    })
    if len(ctx.attr.archs) > 1 and "{arch}" not in ctx.attr.kernel_id:
        fail("{}: kernel_id of several archs must have \"{{arch}}\", which makes an id for each, but is \"{}\"; append \"_{{arch}}\""
            .format(ctx.label, ctx.attr.kernel_id))
    serves = served(ctx)
    for arch in ctx.attr.archs:
        check_arch(ctx.label, arch)
    archs = [arch for arch in ctx.attr.archs if arch in ctx.attr._cuda_archs[CudaArchsInfo].archs]
    built = _compile(ctx, archs, config) if archs and any(serves.values()) else {}
    kernels, removed = [], []
    for arch in archs:
        about = {
            "arch": arch,
            "backend": "triton_aot",
            "config": config,
            "id": _id(ctx, arch),
            "op": ctx.attr.op,
            "serves": json.encode(serves),
        }
        if arch in built:
            cubin, description = built[arch]
            kernels.append(struct(cubin = cubin, image = None, json = description, **about))
        else:
            removed.append(struct(**about))
    return [
        DefaultInfo(files = depset([file for kernel in kernels for file in (kernel.cubin, kernel.json)])),
        KernelInfo(kernels = depset(kernels), removed = depset(removed)),
    ]

triton_aot = rule(
    implementation = _triton_aot_impl,
    doc = """Compiles one Triton function, with its constants fixed, for several architectures.

No GPU and no torch are needed, and users need no Triton.

Example:
    triton_aot(
        name = "add",
        src = "add_kernel.py",
        function = "add",
        signature = "*fp32:16, *fp32:16, *fp32:16, i32, 1024",
        num_warps = 4,
        num_stages = 1,
        op = "add",
        kernel_id = "add_triton_{arch}_1024",
        archs = ["sm_80", "sm_90"],
    )
""",
    attrs = {
        "archs": attr.string_list(mandatory = True, doc = "architectures, for example sm_90"),
        "config": attr.string(default = "{}", doc = "what the backend needs to know as JSON, for the manifest"),
        "function": attr.string(mandatory = True, doc = "the @triton.jit function in `src`"),
        "kernel_id": attr.string(
            mandatory = True,
            doc = "template of the kernels' ids: \"{arch}\" becomes \"sm90\" and so on",
        ),
        "num_stages": attr.int(mandatory = True, doc = "pipeline stages"),
        "num_warps": attr.int(mandatory = True, doc = "warps of a program"),
        "op": attr.string(mandatory = True, doc = "the op that it serves"),
        "signature": attr.string(
            mandatory = True,
            doc = "one item per parameter: a type (\"*bf16\", \"i32\"), followed by \":16\" if it is divisible by " +
                  "16 or \":1\" if it is one; or the value of a tl.constexpr",
        ),
        "src": attr.label(mandatory = True, allow_single_file = [".py"], doc = "a file that imports triton alone"),
        "_cuda_archs": attr.label(default = Label("//:cuda_archs"), providers = [CudaArchsInfo]),
        "_triton_aot": attr.label(default = Label("//tools/triton_aot"), executable = True, cfg = "exec"),
    } | BACKWARD_ATTRS,
)
