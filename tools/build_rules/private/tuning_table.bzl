"""tuning_table: the bake, from committed measurements to the table in the wheel."""

def _tuning_table_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".table")
    args = ctx.actions.args()
    args.add("--op", ctx.attr.op)
    if ctx.file.manifest:
        args.add("--manifest", ctx.file.manifest)
    args.add("--out", out)
    args.add_all(ctx.files.samples)
    ctx.actions.run(
        executable = ctx.executable._bake,
        arguments = [args],
        inputs = ctx.files.samples + ctx.files.manifest,
        outputs = [out],
        mnemonic = "TuningTable",
        progress_message = "Baking %{label}",
    )
    return [DefaultInfo(files = depset([out]))]

tuning_table = rule(
    implementation = _tuning_table_impl,
    doc = """Bakes a tuning table out of measurements; pure, and without a GPU.

Fails when a sample names a kernel that the manifest lacks.

Examples:
    tuning_table(
        name = "scaled_mm_table",
        op = "scaled_mm",
        manifest = ":kernel_manifest",
        samples = glob(["tuning_data/**"]),
    )
    tuning_table(
        name = "tables/acme.kernels.softmax",
        op = "acme.kernels:softmax",
        samples = glob(["tuning_data/**"]),
    )
""",
    attrs = {
        "manifest": attr.label(
            allow_single_file = [".json"],
            doc = "The kernels of the build; for an op of Stoneware.",
        ),
        "op": attr.string(mandatory = True, doc = "An op, or a decorated kernel."),
        "samples": attr.label_list(
            allow_files = [".json", ".jsonl"],
            doc = "The files of folders that `stoneware merge` wrote, one folder per device.",
        ),
        "_bake": attr.label(default = Label("//tools/bake"), executable = True, cfg = "exec"),
    },
)
