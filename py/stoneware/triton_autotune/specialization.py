"""Tokens of arguments: the properties by which Triton specializes a kernel.

Triton compiles again when an int becomes 1 or divisible by 16, outgrows 32 bits, a pointer loses
its 16-byte alignment, a constant changes, and so on (python/src/specialize.cc and
create_function_from_signature in triton/runtime/jit.py). `tokens_of` makes a token of each argument,
at every launch. Equal tokens mean the same kernel of Triton's; different tokens may mean the
same one too. Triton's own function is not used: its first call imports all of Gluon.

Other values (a subclass of Tensor, a tuple, a descriptor, a CPU tensor) have no token, and Triton makes
the launch. Tests compare the tokens with Triton's own code.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1
# The token of an int32 is True if 16 divides it, otherwise False; that of 1 is another, since 1 == True.
_TOKEN_OF_1 = "1"


def tokens_of(
    values: Sequence[Any], is_valued: Iterable[bool], tokens: list[Any], tensor_types: Container[type] = ()
) -> list[Any] | None:
    """Appends a token of each value to `tokens`.

    Args:
      values: of a launch, in the order of its form.
      is_valued: for each, whether its value counts and not just what Triton sees in it.
      tokens: each token is hashable.
      tensor_types: whose objects are passed by their address.

    Returns:
      The values as a launch passes them, with addresses instead of tensors; None if a value
      has no token.
    """
    arguments: list[Any] = []
    add_token, add_argument = tokens.append, arguments.append
    for value, valued in zip(values, is_valued):
        kind = type(value)
        if kind is int:
            if valued:
                add_token(value)
            elif value == 1:
                add_token(_TOKEN_OF_1)
            elif INT32_MIN <= value <= INT32_MAX:
                add_token(not value & 15)
            elif INT64_MIN <= value <= UINT64_MAX:
                add_token(("i64" if value <= INT64_MAX else "u64", value & 15 == 0))
            else:
                return None
            add_argument(value)
        elif kind in tensor_types:
            if valued or not value.is_cuda:
                return None
            address = value.data_ptr()
            add_token((value.dtype,) if address & 15 else value.dtype)
            add_argument(address)
        else:
            token = _other_token(value, kind, valued)
            if token is None:
                return None
            add_token(token)
            add_argument(value)
    return arguments


def _other_token(value: Any, kind: type, valued: bool) -> Any:
    if value is None:
        return "None"
    if kind is bool:
        return ("bool", value) if valued else "bool"
    if kind is float:
        # By its digits: 0.0 and -0.0 are equal and not the same constant.
        return ("float", value.hex()) if valued else "float"
    if kind is str and valued:
        return "str", value
    if valued and kind.__name__ == "dtype":  # torch's or Triton's
        return kind, str(value)
    return None
