"""What Triton compiles a kernel for: the type of each argument, and what is known of its value.

Triton compiles again when an int becomes 1 or divisible by 16, outgrows 32 bits, a pointer loses
its 16-byte alignment, a constant changes, and so on (python/src/specialize.cc and
create_function_from_signature in triton/runtime/jit.py). Two things here follow it:

`Kinds.of` makes a token of each argument, at every launch. Equal tokens mean that Triton's answer
is equal; different tokens may mean the same to it. `specialize` gives Triton's answer itself, by
which compiled kernels are filed. What is not covered (a subclass of Tensor, a tuple, a descriptor,
a CPU tensor) gets no token, and Triton runs that call. Tests compare both with Triton's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1
ALIGNMENT = 16
"""What Triton specialises on: bytes of a pointer, and divisor of an int."""

# An int32 has the token True if it is divisible by 16, else False; 1 has its own, since 1 == True.
_ONE = "1"

Specialization = tuple[str, Any]
"""A type ("*fp16", "i32", "constexpr") and what is known of the value: "D" for a multiple of 16, ""
for nothing, None where Triton does not look, the value of a constant."""


class Kinds:
    """Makes tokens of arguments; imports torch."""

    def __init__(self) -> None:
        import torch

        self._tensors = frozenset((torch.Tensor, torch.nn.Parameter))

    def of(self, values: Sequence[Any], is_valued: Sequence[bool], tokens: list[Any]) -> list[Any] | None:
        """Appends a token of each value to `tokens`.

        Args:
          values: of a call, in the order of its layout.
          is_valued: for each, whether its value counts and not just what Triton sees in it.
          tokens: each token is hashable.

        Returns:
          The values as a launch passes them, with addresses in place of tensors; None if a value
          has no token.
        """
        passed: list[Any] = []
        note, give, tensors = tokens.append, passed.append, self._tensors
        for value, valued in zip(values, is_valued):
            kind = type(value)
            if kind is int:
                if valued:
                    note(value)
                elif value == 1:
                    note(_ONE)
                elif INT32_MIN <= value <= INT32_MAX:
                    note(not value & 15)
                elif type_name := _int_type(value):
                    note((type_name, value & 15 == 0))
                else:
                    return None
                give(value)
            elif kind in tensors:
                if valued or not value.is_cuda:
                    return None
                address = value.data_ptr()
                note((value.dtype,) if address & 15 else value.dtype)
                give(address)
            else:
                token = _other_token(value, kind, valued)
                if token is None:
                    return None
                note(token)
                give(value)
        return passed


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


def specialize(parameter: Any, value: Any) -> Specialization | None:
    """What Triton specialises on for an argument; None for a value that has no token above.

    Triton's own function for it imports all of Gluon when it is first called.

    Args:
      parameter: triton.runtime.jit.KernelParam.
      value: what is passed for it.
    """
    if parameter.is_constexpr:
        known = type(value) is int or _other_token(value, type(value), True) is not None
        return ("constexpr", value) if known else None
    annotated = parameter.annotation_type
    if annotated and (annotated == "u1" or annotated[:2] in ("fp", "bf")):
        return annotated, None
    found = _specialize_value(parameter, value)
    return (annotated, found[1]) if found and annotated else found


def _specialize_value(parameter: Any, value: Any) -> Specialization | None:
    kind = type(value)
    if value is None:
        return "constexpr", None
    if kind is bool:
        return "u1", None
    if kind is float:
        return "fp32", None
    if kind is int:
        if value == 1 and not parameter.do_not_specialize:
            return "constexpr", 1
        type_name, number = _int_type(value), value
    elif hasattr(value, "data_ptr"):
        from triton.runtime.jit import type_canonicalisation_dict

        element = type_canonicalisation_dict.get(str(value.dtype).removeprefix("torch."))
        type_name, number = element and ("*k" if parameter.is_const else "*") + element, value.data_ptr()
    else:
        return None
    if type_name is None:
        return None
    if parameter.do_not_specialize:
        return type_name, None
    is_multiple = not parameter.do_not_specialize_on_alignment and number % ALIGNMENT == 0
    return type_name, "D" if is_multiple else ""


def _int_type(value: int) -> str | None:
    if INT32_MIN <= value <= INT32_MAX:
        return "i32"
    if INT64_MIN <= value <= INT64_MAX:
        return "i64"
    return "u64" if 0 < value <= UINT64_MAX else None
