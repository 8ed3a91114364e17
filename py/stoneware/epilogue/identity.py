"""What tells one epilogue from another, its code and the values that it reads; and whether it takes the inputs."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

from stoneware.errors import quoted


def identity(function: Callable[..., Any]) -> Any:
    """A key of the function. The key of a Python function has its code and what this reads in closures, defaults
    and globals, so that a lambda in a loop is one function, and another one when a number that it reads has changed."""
    if type(function) is not types.FunctionType:
        return function
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += function.__defaults__ or ()
    values += (function.__kwdefaults__ or {}).values()
    globals_ = function.__globals__
    values += [globals_.get(name) for name in _names(function.__code__)]
    key = function.__code__, tuple((type(value), value) for value in values)
    try:
        hash(key)
    except TypeError:  # a list, for example, which may change in place
        return function, tuple((type(value), value) for value in values if _is_hashable(value))
    return key


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the values of the key: a cell or a global that changes later does not change it."""
    if type(function) is not types.FunctionType:
        return function
    closure = function.__closure__ and tuple(types.CellType(cell.cell_contents) for cell in function.__closure__)
    globals_ = function.__globals__
    names = ("__builtins__", "__name__", *_names(function.__code__))
    values = {name: globals_[name] for name in names if name in globals_}
    copy = types.FunctionType(function.__code__, values, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return copy


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
