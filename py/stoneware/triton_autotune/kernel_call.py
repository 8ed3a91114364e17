"""A call of a decorated kernel: which value each parameter has, and the key that follows from it.

`kernel[grid](*args, **kwargs)` may pass a parameter by position, by keyword, by its default, or not
at all (then the config gives it). The key must not depend on which; so key arguments are found by
their position in the kernel's signature (`key_idx`).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoneware.kernels.key import KernelKey, Value, check_value


class _Omitted:
    def __repr__(self) -> str:
        return "OMITTED"


OMITTED = _Omitted()
"""The value of a parameter that the call leaves out and that has no default."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How the values of calls of one form lie: so many by position, these by keyword.

    Attributes:
      names: of each value, in the order of the call: positional ones, then keywords.
      positions: of each value in the signature; -1 for an option such as `maxnreg`.
      rest: (position, default or OMITTED) of each parameter that the call does not pass.
      num_parameters: of the kernel.
      is_valued: of each value, whether plans are made for its value and not just its kind: key
        arguments, constants and options.
      plans: what was prepared for calls of this form, by the kinds of the values.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    rest: tuple[tuple[int, Any], ...]
    num_parameters: int
    is_valued: tuple[bool, ...]
    plans: dict[Any, Any] = field(default_factory=dict)

    @functools.cached_property
    def has_options(self) -> bool:
        """Whether a value is no parameter's."""
        return -1 in self.positions

    def options(self, values: Sequence[Any]) -> dict[str, Any]:
        """The call's arguments that are no parameters of the kernel."""
        return {
            name: value
            for name, position, value in zip(self.names, self.positions, values)
            if position < 0
        }

    def bound(self, values: Sequence[Any]) -> list[Any]:
        """The value of each parameter, in the order of the signature."""
        found: list[Any] = [OMITTED] * self.num_parameters
        for position, value in zip(self.positions, values):
            if position >= 0:
                found[position] = value
        for position, value in self.rest:
            found[position] = value
        return found


class KernelSignature:
    """The parameters of a kernel, and where its key arguments are among them.

    Attributes:
      names: of the parameters, in order.
      key_names: of the key arguments, in the order of the decorator's `key`.
      key_idx: their positions in the signature.

    Raises:
      ValueError: `key` names something that is no parameter, or names one twice.
    """

    def __init__(
        self, signature: inspect.Signature, key: Sequence[str], constants: Sequence[str] = ()
    ) -> None:
        self.names = tuple(signature.parameters)
        self.key_names = checked_names("key", key, self.names)
        self.key_idx = tuple(self.names.index(name) for name in self.key_names)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        # Triton takes keyword-only parameters by position too, up to 3.6; Python's rule is later's.
        self._num_positional = sum(
            kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for kind in kinds
        )
        self._has_rest = inspect.Parameter.VAR_POSITIONAL in kinds  # *args
        self._position = {name: position for position, name in enumerate(self.names)}
        self._valued = {*self.key_names, *constants}
        self._defaults = {
            position: parameter.default
            for position, parameter in enumerate(signature.parameters.values())
            if parameter.default is not inspect.Parameter.empty
        }

    def layout(self, num_positional: int, keywords: Sequence[str]) -> Layout:
        """The form of calls with so many positional arguments and these keywords.

        Raises:
          TypeError: too many positional arguments, or a parameter is passed twice.
        """
        num_rest = max(0, num_positional - self._num_positional)
        if num_rest and not self._has_rest:
            raise TypeError(
                f"a call passes {num_positional} arguments by position and must pass at most "
                f"{self._num_positional}, of ({', '.join(self.names)}); pass options by keyword"
            )
        num_positional -= num_rest
        positions = [
            *range(num_positional), *[self._num_positional] * num_rest,
            *(self._position.get(name, -1) for name in keywords),
        ]
        for name in keywords:
            if self._position.get(name, num_positional) < num_positional:
                raise TypeError(
                    f"{name} is passed by position and by keyword and must be passed once; drop "
                    "the keyword"
                )
        passed = set(positions)
        if self._has_rest:
            passed.add(self._num_positional)
        rest_name = self.names[self._num_positional : self._num_positional + 1]
        names = (*self.names[:num_positional], *rest_name * num_rest, *keywords)
        return Layout(
            names=names,
            positions=tuple(positions),
            rest=tuple(
                (position, self._defaults.get(position, OMITTED))
                for position in range(len(self.names))
                if position not in passed
            ),
            num_parameters=len(self.names),
            is_valued=tuple(
                position < 0 or name in self._valued for name, position in zip(names, positions)
            ),
        )

    def key(self, op: str, bound: Sequence[Any]) -> KernelKey:
        """The key of a call.

        Args:
          op: the kernel's name.
          bound: the value of each parameter, as Layout.bound gives them.

        Raises:
          TypeError, ValueError: a key argument has a value that cannot be part of a key.
        """
        return KernelKey(
            op=op,
            names=self.key_names,
            values=tuple(
                key_value(name, bound[position])
                for name, position in zip(self.key_names, self.key_idx)
            ),
            dtypes=tuple(
                (name, str(value.dtype).removeprefix("torch."))
                for name, value in zip(self.names, bound)
                if hasattr(value, "dtype")
            ),
        )


def checked_names(parameter: str, names: Sequence[str] | None, known: Sequence[str]) -> tuple:
    """`names` as a tuple, if each is a parameter of the kernel and none comes twice.

    Raises:
      ValueError: one is not, or does.
    """
    if isinstance(names, str):
        raise TypeError(f"{parameter}={names!r} must be a list of names; write [{names!r}]")
    found = tuple(names or ())
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ValueError(
            f"{parameter} must name parameters of the kernel, and {', '.join(map(repr, unknown))} "
            f"is none; it has {', '.join(known)}: correct the name or leave it out"
        )
    if len(set(found)) != len(found):
        raise ValueError(f"{parameter}={list(found)} must name each parameter once; drop the rest")
    return found


def key_value(name: str, value: Any) -> Value:
    """`value` as what JSON gives back: dtypes by name, Triton's constexpr unwrapped."""
    if value is OMITTED:
        return None
    if type(value).__name__ == "constexpr" and hasattr(value, "value"):
        value = value.value
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "__index__") and type(value) not in (int, bool):
        if not hasattr(value, "data_ptr"):  # an integer of another library, such as numpy's
            value = operator.index(value)
    check_value(name, value)
    return value


def conflicts(given: Mapping[str, Any] | Sequence[str], config_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if the call passes what the config gives."""
    twice = sorted(config_kwargs.keys() & set(given))
    if twice:
        raise ValueError(
            f"{', '.join(twice)} must be given once, and both the call and the config give "
            f"{'them' if len(twice) > 1 else 'it'} (config: "
            + ", ".join(f"{name}={config_kwargs[name]!r}" for name in twice)
            + "); leave tuned meta-parameters out of the call"
        )
