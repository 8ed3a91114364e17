"""The shape and the dtype of an operator's result, by torch's rules of broadcasting and promotion.

Torch has these rules for the device "meta" in Python, where the first call imports 800 modules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from stoneware.errors import UnsupportedError


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that they broadcast to, or None. torch.broadcast_shapes imports 490 modules."""
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, extent in enumerate(shape, start=len(result) - len(shape)):
            if extent != 1 and result[place] not in (1, extent):
                return None
            result[place] = extent if result[place] == 1 else result[place]
    return tuple(result)


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

ROUNDED_NUMBERS = _COMPARISONS | {"atan2", "logical_and", "logical_or", "logical_xor", "pow"}
"""Operators that round a number to the common dtype of their arguments. Others read it in float32."""

_NOT_PROMOTED = frozenset({"alpha", "condition", "mask", "value"})
"""Arguments that do not change the dtype of the result."""

_BOOLEAN = frozenset({"add", "masked_fill", "maximum", "minimum", "mul", "sign", "where"})
"""Operators whose result of booleans is a boolean, like that of bitwise ones: a sum is a disjunction."""

_FLOATING = frozenset(
    {
        *("atan", "atan2", "copysign", "cos", "div", "erf", "erfc", "exp", "exp2", "expm1", "log", "log10", "log1p"),
        *("log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh"),
    }
)
"""Operators whose result of booleans and integers is float32. Torch refuses booleans for the rest."""

_FLOAT8 = frozenset({"_to_copy", "abs", "eq", "isnan", "ne", "where"})
"""Operators that torch has for fp8."""

_NEVER_BOOLEAN = frozenset({"elu", "hardtanh", "leaky_relu", "rsub", "softplus", "sub"})
"""Operators for which torch refuses booleans even with numbers that are not."""


def result_of(name: str, arguments: dict[str, Any]) -> torch.Tensor:
    """The result of an operator of `arithmetic.py`, on the device "meta", by torch's rules of promotion."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    shape = broadcast(*[tensor.shape for tensor in tensors.values()])
    if shape is None:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors.values())
        raise ValueError(f"the shapes {shapes} of {name} in an epilogue must broadcast; reshape one of them")
    for key in ("condition", "mask"):
        if key in tensors and tensors[key].dtype != torch.bool:
            _refuse(name, f"a boolean {key}, not {tensors[key].dtype}", "compare it with 0")
    if name not in _FLOAT8 and any(
        tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for tensor in tensors.values()
    ):
        _refuse(name, "no fp8", "convert it with .float()")
    if name == "masked_fill" and "value" in tensors and tensors["value"].ndim:
        _refuse(name, f"a value without dimensions, not of shape {list(tensors['value'].shape)}", "use torch.where")
    dtype, alpha = common_dtype(arguments), arguments.get("alpha", 1)
    is_boolean = dtype == torch.bool
    if name in _COMPARISONS or name.startswith(("logical_", "is")):
        dtype = torch.bool
    elif name == "_to_copy":
        dtype = arguments.get("dtype") or dtype
    elif name in _NEVER_BOOLEAN and (
        isinstance(arguments.get("other"), bool) or any(tensor.dtype == torch.bool for tensor in tensors.values())
    ):
        _refuse(name, "no booleans", "convert them with .float()")
    elif name.startswith("bitwise_"):
        if not is_boolean:
            _refuse(name, "booleans", f"compare the {dtype} values with 0")
    elif dtype in (torch.bool, torch.int64) and name in _FLOATING:
        dtype = torch.float32
    elif is_boolean and (name not in _BOOLEAN or isinstance(alpha, float) or alpha < 0):
        _refuse(name, "no booleans", "convert them with .float()")
    return torch.empty(shape, dtype=dtype, device="meta")


def _refuse(name: str, rule: str, remedy: str) -> NoReturn:
    raise UnsupportedError(f"{name} in an epilogue must get {rule}; {remedy}")


def common_dtype(arguments: dict[str, Any]) -> torch.dtype:
    """The dtype to which an operator converts its arguments, tensors and numbers.

    Tensors without dimensions change it only if they are of a higher category than those with dimensions, and numbers
    only if they are of a higher one than all tensors: booleans, integers, floats.
    """
    values = [value for key, value in arguments.items() if key not in _NOT_PROMOTED]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    parts = [[tensor.dtype for tensor in tensors if (tensor.ndim == 0) == is_scalar] for is_scalar in (False, True)]
    common, *scalars = [functools.reduce(torch.promote_types, dtypes) for dtypes in parts if dtypes]
    for scalar in scalars:
        common = torch.result_type(torch.empty(1, dtype=common), torch.empty((), dtype=scalar))
    for number in values:
        if isinstance(number, (bool, int, float)):
            common = torch.result_type(torch.empty(1, dtype=common), number)
    return common
