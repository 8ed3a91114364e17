"""How each operator of torch that an epilogue may use is written in CUDA C++, on float values.

Like torch's own CUDA kernels they compute in float32 whatever the dtype, and round once at the end. Results
differ from torch's by a few units in the last place of float32, since functions with a quotient, such as silu,
use the GPU's approximate reciprocal and power of two. A text names the operator's arguments in braces; those of
FLAGS are Python values. A multiplication and an addition of two operators are not contracted to one rounding,
as they would not be in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

UNARY: Mapping[str, str] = {
    "abs": "fabsf({self})",
    "neg": "-({self})",
    "exp": "expf({self})",
    "exp2": "exp2f({self})",
    "expm1": "expm1f({self})",
    "log": "logf({self})",
    "log2": "log2f({self})",
    "log10": "log10f({self})",
    "log1p": "log1pf({self})",
    "sqrt": "sqrtf({self})",
    "rsqrt": "rsqrtf({self})",
    "reciprocal": "(1.0f / {self})",
    "sin": "sinf({self})",
    "cos": "cosf({self})",
    "tan": "tanf({self})",
    "atan": "atanf({self})",
    "tanh": "tanhf({self})",
    "erf": "erff({self})",
    "erfc": "erfcf({self})",
    "floor": "floorf({self})",
    "ceil": "ceilf({self})",
    "round": "nearbyintf({self})",
    "trunc": "truncf({self})",
    "sign": "(({self} > 0.0f) - ({self} < 0.0f))",
    "relu": "Max({self}, 0.0f)",
    "sigmoid": "Sigmoid({self})",
    "silu": "({self} * Sigmoid({self}))",
    "mish": "Mish({self})",
    "hardswish": "({self} * Min(Max({self} + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))",
    "hardsigmoid": "(Min(Max({self} + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))",
    "isnan": "({self} != {self})",
    "isinf": "(fabsf({self}) == INFINITY_F)",
    "logical_not": "(!Truth({self}))",
    "bitwise_not": "(!Truth({self}))",
}

BINARY: Mapping[str, str] = {
    "mul": "__fmul_rn({self}, {other})",
    "maximum": "Max({self}, {other})",
    "minimum": "Min({self}, {other})",
    "atan2": "atan2f({self}, {other})",
    "copysign": "copysignf({self}, {other})",
    "eq": "({self} == {other})",
    "ne": "({self} != {other})",
    "lt": "({self} < {other})",
    "le": "({self} <= {other})",
    "gt": "({self} > {other})",
    "ge": "({self} >= {other})",
    "logical_and": "(Truth({self}) && Truth({other}))",
    "logical_or": "(Truth({self}) || Truth({other}))",
    "logical_xor": "(Truth({self}) != Truth({other}))",
    "bitwise_and": "(Truth({self}) && Truth({other}))",
    "bitwise_or": "(Truth({self}) || Truth({other}))",
    "bitwise_xor": "(Truth({self}) != Truth({other}))",
}

_TANH_GELU = (
    f"({{self}} * Sigmoid({2 * math.sqrt(2 / math.pi)!r}f * ({{self}} + 0.044715f * ({{self}} * {{self}} * {{self}}))))"
)
"""0.5 (1 + tanh(z)) is sigmoid(2 z)."""

FLAGS = ("approximate", "rounding_mode", "memory_format", "dtype", "layout", "device", "pin_memory", "non_blocking")
"""Arguments that are no numbers."""


def _added(arguments: Mapping[str, Any]) -> str:
    return "__fadd_rn({self}, {other})" if _is_one(arguments, "alpha") else "__fadd_rn({self}, {alpha} * {other})"


def _subtracted(arguments: Mapping[str, Any]) -> str:
    return "__fsub_rn({self}, {other})" if _is_one(arguments, "alpha") else "__fsub_rn({self}, {alpha} * {other})"


def _subtracted_from(arguments: Mapping[str, Any]) -> str:
    return "__fsub_rn({other}, {self})" if _is_one(arguments, "alpha") else "__fsub_rn({other}, {alpha} * {self})"


def _is_one(arguments: Mapping[str, Any], name: str) -> bool:
    return arguments.get(name, 1) == 1


def _quotient(arguments: Mapping[str, Any]) -> str:
    """The quotient by a number is a product with its float32 reciprocal, like in torch."""
    divisor = arguments["other"]
    return "__fmul_rn({self}, 1.0f / {other})" if isinstance(divisor, float) and divisor != 0 else "({self} / {other})"


def _softplus(arguments: Mapping[str, Any]) -> str:
    if _is_one(arguments, "beta"):
        return "({self} > {threshold} ? {self} : log1pf(expf({self})))"
    return "({self} * {beta} > {threshold} ? {self} : log1pf(expf({self} * {beta})) / {beta})"


def _clamped(arguments: Mapping[str, Any]) -> str:
    text = "{self}"
    if arguments.get("min") is not None:
        text = f"Max({text}, {{min}})"
    if arguments.get("max") is not None:
        text = f"Min({text}, {{max}})"
    return text


def _power(arguments: Mapping[str, Any]) -> str:
    exponent = arguments["exponent"]
    powers = {
        0.5: "sqrtf({self})",
        -0.5: "rsqrtf({self})",
        2: "({self} * {self})",
        3: "({self} * {self} * {self})",
        -1: "(1.0f / {self})",
        -2: "(1.0f / ({self} * {self}))",
    }
    known = powers.get(exponent) if isinstance(exponent, (int, float)) else None
    return known or "powf({self}, {exponent})"


def _gelu(arguments: Mapping[str, Any]) -> str:
    if arguments.get("approximate", "none") == "tanh":
        return _TANH_GELU
    return "Gelu({self})"


OTHERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "add": _added,
    "sub": _subtracted,
    "rsub": _subtracted_from,
    "div": _quotient,
    "clamp": _clamped,
    "clamp_min": lambda _: "Max({self}, {min})",
    "clamp_max": lambda _: "Min({self}, {max})",
    "hardtanh": lambda _: "Min(Max({self}, {min_val}), {max_val})",
    "pow": _power,
    "gelu": _gelu,
    "softplus": _softplus,
    "leaky_relu": lambda _: "({self} > 0.0f ? {self} : {self} * {negative_slope})",
    "elu": lambda _: "({self} > 0.0f ? {self} * {scale} : expm1f({self} * {input_scale}) * ({alpha} * {scale}))",
    "where": lambda _: "(Truth({condition}) ? {self} : {other})",
    "masked_fill": lambda _: "(Truth({mask}) ? {value} : {self})",
    "addcmul": lambda _: "__fadd_rn({self}, {value} * {tensor1} * {tensor2})",
    "addcdiv": lambda _: "__fadd_rn({self}, {value} * ({tensor1} / {tensor2}))",
    "_to_copy": lambda _: "{self}",
}

NAMES = frozenset({*UNARY, *BINARY, *OTHERS})


def text(operator: str, arguments: Mapping[str, Any]) -> str:
    """The operator's text, with its arguments in braces.

    Args:
      operator: one of NAMES.
      arguments: name -> value: numbers and flags as they are, anything for the rest.
    """
    if operator in OTHERS:
        return OTHERS[operator](arguments)
    return UNARY.get(operator) or BINARY[operator]
