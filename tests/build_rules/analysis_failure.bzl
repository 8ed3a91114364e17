"""analysis_failure_test: a target must fail in analysis, in the right words."""

load("//cc/gemm:gemm_configs.bzl", "SCALED_MM_SM90", "gemm_config", "splitk_config")
load("//tools/build_rules/private:providers.bzl", "KernelInfo")

_allow_failures = analysis_test_transition(
    settings = {"//command_line_option:allow_analysis_failures": "True"},
)

def _analysis_failure_test_impl(ctx):
    target = ctx.attr.target_under_test[0]  # An attribute with a transition is a list.
    if AnalysisFailureInfo not in target:
        return [AnalysisTestResultInfo(
            success = False,
            message = "{} did not fail".format(target.label),
        )]
    message = "\n".join([cause.message for cause in target[AnalysisFailureInfo].causes.to_list()])
    missing = [words for words in ctx.attr.says if words not in message]
    return [AnalysisTestResultInfo(
        success = not missing,
        message = "{}: the error says\n{}\nbut not: {}".format(target.label, message, missing),
    )]

analysis_failure_test = rule(
    implementation = _analysis_failure_test_impl,
    doc = """Passes when analysing `target_under_test` fails and the error has all words of `says`.

The target needs the tag "manual": `bazel build //...` must not build it.

Example:
    analysis_failure_test(
        name = "unknown_arch_test",
        says = ["sm_99"],
        target_under_test = ":unknown_arch",
    )
""",
    attrs = {
        "says": attr.string_list(mandatory = True, doc = "parts of the message"),
        "target_under_test": attr.label(mandatory = True, cfg = _allow_failures),
    },
    analysis_test = True,
)

_VALID_CONFIG = {
    "a": "e4m3",
    "b": "e4m3",
    "cluster": [2, 1, 1],
    "out": "bf16",
    "schedule": "pingpong",
    "tile": [128, 128, 128],
}

_VALID_SPLITK_CONFIG = {
    "dtype": "e4m3",
    "op": "scaled_mm",
    "out": "bf16",
    "stages": 6,
    "tile": [64, 64, 256],
}

def _one_config_impl(ctx):
    changes = json.decode(ctx.attr.changes)
    if ctx.attr.is_splitk:
        splitk_config(**(_VALID_SPLITK_CONFIG | changes))
    else:
        gemm_config(**(_VALID_CONFIG | changes))
    return []

_one_config = rule(
    implementation = _one_config_impl,
    attrs = {"changes": attr.string(), "is_splitk": attr.bool()},
)

def gemm_config_failure_test(name, says, is_splitk = False, **changes):
    """A valid config with `changes` is refused in the words of `says`.

    Args:
      name: the test.
      says: parts of the message: rule, value, remedy.
      is_splitk: whether splitk_config makes it, not gemm_config.
      **changes: arguments of that function that differ from a valid config.
    """
    _one_config(
        name = name + "_config",
        changes = json.encode(changes),
        is_splitk = is_splitk,
        tags = ["manual"],
    )
    analysis_failure_test(
        name = name,
        says = ["gemm_config: "] + says,
        target_under_test = ":{}_config".format(name),
    )

def splitk_config_failure_test(name, **rest):
    """As gemm_config_failure_test, of splitk_config."""
    gemm_config_failure_test(name = name, is_splitk = True, **rest)

def _gemm_config_test_impl(ctx):
    config = gemm_config(**_VALID_CONFIG)
    expected = "scaled_mm_sm90_e4m3_e4m3_bf16_128x128x128_2x1x1_pingpong"
    swapped = gemm_config(swap_ab = True, **_VALID_CONFIG)
    ids = [config.id for config in SCALED_MM_SM90]
    problems = [text for is_right, text in [
        (config.id == expected, "id is {}, not {}".format(config.id, expected)),
        (config.arch == "sm_90a", "arch is {}".format(config.arch)),
        (swapped.id == expected + "_swap", "id with swap_ab is {}".format(swapped.id)),
        (json.decode(config.config_json)["tile"] == [128, 128, 128], config.config_json),
        (len({id: None for id in ids}) == len(ids), "an id twice in {}".format(ids)),
    ] if not is_right]
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

gemm_config_test = rule(
    implementation = _gemm_config_test_impl,
    doc = "Ids of configs are those that manifests and tables know.",
    analysis_test = True,
)

def _stand_in_kernel_impl(ctx):
    cubin = ctx.actions.declare_file(ctx.label.name + ".cubin")
    ctx.actions.write(cubin, ctx.label.name)
    kernel = struct(
        id = ctx.attr.kernel_id,
        op = "add",
        backend = "none",
        arch = "sm_90",
        config = "{}",
        cubin = cubin,
        json = cubin,
    )
    return [KernelInfo(kernels = depset([kernel]))]

stand_in_kernel = rule(
    implementation = _stand_in_kernel_impl,
    doc = "A target with KernelInfo, without a compiler.",
    attrs = {"kernel_id": attr.string(mandatory = True)},
)
