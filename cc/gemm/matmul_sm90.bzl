"""matmul_config: a kernel of matmul_sm90.cuh, bf16 or fp16 in any layout.

    matmul_config(
        operand = "bf16",
        layout = "nn",
        tile = (128, 256, 64),
        cluster = (2, 1, 1),
        schedule = "cooperative",
    )
"""

load(":config_checks.bzl", "config_function", "field", "one_of")
load(":tile_rules.bzl", "BUILDER_FIELDS", "builder_family", "builder_kernel", "builder_rules")

_FAMILY = builder_family(name = "matmul_sm90", template = "Matmul")

_FIELDS = {
    "operand": field(one_of("bf16", "fp16"), "the dtype of a and b"),
    "out": field(
        one_of("bf16", "fp16", "fp32"),
        "the dtype of the result, the operands' or \"fp32\"",
        default = lambda config: config.operand,
    ),
    "layout": field(
        one_of("nt", "nn", "tn", "tt"),
        "that of a and b, \"n\" for row-major and \"t\" for column-major; \"nt\" is a @ weight.t()",
    ),
} | BUILDER_FIELDS

def _rules(config):
    return builder_rules(config) + [
        (
            config.out in [config.operand, "fp32"],
            "out must be the operands' dtype or fp32",
            "it is {} of {}".format(repr(config.out), repr(config.operand)),
            "choose one of them",
        ),
        (
            config.tile[2] in [64, 128],
            "tile k must be 64 or 128: whole swizzle atoms of 16 bits",
            "it is {}".format(config.tile[2]),
            "change the tile",
        ),
    ]

def _kernel(config):
    return builder_kernel(
        _FAMILY,
        config,
        words = [config.operand, config.out, config.layout],
        op = "matmul",
        a = config.operand,
        b = config.operand,
        out = config.out,
        a_is_m_major = config.layout[0] == "t",
        b_is_n_major = config.layout[1] == "n",
        json_fields = {"layout": config.layout, "sum_chunk": 0},
    )

matmul_config = config_function("matmul_config", _FIELDS, _rules, _kernel)
