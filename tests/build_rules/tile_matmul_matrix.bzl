"""tile_matmul_matrix_test: which directions of a tile matmul are built, by flag and attribute; nothing is compiled."""

load("//tools/build_rules:defs.bzl", "tile_matmul")
load("//tools/build_rules/private:providers.bzl", "TileMatmulInfo")

_ALL = ["forward", "dA", "dB"]

# flag -> backward of the target -> the directions.
_MATRIX = {
    "on": {
        "inherit": _ALL,
        "on": _ALL,
        "off": ["forward"],
    },
    "off": {
        "inherit": ["forward"],
        "on": _ALL,
        "off": ["forward"],
    },
}

_FLAG = "//:enable_backward"

def _both_flags_impl(_settings, _attr):
    return {"on": {_FLAG: True}, "off": {_FLAG: False}}

_both_flags = transition(implementation = _both_flags_impl, inputs = [], outputs = [_FLAG])

def _tile_matmul_matrix_test_impl(ctx):
    problems = []
    for flag, targets in ctx.split_attr.matmuls.items():
        for target in targets:
            backward = target.label.name.split("_")[-1]
            found = [built.direction for built in target[TileMatmulInfo].files.to_list()]
            if sorted(found) != sorted(_MATRIX[flag][backward]):
                problems.append("flag {}, backward = {}: {}".format(flag, backward, found))
    if sorted(ctx.split_attr.matmuls.keys()) != sorted(_MATRIX.keys()):
        problems.append("flags: {}".format(ctx.split_attr.matmuls.keys()))
    return [AnalysisTestResultInfo(success = not problems, message = "\n".join(problems))]

_tile_matmul_matrix_test = rule(
    implementation = _tile_matmul_matrix_test_impl,
    attrs = {
        "matmuls": attr.label_list(cfg = _both_flags, mandatory = True, providers = [TileMatmulInfo]),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
    analysis_test = True,
)

def tile_matmul_matrix_test(name):
    """Passes when the narrower of flag and attribute wins.

    Args:
      name: the test.
    """
    for backward in _MATRIX["on"]:
        tile_matmul(
            name = "{}_{}".format(name, backward),
            a = "bf16",
            b = "bf16",
            backward = backward,
            k = 64,
            m = 64,
            n = 64,
            tags = ["manual"],
        )
    _tile_matmul_matrix_test(
        name = name,
        size = "small",
        matmuls = [":{}_{}".format(name, backward) for backward in _MATRIX["on"]],
    )
