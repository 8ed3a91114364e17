"""dataclass: like dataclasses.dataclass(frozen=True), but without generated code.

The standard one writes and compiles six methods for each class, which takes 0.5 to 1 ms. A first
call of an op imports two dozen such classes, and more than half of that import was spent on them.
Here the methods are closures; `dataclasses.fields`, `replace` and `asdict` accept the classes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know the standard one
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        *, frozen: bool, kw_only: bool = False, eq: bool = True, order: bool = False
    ) -> Callable[[type], type]:
        """Makes a class a frozen dataclass; the parameters are those of dataclasses.dataclass."""
        if not frozen:
            raise ValueError("frozen=False must be True here; take dataclasses.dataclass instead")
        return functools.partial(_made, kw_only=kw_only, eq=eq, order=order)


def field_names(cls: Any) -> tuple[str, ...]:
    """The names of the fields of a class of `dataclass`."""
    return tuple(cls.__dataclass_fields__)


def _made(cls: Any, *, kw_only: bool, eq: bool, order: bool) -> Any:
    fields: dict[str, Any] = dict(getattr(cls, "__dataclass_fields__", {}))
    for name, type in inspect.get_annotations(cls).items():
        if "ClassVar" in type:
            continue
        value = cls.__dict__.get(name, dataclasses.MISSING)
        field: Any = value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value)
        # The standard decorator sets this as well.
        field.name, field.type, field.kw_only, field._field_type = name, type, kw_only, _FIELD
        fields[name] = field
        if field.default is not dataclasses.MISSING:
            setattr(cls, name, field.default)
        elif value is field:
            delattr(cls, name)
    cls.__dataclass_fields__, cls.__dataclass_params__ = fields, _Parameters
    cls.__init__ = _init(cls, fields, () if kw_only else tuple(fields))
    cls.__setattr__ = _refuse("assign to")
    cls.__delattr__ = _refuse("delete")
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = lambda self: "{}({})".format(
            cls.__qualname__, ", ".join(f"{name}={getattr(self, name)!r}" for name in fields)
        )
    values = operator.attrgetter(*fields)
    if eq:
        cls.__eq__ = _compare(operator.eq, values)
        cls.__hash__ = lambda self: hash(values(self))
    if order:
        for name in ("lt", "le", "gt", "ge"):
            setattr(cls, f"__{name}__", _compare(getattr(operator, name), values))
    return cls


_FIELD: Any = vars(dataclasses)["_FIELD"]
"""Marks an entry of `__dataclass_fields__` as a field, not a ClassVar or an InitVar."""


class _Parameters:
    """`__dataclass_params__`; the standard decorator reads `frozen` of the bases."""

    frozen = True


def _init(cls: type, fields: Mapping[str, Any], positional: Sequence[str]) -> Callable[..., Any]:
    missing = dataclasses.MISSING
    defaults = {name: field.default for name, field in fields.items() if field.default is not missing}
    factories = {name: field.default_factory for name, field in fields.items() if field.default_factory is not missing}
    names = set(fields)
    required = names - defaults.keys() - factories.keys()
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, *arguments: Any, **values: Any) -> None:
        first = dict(zip(positional, arguments))
        if len(first) != len(arguments) or first.keys() & values.keys() or not required <= {*first, *values} <= names:
            raise TypeError(
                f"{cls.__qualname__} takes {', '.join(fields)}, each once, of which "
                f"{', '.join(sorted(required)) or 'none'} must be given, and the first {len(positional)} may "
                f"be positional; found {len(arguments)} positional ones and {', '.join(values)}"
            )
        own = self.__dict__  # bypasses __setattr__
        own.update(defaults)
        own.update((name, make()) for name, make in factories.items())
        own.update(first)
        own.update(values)
        if finish is not None:
            finish(self)

    return __init__


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(self: Any, name: str, *value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot {what} field {name!r}")

    return refuse


def _compare(operation: Callable[[Any, Any], bool], values: Callable[[Any], Any]) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        if type(self) is not type(other):
            return NotImplemented
        return operation(values(self), values(other))

    return compare
