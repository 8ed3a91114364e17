"""The signature of a decorated kernel: the value that a launch gives each parameter, and the key from them.

`kernel[grid](*args, **kwargs)` may pass a parameter by position, by keyword, by its default, or not
at all, if the config has it. The key is the same for all of these.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoneware.kernels.key import KernelKey, Value, check_value


@dataclass(frozen=True, eq=False, kw_only=True)
class Form:
    """A form of launches: the number of values by position, and the keywords.

    Attributes:
      names: of each value, in order: positional ones, then keywords.
      options: those of the names that are no parameters of the kernel, such as "maxnreg".
      defaults: of the parameters that a launch does not pass, where they have one.
      is_valued: for each value, whether a plan depends on this very value and not just on its kind:
        key arguments, constants and options.
      plans: of launches of this form, by the kinds of the values.
    """

    names: tuple[str, ...]
    options: tuple[str, ...]
    defaults: dict[str, Any]
    is_valued: tuple[bool, ...]
    plans: dict[Any, Any] = field(default_factory=dict)

    def parameters(self, values: Sequence[Any]) -> dict[str, Any]:
        """The value of each parameter that is passed, or has a default."""
        parameters = dict(zip(self.names, values))
        for name in self.options:
            del parameters[name]
        parameters.update(self.defaults)
        return parameters


class Launch(NamedTuple):
    """One launch as the user wrote it: its form, its values in that order, the grid and all arguments."""

    form: Form
    values: Sequence[Any]
    grid: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def named_args(self) -> dict[str, Any]:
        """The positional arguments by name."""
        return dict(zip(self.form.names, self.args))

    @property
    def run_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of Triton's `run`."""
        return {**self.kwargs, "grid": self.grid, "warmup": False}

    def arguments(self, config: Any) -> dict[str, Any]:
        """All arguments by name, with those of the triton.Config: what hooks see."""
        return {**self.named_args, **self.run_kwargs, **config.all_kwargs()}


class KernelSignature:
    """The parameters of a kernel, and which of them are key arguments.

    Attributes:
      names: the parameters, in order.
      key_names: the key arguments, in the order of the decorator's `key`.
      key_idx: their positions in the signature.

    Raises:
      ValueError: `key` names something that is not a parameter, or names one twice.
    """

    def __init__(self, signature: inspect.Signature, key: Sequence[str], constants: Sequence[str] = ()) -> None:
        self.names = tuple(signature.parameters)
        self.key_names = check_names("key", key, self.names)
        self.key_idx = tuple(self.names.index(name) for name in self.key_names)
        # Up to Triton 3.6 keyword-only parameters can be passed by position too; later ones follow
        # Python's rule, as this does. To Triton *args is one parameter, a tuple.
        self._num_positional = sum(
            parameter.kind is not parameter.KEYWORD_ONLY for parameter in signature.parameters.values()
        )
        self._valued = {*self.key_names, *constants}
        self._defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    def form(self, num_positional: int, keywords: Sequence[str]) -> Form:
        """The form of launches with `num_positional` positional arguments and these keywords.

        Raises:
          TypeError: too many positional arguments, or a parameter is passed twice.
        """
        if num_positional > self._num_positional:
            raise TypeError(
                f"a call passes {num_positional} arguments by position and must pass at most "
                f"{self._num_positional}, of ({', '.join(self.names)}); pass options by keyword"
            )
        by_position = self.names[:num_positional]
        for name in keywords:
            if name in by_position:
                raise TypeError(
                    f"{name} is passed by position and by keyword and must be passed once; drop the keyword"
                )
        names = (*by_position, *keywords)
        options = tuple(name for name in keywords if name not in self.names)
        return Form(
            names=names,
            options=options,
            defaults={name: value for name, value in self._defaults.items() if name not in names},
            is_valued=tuple(name in self._valued or name in options for name in names),
        )

    def key(self, op: str, parameters: Mapping[str, Any]) -> KernelKey:
        """The key of a launch.

        Args:
          op: the kernel's name.
          parameters: from Form.parameters. A key argument that is missing there counts as None.

        Raises:
          TypeError, ValueError: a key argument has a value that cannot be part of a key.
        """
        return KernelKey(
            op=op,
            names=self.key_names,
            values=tuple(key_value(name, parameters.get(name)) for name in self.key_names),
            dtypes=tuple(
                (name, str(parameters[name].dtype).removeprefix("torch."))
                for name in self.names
                if hasattr(parameters.get(name), "dtype")
            ),
        )


def check_names(parameter: str, names: Sequence[str] | None, parameters: Sequence[str]) -> tuple:
    """`names` as a tuple, if each is among the kernel's `parameters` and none comes twice.

    Raises:
      TypeError: `names` is a str.
      ValueError: a name is unknown, or comes twice.
    """
    if isinstance(names, str):
        raise TypeError(f"{parameter}={names!r} must be a list of names; write [{names!r}]")
    names = tuple(names or ())
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ValueError(
            f"{parameter} must name parameters of the kernel, and {', '.join(map(repr, unknown))} "
            f"is none; it has {', '.join(parameters)}: correct the name or leave it out"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{parameter}={list(names)} must name each parameter once; drop the rest")
    return names


def plain(value: Any) -> Any:
    """The value of a tl.constexpr; any other value is returned unchanged."""
    return value.value if type(value).__name__ == "constexpr" and hasattr(value, "value") else value


def key_value(name: str, value: Any) -> Value:
    """`value` after a round trip through JSON: dtypes by name, the value of Triton's constexpr."""
    value = plain(value)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    # Integers of other libraries, such as numpy's; a tensor with one element is not meant.
    is_integer = hasattr(value, "__index__") and not hasattr(value, "data_ptr")
    if is_integer and type(value) not in (int, bool):
        value = operator.index(value)
    check_value(name, value)
    return value


def check_passed_once(names: Sequence[str], config_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if a launch passes what the config has too."""
    twice = sorted(config_kwargs.keys() & set(names))
    if twice:
        raise ValueError(
            f"{', '.join(twice)} must be given once, and both the call and the config give "
            f"{'them' if len(twice) > 1 else 'it'} (config: "
            + ", ".join(f"{name}={config_kwargs[name]!r}" for name in twice)
            + "); leave tuned meta-parameters out of the call"
        )
