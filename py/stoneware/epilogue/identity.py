"""What tells one epilogue from another, its code and the values that it reads; and whether it takes the inputs."""

from __future__ import annotations

import functools
import inspect
import itertools
import numbers
import types
from collections.abc import Callable
from typing import Any

import torch

from stoneware.errors import quoted

_OPAQUE = "torch", "stoneware"
"""Packages whose functions are their own keys: they read much, and nothing of it changes."""


def identity(function: Callable[..., Any]) -> Any:
    """A key of the function. The key of a Python function has its code and what this reads in closures, defaults
    and globals, so that a lambda in a loop is one function, and another one when a number that it reads has changed.
    A function that it reads is part of the key in the same way."""
    return _key(function, {})


def _key(value: Any, keys: dict[types.FunctionType, Any]) -> Any:
    """What tells a value from others. Numbers, strings and torch's dtypes have keys of their values, tuples those of
    their elements. Another object is its own key, since an equal one may hold other values. `keys` has the functions
    that are known."""
    if type(value) is tuple:
        return tuple((type(one), _key(one, keys)) for one in value)
    if isinstance(value, numbers.Number):
        return repr(value)  # tells -0.0 from 0.0, and nan is nan
    if type(value) is types.MethodType:
        return _key(value.__func__, keys), _Same(value.__self__)
    if not _has_key(value):
        return value if type(value) in _VALUES or not _is_hashable(value) else _Same(value)
    if value in keys:
        return keys[value]
    keys[value] = value  # for a function that reads itself
    globals_ = value.__globals__
    read = [
        *map(_contents, value.__closure__ or ()),
        *(value.__defaults__ or ()),
        *(value.__kwdefaults__ or {}).values(),
        *(globals_.get(name) for name in _names(value.__code__)),
    ]
    parts = [(type(one), _key(one, keys)) for one in read]
    key: Any = value.__code__, tuple(parts)
    if not _is_hashable(key):  # a list, for example, which may change in place
        key = value, tuple(part for part in parts if _is_hashable(part))
    keys[value] = key
    return key


_VALUES = (str, bytes, torch.dtype, torch.device, torch.Size)
"""Types whose equal objects are alike."""


class _Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the values of the key: a cell or a global that changes later does not change it."""
    return _copy(function, {})


def _copy(value: Any, copies: dict[types.FunctionType, types.FunctionType]) -> Any:
    """A value itself, or a copy of a function. `copies` has those that are made."""
    if not _has_key(value):
        return value
    if value in copies:
        return copies[value]
    read = value.__globals__
    globals_ = {name: read[name] for name in ("__builtins__", "__name__") if name in read}
    closure = value.__closure__ and tuple(types.CellType() for _ in value.__closure__)
    copy = types.FunctionType(value.__code__, globals_, value.__name__, closure=closure)
    copies[value] = copy
    globals_ |= {name: _copy(read[name], copies) for name in _names(value.__code__) if name in read}
    for cell, original in zip(closure or (), value.__closure__ or ()):
        contents = _contents(original)
        if contents is not _EMPTY:
            cell.cell_contents = _copy(contents, copies)
    copy.__defaults__ = value.__defaults__ and tuple(_copy(one, copies) for one in value.__defaults__)
    copy.__kwdefaults__ = value.__kwdefaults__ and {
        name: _copy(one, copies) for name, one in value.__kwdefaults__.items()
    }
    copy.__dict__.update(value.__dict__)
    return copy


def _has_key(value: Any) -> bool:
    return type(value) is types.FunctionType and (value.__module__ or "").partition(".")[0] not in _OPAQUE


_EMPTY = object()
"""The contents of a cell whose variable has no value yet."""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_function(function: Any, num_inputs: int) -> None:
    """Raises TypeError unless it is a function that takes the sums and this number of inputs."""
    if not callable(function):
        raise TypeError(
            f"epilogue={quoted(function)} must be a function of the sums and the inputs, not "
            f"{type(function).__name__}; pass for example epilogue=torch.relu"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C, whose parameters nothing lists
        return
    try:
        signature.bind(None, *[None] * num_inputs)
    except TypeError as error:
        raise TypeError(
            f"epilogue{signature} must take the sums and as many inputs as inputs= has tensors, {num_inputs}: "
            f"{error}; pass one tensor in inputs= for each parameter after the first"
        ) from error


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code reads, with those of inner functions; attributes are among them."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*code.co_names, *itertools.chain.from_iterable(map(_names, inner)))
