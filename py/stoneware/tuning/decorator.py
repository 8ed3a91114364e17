"""Tuning scopes as decorators: open while the body of a function runs.

The body of a generator or a coroutine runs in steps, from one `yield` or `await` to the next. The scope
is open during each step and closed between them, so the caller does not see it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

from stoneware.tuning.policy import Scope, Steps

Function = Callable[..., Any]

Decorated = TypeVar("Decorated", bound=Function)


class DecoratingScope(Scope):
    """A scope that is also a decorator, of every kind of function; each call has a scope of its own."""

    def __call__(self, function: Decorated) -> Decorated:
        wrapper: Decorated = decorated(function, lambda: Scope(*self.settings))
        return wrapper


def decorated(function: Any, make: Callable[[], Scope]) -> Any:
    """The function with its body in a scope.

    Args:
      function: plain, async, a generator or an async generator; a staticmethod or classmethod of one.
      make: makes the scope of a call.

    Raises:
      TypeError: `function` is a class, or cannot be called.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorated(function.__func__, make))
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"{function!r} must be a function to be decorated, not {type(function).__name__}; decorate its methods"
        )
    if inspect.isasyncgenfunction(function):
        wrap = _async_generator
    elif inspect.iscoroutinefunction(function):
        wrap = _coroutine
    elif inspect.isgeneratorfunction(function):
        wrap = _generator
    else:
        wrap = _plain
    return functools.wraps(function)(wrap(function, make))


def _plain(function: Function, make: Callable[[], Scope]) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with make():
            return function(*args, **kwargs)

    return call


def _generator(function: Function, make: Callable[[], Scope]) -> Function:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _in_steps(Steps(make()), function(*args, **kwargs)))

    return call


def _coroutine(function: Function, make: Callable[[], Scope]) -> Function:
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await _in_steps(Steps(make()), function(*args, **kwargs).__await__())

    return call


def _async_generator(function: Function, make: Callable[[], Scope]) -> Function:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps, generator = Steps(make()), function(*args, **kwargs)
        result = generator.asend(None)
        while True:
            try:
                item = await _in_steps(steps, result.__await__())
            except StopAsyncIteration:
                return
            try:
                value = yield item
            except BaseException as error:
                result = generator.athrow(error)
            else:
                result = generator.asend(value)

    return call


@types.coroutine
def _in_steps(steps: Steps, body: Any) -> Generator[Any, Any, Any]:
    """Runs a generator, or an iterator of an awaitable, to its end; what it yields goes to the caller."""
    resume = functools.partial(body.send, None)
    while True:
        try:
            with steps:
                item = resume()
        except StopIteration as stop:
            return stop.value
        finally:
            del resume  # it may hold an exception, whose traceback holds this frame
        try:
            value = yield item
        except BaseException as error:
            resume = functools.partial(body.throw, error)
        else:
            resume = functools.partial(body.send, value)
