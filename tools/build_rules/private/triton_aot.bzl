"""triton_aot: Triton kernels compiled ahead of time, one genrule per architecture."""

load(":backward.bzl", "BACKWARD_ATTRS", "served")
load(":providers.bzl", "CudaArchsInfo", "KernelInfo")

def _triton_kernels_impl(ctx):
    archs = ctx.attr._cuda_archs[CudaArchsInfo].archs
    serves = served(ctx)
    kernels, removed = [], []
    is_built = any(serves.values())
    files = {file.basename: file for file in ctx.files.compiled}
    for id, arch in ctx.attr.archs.items():
        if arch not in archs:
            continue
        about = {
            "arch": arch,
            "backend": "triton_aot",
            "config": ctx.attr.config,
            "id": id,
            "op": ctx.attr.op,
            "serves": json.encode(serves),
        }
        if is_built:
            kernels.append(struct(cubin = files[id + ".cubin"], json = files[id + ".json"], **about))
        else:
            removed.append(struct(**about))
    files = [kernel.cubin for kernel in kernels] + [kernel.json for kernel in kernels]
    return [
        DefaultInfo(files = depset(files)),
        KernelInfo(kernels = depset(kernels), removed = depset(removed)),
    ]

_triton_kernels = rule(
    implementation = _triton_kernels_impl,
    attrs = {
        "archs": attr.string_dict(doc = "id of a kernel: its architecture"),
        "compiled": attr.label_list(doc = "the genrules of the kernels, if they are built"),
        "config": attr.string(),
        "op": attr.string(),
        "_cuda_archs": attr.label(default = Label("//:cuda_archs"), providers = [CudaArchsInfo]),
    } | BACKWARD_ATTRS,
)

def triton_aot(
        name,
        src,
        function,
        signature,
        num_warps,
        num_stages,
        op,
        kernel_id,
        archs,
        config = {},
        serves = ["forward"],
        backward = "inherit",
        tags = [],
        visibility = None):
    """Compiles one Triton function, with its constants fixed, for several architectures.

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

    Args:
      name: offers KernelInfo to kernel_manifest and python_wheel.
      src: a Python file that imports triton alone.
      function: the @triton.jit function in it.
      signature: one item a parameter: a type ("*bf16", "i32"), with ":16" if it is divisible by 16,
        ":1" if it is one, or the value of a tl.constexpr.
      num_warps: warps of a program.
      num_stages: pipeline stages.
      op: the op it serves.
      kernel_id: template of the ids; "{arch}" becomes "sm90" and so on.
      archs: architectures, for example sm_90.
      config: what the backend needs to know, for the manifest.
      serves: the matmuls that it computes: of "forward", "dgrad" and "wgrad".
      backward: whether it serves gradients: "on", "off" or "inherit", what //:enable_backward says.
      tags: of every target, "manual" for kernels that `bazel build //...` shall not compile.
      visibility: of `name`.
    """
    tool = Label("//tools/triton_aot")
    config_json = json.encode(config | {"num_warps": num_warps, "num_stages": num_stages})
    ids = {}
    for arch in archs:
        id = kernel_id.format(arch = arch.replace("_", ""))
        native.genrule(
            name = id,
            srcs = [src],
            outs = [id + ".cubin", id + ".json"],
            cmd = " ".join([
                "$(execpath {}) --verbosity=-1".format(tool),
                "--src=$(execpath {})".format(src),
                "--function=" + function,
                "--signature='{}'".format(signature),
                "--num_warps={}".format(num_warps),
                "--num_stages={}".format(num_stages),
                "--arch=" + arch,
                "--op=" + op,
                "--id=" + id,
                "--config='{}'".format(config_json),
                "--out_cubin=$(execpath {}.cubin)".format(id),
                "--out_json=$(execpath {}.json)".format(id),
            ]),
            message = "Compiling with Triton",
            tags = tags,
            tools = [tool],
        )
        ids[id] = arch
    compiled = [":" + id for id in ids]
    if "forward" not in serves:
        # Like in served(), so that kernels that are not built have no action.
        compiled = {
            "inherit": select({
                Label("//:forward_only"): [],
                "//conditions:default": compiled,
            }),
            "off": [],
            "on": compiled,
        }[backward]
    _triton_kernels(
        name = name,
        archs = ids,
        backward = backward,
        compiled = compiled,
        config = config_json,
        op = op,
        serves = serves,
        tags = tags,
        visibility = visibility,
    )
