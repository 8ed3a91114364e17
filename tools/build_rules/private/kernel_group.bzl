"""kernel_group: several kernel targets under one name."""

load(":providers.bzl", "KernelInfo")

def _kernel_group_impl(ctx):
    return [
        DefaultInfo(files = depset(transitive = [dep[DefaultInfo].files for dep in ctx.attr.kernels])),
        KernelInfo(
            kernels = depset(transitive = [dep[KernelInfo].kernels for dep in ctx.attr.kernels]),
            removed = depset(transitive = [dep[KernelInfo].removed for dep in ctx.attr.kernels]),
        ),
    ]

kernel_group = rule(
    implementation = _kernel_group_impl,
    doc = """Names a set of kernels, so that manifest and wheel take it as one.

Example:
    kernel_group(
        name = "triton",
        kernels = [":triton_small", ":triton_large"],
    )
""",
    attrs = {
        "kernels": attr.label_list(
            mandatory = True,
            providers = [KernelInfo],
            doc = "targets of cuda_cubin, cubin_library, triton_aot and kernel_group",
        ),
    },
)
