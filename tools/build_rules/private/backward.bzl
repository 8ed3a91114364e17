"""Which kernels a build has for gradients: the flag //:enable_backward, and `backward` of kernel rules.

A kernel serves matmuls: "forward", "dgrad" (the gradient of an input) and "wgrad" (that of a weight).
With backward off it serves only the forward matmul, and is not built if it does not serve that. The
narrowest of three settings that is not "inherit" wins: the kernel's, its library's, the flag.
"""

load(":providers.bzl", "BackwardInfo")

MATMULS = ["forward", "dgrad", "wgrad"]

SETTINGS = ["inherit", "on", "off"]

# Of every rule that compiles kernels.
BACKWARD_ATTRS = {
    "backward": attr.string(
        default = "inherit",
        values = SETTINGS,
        doc = "whether it serves gradients: \"on\", \"off\", or what //:enable_backward says",
    ),
    "serves": attr.string_list(default = ["forward"], doc = "of " + ", ".join(MATMULS)),
    "_enable_backward": attr.label(default = Label("//:enable_backward"), providers = [BackwardInfo]),
}

def _enable_backward_impl(ctx):
    return [BackwardInfo(is_on = ctx.build_setting_value)]

enable_backward = rule(
    implementation = _enable_backward_impl,
    doc = """A build setting: whether kernels for gradients are built.

Example: `bazel build //:wheel --//:enable_backward=false`.
""",
    build_setting = config.bool(flag = True),
)

def narrower(setting, wider):
    """What holds for a kernel, of its own setting and the one around it.

    Args:
      setting: "inherit", "on" or "off".
      wider: the same.

    Returns:
      One of these.
    """
    for one in (setting, wider):
        if one not in SETTINGS:
            fail("backward must be one of {}, but is {}; choose one of them".format(", ".join(SETTINGS), repr(one)))
    return wider if setting == "inherit" else setting

def served(ctx):
    """Matmul -> whether this build's kernel serves it, of a rule with BACKWARD_ATTRS.

    Args:
      ctx: of the rule.

    Returns:
      A dict of the matmuls in `serves`; a kernel for which all are False is not built.
    """
    for matmul in ctx.attr.serves:
        if matmul not in MATMULS:
            fail("{}: serves must name matmuls of {}, but has {}; correct it"
                .format(ctx.label, ", ".join(MATMULS), repr(matmul)))
    is_on = ctx.attr.backward == "on" or (
        ctx.attr.backward == "inherit" and ctx.attr._enable_backward[BackwardInfo].is_on
    )
    return {matmul: matmul == "forward" or is_on for matmul in ctx.attr.serves}
