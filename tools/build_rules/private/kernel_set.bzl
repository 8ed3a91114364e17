"""The build setting that chooses how many kernels a build has."""

_SETS = ["all", "small"]

def _kernel_set_impl(ctx):
    if ctx.build_setting_value not in _SETS:
        fail("{}: \"{}\" is not a kernel set; choose from {}".format(
            ctx.label,
            ctx.build_setting_value,
            ", ".join(_SETS),
        ))
    return []

kernel_set = rule(
    implementation = _kernel_set_impl,
    doc = """A build setting: "all" kernels, or a "small" set that compiles fast.

Example: `bazel test //... --//:kernel_set=all`.
""",
    build_setting = config.string(flag = True),
)
