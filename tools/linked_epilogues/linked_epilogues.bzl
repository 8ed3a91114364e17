"""linked_epilogues: common epilogues, linked in the build into the kernels that are chosen most."""

load("//tools/build_rules/private:providers.bzl", "OpenKernelsInfo")

def _linked_epilogues_impl(ctx):
    files = [open.file for target in ctx.attr.kernels for open in target[OpenKernelsInfo].files.to_list()]
    out = ctx.actions.declare_file(ctx.label.name + ".zip")
    args = ctx.actions.args()
    args.add("--op", ctx.attr.op)
    args.add("--manifest", ctx.file.manifest)
    args.add("--table", ctx.file.table)
    args.add("--texts", ctx.file._texts)
    args.add("--max_bytes", str(ctx.attr.max_bytes))
    args.add("--out", out)
    args.add_all(files)
    ctx.actions.run(
        executable = ctx.executable._link_epilogues,
        arguments = [args],
        inputs = files + [ctx.file.manifest, ctx.file.table, ctx.file._texts],
        outputs = [out],
        mnemonic = "LinkedEpilogues",
        progress_message = "Linking %{label}",
    )
    return [DefaultInfo(files = depset([out]))]

linked_epilogues = rule(
    implementation = _linked_epilogues_impl,
    doc = "An archive of cubins for one op, which `stoneware/epilogue/shipped.py` reads.",
    attrs = {
        "kernels": attr.label_list(
            mandatory = True,
            providers = [OpenKernelsInfo],
            doc = "cubin_library: its open kernels are linked",
        ),
        "manifest": attr.label(mandatory = True, allow_single_file = [".json"], doc = "of these kernels"),
        "max_bytes": attr.int(mandatory = True, doc = "the largest size of the archive; kernels get epilogues until then"),
        "op": attr.string(mandatory = True, doc = "the op"),
        "table": attr.label(mandatory = True, allow_single_file = [".table"], doc = "the op's tuning table"),
        "_link_epilogues": attr.label(
            default = Label("//tools/linked_epilogues"),
            executable = True,
            cfg = "exec",
        ),
        "_texts": attr.label(default = Label("//tools/linked_epilogues:texts.json"), allow_single_file = True),
    },
)
