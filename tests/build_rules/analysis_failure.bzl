"""analysis_failure_test: a target must fail in analysis, in the right words."""

load("//cc/gemm:cutlass_mm_sm90.bzl", "matmul_config", "scaled_mm_block_config", "scaled_mm_config")
load("//cc/gemm:persistent_mm_sm90.bzl", "persistent_mm_config")
load("//tools/build_rules/private:cubin_library.bzl", "check_ids", "check_subset")
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

_analysis_failure_test = rule(
    implementation = _analysis_failure_test_impl,
    attrs = {
        "says": attr.string_list(mandatory = True),
        "target_under_test": attr.label(mandatory = True, cfg = _allow_failures),
    },
    analysis_test = True,
)

def analysis_failure_test(name, says, target_under_test):
    """Passes when analysing a target fails and the error has all words of `says`.

    Example:
        analysis_failure_test(
            name = "unknown_arch_test",
            says = ["sm_99"],
            target_under_test = ":unknown_arch",
        )

    Args:
      name: the test.
      says: parts of the message.
      target_under_test: it needs the tag "manual": `bazel build //...` must not build it.
    """
    _analysis_failure_test(
        name = name,
        size = "small",
        says = says,
        target_under_test = target_under_test,
    )

# Function -> itself, and arguments that it takes.
_CONFIGS = {
    "matmul_config": (matmul_config, {
        "cluster": [2, 1, 1],
        "layout": "nt",
        "operand": "bf16",
        "schedule": "pingpong",
        "tile": [128, 128, 64],
    }),
    "persistent_mm_config": (persistent_mm_config, {
        "dtype": "e4m3",
        "op": "scaled_mm",
        "out": "bf16",
        "stages": 6,
        "tile": [64, 64, 256],
    }),
    "scaled_mm_block_config": (scaled_mm_block_config, {
        "a": "e4m3",
        "b": "e4m3",
        "cluster": [1, 1, 1],
        "out": "bf16",
        "schedule": "pingpong",
        "tile": [64, 128, 128],
    }),
    "scaled_mm_config": (scaled_mm_config, {
        "a": "e4m3",
        "b": "e4m3",
        "cluster": [2, 1, 1],
        "out": "bf16",
        "schedule": "pingpong",
        "tile": [128, 128, 128],
    }),
}

def _one_config_impl(ctx):
    function, valid = _CONFIGS[ctx.attr.function]
    function(**(valid | json.decode(ctx.attr.changes)))
    return []

_one_config = rule(
    implementation = _one_config_impl,
    attrs = {"changes": attr.string(), "function": attr.string()},
)

def config_failure_tests(cases):
    """A valid config with changes is refused, in the right words, with its function and tile.

    Args:
      cases: function -> test -> (arguments that differ from a valid config, parts of the message).
    """
    for function, (_, valid) in _CONFIGS.items():
        for case, (changes, says) in cases[function].items():
            name = "{}_{}_test".format(function, case)
            _one_config(
                name = name + "_config",
                changes = json.encode(changes),
                function = function,
                tags = ["manual"],
            )
            tile = (valid | changes)["tile"]
            analysis_failure_test(
                name = name,
                says = ["{}(tile = {}): ".format(function, tile)] + says,
                target_under_test = ":{}_config".format(name),
            )

def _one_config_twice_impl(_ctx):
    function, valid = _CONFIGS["matmul_config"]
    other = function(**(valid | {"layout": "nn"}))
    check_ids([function(**valid), other, function(**valid)])
    return []

one_config_twice = rule(
    implementation = _one_config_twice_impl,
    doc = "What cubin_library checks, where a test can see it fail.",
)

def _subset_of_unknown_kernel_impl(_ctx):
    check_subset("small_kernels", ["matmul_128x128", "matmul_128x192"], ["matmul_128x128"])
    return []

subset_of_unknown_kernel = rule(
    implementation = _subset_of_unknown_kernel_impl,
    doc = "What cubin_library checks of a subset, where a test can see it fail.",
)

def _config_test_impl(_ctx):
    # A rule's implementation, not a macro: a valid config must not fail anywhere.
    for function, valid in _CONFIGS.values():
        function(**valid)
    function, valid = _CONFIGS["scaled_mm_config"]
    config = function(**valid)
    swapped = function(swap_ab = True, **valid)
    wide = function(**(valid | {"tile": [128, 160, 128]}))
    split = _CONFIGS["persistent_mm_config"][0](**_CONFIGS["persistent_mm_config"][1])
    expected = "scaled_mm_sm90_e4m3_e4m3_bf16_128x128x128_2x1x1_pingpong"
    problems = [text for is_right, text in [
        (config.id == expected, "id is {}, not {}".format(config.id, expected)),
        (config.arch == "sm_90a", "arch is {}".format(config.arch)),
        (swapped.id == expected + "_swap", "id with swap_ab is {}".format(swapped.id)),
        (split.id == "scaled_mm_sm90_e4m3_e4m3_bf16_64x64x256_1x1x1_splitk1x6_swap", split.id),
        (json.decode(config.config_json)["tile"] == [128, 128, 128], config.config_json),
        ("kTileN = 128;" in config.header, config.header),
        ("kSchedule = Schedule::kPingpong;" in config.header, config.header),
        ("struct {}_config {{".format(expected) in config.header, config.header),
        (not config.defines, "{}".format(config.defines)),
        (wide.defines == ["CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"], "{}".format(wide.defines)),
    ] if not is_right]
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

config_test = rule(
    implementation = _config_test_impl,
    doc = "Ids of configs are those in manifests and tables, and headers have their values.",
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
        serves = json.encode({"forward": True}),
    )
    return [KernelInfo(kernels = depset([kernel]), removed = depset())]

stand_in_kernel = rule(
    implementation = _stand_in_kernel_impl,
    doc = "A target with KernelInfo, without a compiler.",
    attrs = {"kernel_id": attr.string(mandatory = True)},
)
