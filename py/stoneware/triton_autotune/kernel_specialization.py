"""What Triton compiles a kernel for: of each argument its type and what is known of its value.

Triton compiles anew when an int becomes 1 or divisible by 16, outgrows 32 bits, a pointer loses its
16-byte alignment, a constant changes, and so on (python/src/specialize.cc and
create_function_from_signature in triton/runtime/jit.py). Two things follow it here:

`Kinds.of` makes, on the way of every launch, a token of each argument. Equal tokens mean
that Triton's answer is equal; different tokens may mean the same to it. `specialize` gives Triton's
answer itself, by which compiled kernels are filed. Anything that is not covered (a subclass of
Tensor, a tuple, a descriptor, a CPU tensor) gets no token, and Triton runs that call itself. tests
compare both with Triton's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1
ALIGNMENT = 16
"""What Triton specialises on: bytes of a pointer, and divisor of an int."""

_DTYPES = {
    "torch.bool": "u1", "torch.uint8": "u8", "torch.uint16": "u16", "torch.uint32": "u32",
    "torch.uint64": "u64", "torch.int8": "i8", "torch.int16": "i16", "torch.int32": "i32",
    "torch.int64": "i64", "torch.float16": "fp16", "torch.bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float64": "fp64", "torch.float8_e4m3fn": "fp8e4nv",
    "torch.float8_e5m2": "fp8e5", "torch.float8_e4m3fnuz": "fp8e4b8",
    "torch.float8_e5m2fnuz": "fp8e5b16",
}
"""torch's dtypes in Triton's names (triton/_utils.py, type_canonicalisation_dict)."""

# Of an int: what Triton sees in it. True and False for "divisible by 16" and not; 1 == True, so the
# int 1 has a token of its own.
_ONE = "1"
_INT64 = {True: "i64 divisible", False: "i64"}
_UINT64 = {True: "u64 divisible", False: "u64"}
_BOOLS = {True: "bool True", False: "bool False"}

Specialization = tuple[str, Any]
"""A type ("*fp16", "i32", "constexpr") and what is known of the value: "D" for a multiple of 16, ""
for nothing, None where Triton does not look, the value of a constant."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How Triton treats one parameter of a kernel (its KernelParam)."""

    name: str
    is_constexpr: bool
    is_const: bool
    annotation_type: str
    do_not_specialize: bool
    do_not_specialize_on_alignment: bool


def rules_of(jit_function: Any) -> tuple[Rule, ...]:
    """The rules of a triton.runtime.JITFunction, one a parameter."""
    return tuple(
        Rule(
            name=parameter.name,
            is_constexpr=bool(parameter.is_constexpr),
            is_const=bool(parameter.is_const),
            annotation_type=parameter.annotation_type,
            do_not_specialize=bool(parameter.do_not_specialize),
            do_not_specialize_on_alignment=bool(parameter.do_not_specialize_on_alignment),
        )
        for parameter in jit_function.params
    )


class Kinds:
    """Tokens of arguments; made once torch is imported, since it holds torch's tensor types."""

    def __init__(self) -> None:
        import torch

        self._tensors = frozenset((torch.Tensor, torch.nn.Parameter))

    def of(
        self, values: Sequence[Any], is_valued: Sequence[bool], tokens: list[Any]
    ) -> list[Any] | None:
        """Appends a token of each value, and gives what a launch passes for each.

        Args:
          values: of a call, in the order of its layout.
          is_valued: of each, whether its value counts and not just what Triton sees in it.
          tokens: to append to; hashable when this returns.

        Returns:
          The values, with addresses in the place of tensors; None if one has no token.
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
                elif INT64_MIN <= value <= INT64_MAX:
                    note(_INT64[not value & 15])
                elif 0 < value <= UINT64_MAX:
                    note(_UINT64[not value & 15])
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
        return _BOOLS[value] if valued else "bool"
    if kind is float:
        # By its digits: 0.0 and -0.0 are equal and not the same constant.
        return ("float", value.hex()) if valued else "float"
    if kind is str and valued:
        return "str", value
    if valued and kind.__name__ == "dtype":  # torch's or Triton's
        return kind, str(value)
    return None


def specialize(rule: Rule, value: Any) -> Specialization | None:
    """What Triton specialises on for an argument; None for a value that has no token above."""
    if rule.is_constexpr:
        known = _other_token(value, type(value), True) is not None or type(value) is int
        return ("constexpr", value) if known else None
    known = rule.annotation_type
    if known and (known == "u1" or known[:2] in ("fp", "bf")):
        return known, None
    found = _specialize_value(rule, value)
    return (known, found[1]) if found and known else found


def _specialize_value(rule: Rule, value: Any) -> Specialization | None:
    kind, is_special = type(value), not rule.do_not_specialize
    if value is None:
        return "constexpr", None
    if kind is bool:
        return "u1", None
    if kind is float:
        return "fp32", None
    if kind is int:
        if is_special and value == 1:
            return "constexpr", 1
        if INT32_MIN <= value <= INT32_MAX:
            type_name = "i32"
        elif INT64_MIN <= value <= INT64_MAX:
            type_name = "i64"
        elif 0 < value <= UINT64_MAX:
            type_name = "u64"
        else:
            return None
        return type_name, _divisibility(rule, value)
    if hasattr(value, "data_ptr") and str(value.dtype) in _DTYPES:
        pointee = _DTYPES[str(value.dtype)]
        return ("*k" if rule.is_const else "*") + pointee, _divisibility(rule, value.data_ptr())
    return None


def _divisibility(rule: Rule, number: int) -> str | None:
    if rule.do_not_specialize:
        return None
    is_known = not rule.do_not_specialize_on_alignment and number % ALIGNMENT == 0
    return "D" if is_known else ""
