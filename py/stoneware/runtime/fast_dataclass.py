"""dataclass: as dataclasses.dataclass(frozen=True), made without generating code.

The standard one writes and compiles six methods for each class, which takes 0.5 to 1 ms. A first
call of an op imports two dozen such classes, and more than half of that import was spent on them.
Here the methods are closures, and the standard fields are made when somebody asks for them:
`dataclasses.fields`, `replace` and `asdict` take the classes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers know the standard one
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        *, frozen: bool, kw_only: bool = False, eq: bool = True, order: bool = False
    ) -> Callable[[type], type]:
        """Makes a class a frozen dataclass; parameters as those of dataclasses.dataclass."""
        if not frozen:
            raise ValueError("frozen=False must be True here; take dataclasses.dataclass instead")
        return functools.partial(_made, kw_only=kw_only, eq=eq, order=order)


def field_names(cls: Any) -> tuple[str, ...]:
    """The names of the fields of a class of `dataclass`, as dataclasses.fields has them, at once."""
    return tuple(cls._field_values[2])


def _made(cls: Any, *, kw_only: bool, eq: bool, order: bool) -> Any:
    defaults, factories, names = _inherited(cls)
    own = [name for name, type in inspect.get_annotations(cls).items() if "ClassVar" not in type]
    as_written = {name: cls.__dict__[name] for name in own if name in cls.__dict__}
    names += [name for name in own if name not in names]
    for name, value in as_written.items():
        if isinstance(value, dataclasses.Field):
            delattr(cls, name)
            if value.default_factory is not dataclasses.MISSING:
                factories[name] = value.default_factory
            value = value.default
        if value is not dataclasses.MISSING:
            defaults[name] = value
            setattr(cls, name, value)
    cls._field_values = defaults, factories, names
    cls.__dataclass_fields__ = _Fields(own, as_written, kw_only)
    cls.__dataclass_params__ = _Parameters
    cls.__init__ = _init(cls, defaults, factories, names, () if kw_only else names)
    cls.__setattr__ = _refuse("assign to")
    cls.__delattr__ = _refuse("delete")
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = lambda self: "{}({})".format(
            cls.__qualname__, ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        )
    values = operator.attrgetter(*names)
    if eq:
        cls.__eq__ = _compare(operator.eq, values)
        cls.__hash__ = lambda self: hash(values(self))
    if order:
        for name in ("lt", "le", "gt", "ge"):
            setattr(cls, f"__{name}__", _compare(getattr(operator, name), values))
    return cls


def _inherited(cls: Any) -> tuple[dict[str, Any], dict[str, Callable[[], Any]], list[str]]:
    """Defaults, default factories and names of the fields of the bases."""
    defaults, factories, names = getattr(cls, "_field_values", ({}, {}, []))
    return dict(defaults), dict(factories), list(names)


class _Parameters:
    """`__dataclass_params__`, of which the standard decorator reads this of a base."""

    frozen = True


class _Fields:
    """`__dataclass_fields__`, which `dataclasses.fields` and its like read: made when it is read, by
    the standard decorator, which takes as long as the rest of an import."""

    def __init__(self, names: list[str], as_written: dict[str, Any], kw_only: bool) -> None:
        self._names, self._as_written, self._kw_only = names, as_written, kw_only

    def __get__(self, instance: object, owner: Any) -> Any:
        place = next(cls for cls in owner.__mro__ if cls.__dict__.get("__dataclass_fields__") is self)
        annotations = {name: place.__annotations__[name] for name in self._names}
        shadow: Any = type(place.__name__, place.__bases__, {"__annotations__": annotations, **self._as_written})
        shadow = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=self._kw_only, frozen=True)(shadow)
        place.__dataclass_fields__ = shadow.__dataclass_fields__
        return place.__dataclass_fields__


def _init(
    cls: type,
    defaults: dict[str, Any],
    factories: dict[str, Callable[[], Any]],
    names: list[str],
    positional: Sequence[str],
) -> Callable[..., Any]:
    known = set(names)
    required = known - defaults.keys() - factories.keys()
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, *arguments: Any, **values: Any) -> None:
        given = dict(zip(positional, arguments))
        if len(given) != len(arguments) or given.keys() & values.keys() or not required <= {*given, *values} <= known:
            raise TypeError(
                f"{cls.__qualname__} takes {', '.join(names)}, each once, of which "
                f"{', '.join(sorted(required)) or 'none'} must be given, and the first {len(positional)} may "
                f"be positional; found {len(arguments)} positional ones and {', '.join(values)}"
            )
        own = self.__dict__  # past __setattr__
        own.update(defaults)
        own.update((name, make()) for name, make in factories.items())
        own.update(given)
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
