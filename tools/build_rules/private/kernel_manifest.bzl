"""kernel_manifest: what was compiled, by id and digest."""

load(":providers.bzl", "BackwardInfo", "KernelInfo", "OpenKernelsInfo")

def _about(kernel):
    """The manifest's record of a kernel, built or not."""
    return {
        "arch": kernel.arch,
        "backend": kernel.backend,
        "config": json.decode(kernel.config),
        "id": kernel.id,
        "op": kernel.op,
        "serves": json.decode(kernel.serves),
    }

def _kernel_manifest_impl(ctx):
    kernels = depset(transitive = [target[KernelInfo].kernels for target in ctx.attr.kernels]).to_list()
    seen = {}
    for kernel in kernels:
        if kernel.id in seen and seen[kernel.id] != kernel.cubin:
            fail("{}: two kernels are called {}: {} and {}; give one another id".format(
                ctx.label,
                kernel.id,
                seen[kernel.id].owner,
                kernel.cubin.owner,
            ))
        seen[kernel.id] = kernel.cubin
    removed = depset(transitive = [target[KernelInfo].removed for target in ctx.attr.kernels]).to_list()
    seen |= {kernel.id: None for kernel in removed}
    known = depset(
        transitive = [target[KernelInfo].kernels for target in ctx.attr.known] +
                     [target[KernelInfo].removed for target in ctx.attr.known],
    ).to_list()
    open_files = depset(transitive = [
        target[OpenKernelsInfo].files
        for target in ctx.attr.kernels
        if OpenKernelsInfo in target
    ]).to_list()
    listing = ctx.actions.declare_file(ctx.label.name + ".kernels.json")
    ctx.actions.write(listing, json.encode({
        "backward": "on" if ctx.attr._enable_backward[BackwardInfo].is_on else "off",
        "kernels": [
            _about(kernel) | {"cubin": kernel.cubin.path} | {
                name: file.path
                for name, file in {"description": kernel.json, "image": kernel.image}.items()
                if file != None
            }
            for kernel in kernels
        ],
        "left_out": [kernel.id for kernel in known if kernel.id not in seen],
        "open": [{"file": open.file.path, "kernels": open.kernels} for open in open_files],
        "removed": [_about(kernel) for kernel in removed],
    }))
    files = [file for kernel in kernels for file in (kernel.cubin, kernel.image, kernel.json) if file != None]
    out = ctx.actions.declare_file(ctx.label.name + ".json")
    ctx.actions.run(
        executable = ctx.executable._write_manifest,
        arguments = ["--kernels=" + listing.path, "--out=" + out.path],
        inputs = [listing] + files + [open.file for open in open_files],
        outputs = [out],
        mnemonic = "KernelManifest",
        progress_message = "Listing {} kernels for %{{label}}".format(len(kernels)),
    )
    return [DefaultInfo(files = depset([out]))]

kernel_manifest = rule(
    implementation = _kernel_manifest_impl,
    doc = """A JSON file with id, op, backend, arch, config, serves, sha256 and size of every kernel: of its
cubin, or of the fat binary that an embedded one is compressed in.

"serves" has the matmuls that a kernel can compute, and whether it does in this build. "removed" has
those that are not built because backward is off for them; tuning_table skips their samples.

"code_sha256" is the digest of what the GPU executes of it (cubin_code.py): the same where a source was
only arranged in another way.

"open" has name, sha256 and size of every file of open kernels, and their ids.

A kernel with a launch description, such as an ahead-of-time one, has its sha256 too, and the file
has a digest of its whole content.

Example:
    kernel_manifest(
        name = "kernel_manifest",
        kernels = ["//cc/gemm:kernels_sm90", "//py/stoneware/ops/matmul:triton"],
    )
""",
    attrs = {
        "kernels": attr.label_list(
            mandatory = True,
            providers = [KernelInfo],
            doc = "targets of cuda_cubin, cubin_library, triton_aot and kernel_group",
        ),
        "known": attr.label_list(
            providers = [KernelInfo],
            doc = "Every kernel that there is. Those that are not among `kernels` are not built, " +
                  "but listed as left out, so that tuning_table skips their samples.",
        ),
        "_enable_backward": attr.label(default = Label("//:enable_backward"), providers = [BackwardInfo]),
        "_write_manifest": attr.label(
            default = Label("//tools/build_rules/private:write_manifest"),
            executable = True,
            cfg = "exec",
        ),
    },
)
