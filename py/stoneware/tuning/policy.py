"""What holds here and now: the mode of tuning, an overlay, samples in memory, and the epoch.

A miss is a problem on a GPU whose config comes from anything but a current measurement at that
very shape, dtype and device, or from the caller.

The state is in context variables: it holds for the code inside a `with sw.tuning(...)`, in that thread
and task alone. Another thread, such as the one in which autograd runs a backward on a GPU, has the
mode of STONEWARE_TUNING.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from stoneware.runtime import environment
from stoneware.runtime.fast_dataclass import dataclass

if TYPE_CHECKING:
    from stoneware.tuning.samples import Run, Sample
    from stoneware.tuning.table import Table

Function = TypeVar("Function", bound=Callable[..., Any])

_LOG = logging.getLogger("stoneware.tuning")


@dataclass(frozen=True, eq=False)
class State:
    """The settings of all open scopes together; equal settings are the same object.

    Attributes:
      mode: one of MODES; None leaves it to STONEWARE_TUNING.
      overlay: op -> its table, for the ops that the overlay has.
      is_batch_invariant: whether a row's bits may not depend on the batch; None leaves it to
        STONEWARE_BATCH_INVARIANT.
    """

    mode: str | None = None
    overlay: dict[str, Table] = field(default_factory=dict)
    is_batch_invariant: bool | None = None


_STATE: ContextVar[State | None] = ContextVar("stoneware_tuning", default=None)
state = _STATE.get
"""The State inside a `with sw.tuning(...)`, else None: what a plan depends on beside its call, and a
part of the key of every plan cache."""

_SCOPES: ContextVar[tuple[Scope, ...]] = ContextVar("stoneware_tuning_scopes", default=())
"""The open scopes, from the outermost to the innermost; `_STATE` holds their settings."""

_MOST_STATES = 16
"""Of several overlays: those that were used last keep their plans, and their tables in memory."""

_epochs = itertools.count(1)

EPOCH = [0]
"""The epoch: a number that changes whenever plans must be made anew, and never comes back. In a list,
so that a native call reads it without running Python. It is part of the key of every plan, so nobody
is told to forget plans, and no lock is needed."""

_is_wheel_only = False
_memory: list[tuple[Run, Sample]] = []


class Scope:
    """A `with sw.tuning(...)` or `with sw.batch_invariant()`; also a decorator, of every kind of function.

    Scopes need not be left in the reverse order: generators that are advanced in turns leave theirs
    as they end.

    Args:
      mode, tables, batch_invariant: what it sets: the mode, op -> table of the overlay, and batch
        invariance. None leaves the setting of the scope around it.
    """

    def __init__(
        self, mode: str | None = None, tables: dict[str, Table] | None = None, batch_invariant: bool | None = None
    ) -> None:
        self.settings = mode, tables, batch_invariant
        self.is_open = False

    def __enter__(self) -> None:
        if self.is_open:
            raise RuntimeError(
                "this scope is open already, and a scope can be open only once; call sw.tuning or "
                "sw.batch_invariant for each `with`"
            )
        self.is_open = True
        _replace(add=(self,))

    def __exit__(self, *exception: object) -> None:
        self.is_open = False
        _replace(remove=(self,))

    def __call__(self, function: Function) -> Function:
        """The function, each of whose calls has a scope of these settings."""
        from stoneware.tuning.decorator import decorated

        decorated_function: Function = decorated(function, lambda: Scope(*self.settings))
        return decorated_function


class Steps:
    """The steps of a generator or a coroutine: `with steps:` opens the scope for one of them.

    Between steps the scopes that the body itself opened are closed with it.
    """

    def __init__(self, scope: Scope) -> None:
        scope.is_open = True
        self._scope = scope
        self._scopes: tuple[Scope, ...] = (scope,)

    def __enter__(self) -> None:
        _replace(add=tuple(scope for scope in self._scopes if scope.is_open))

    def __exit__(self, *exception: object) -> None:
        scopes = _SCOPES.get()
        self._scopes = scopes[scopes.index(self._scope) :]
        _replace(remove=self._scopes)


def _replace(*, remove: tuple[Scope, ...] = (), add: tuple[Scope, ...] = ()) -> None:
    """Removes scopes wherever they are, and adds others as the innermost."""
    scopes = (*(scope for scope in _SCOPES.get() if scope not in remove), *add)
    _SCOPES.set(scopes)
    _STATE.set(_merged(scopes))


def _merged(scopes: Iterable[Scope]) -> State | None:
    """The settings of nested scopes, the innermost last; None without scopes."""
    settings = [scope.settings for scope in scopes]
    if not settings:
        return None
    mode, tables, batch_invariant = (_last(values) for values in zip(*settings))
    return _interned(mode, batch_invariant, *sorted((tables or {}).items()))


def _last(values: Sequence[Any]) -> Any:
    """The last value that is not None; None if there is none."""
    return next((value for value in reversed(values) if value is not None), None)


@functools.lru_cache(maxsize=_MOST_STATES)
def _interned(mode: str | None, batch_invariant: bool | None, *tables: tuple[str, Table]) -> State:
    """The one State of these values: plans made in an earlier `with` of the same kind are found."""
    if _interned.cache_info().currsize == _MOST_STATES:
        forget_plans()  # one is dropped for this one, and its plans would hold its tables
    return State(mode, dict(tables), batch_invariant)


def is_batch_invariant() -> bool:
    """Whether a row's bits may not depend on the batch here: as the innermost `with` says, else
    STONEWARE_BATCH_INVARIANT."""
    found = _STATE.get()
    if found is None or found.is_batch_invariant is None:
        return environment.batch_invariant()
    return found.is_batch_invariant


def current_mode() -> str:
    """The mode that holds here: of the innermost `with`, else of STONEWARE_TUNING; not "on_miss" in
    a process that uses the wheel alone, where the samples would be left alone too."""
    found = _STATE.get()
    mode = environment.tuning_mode() if found is None or found.mode is None else found.mode
    return "off" if _is_wheel_only and mode == "on_miss" else mode


def current_overlay() -> State | None:
    """The State whose overlay holds here; None if there is none."""
    found = _STATE.get()
    return found if found is not None and found.overlay and not _is_wheel_only else None


def wheel_only() -> bool:
    """Whether this process uses the tables of the wheel alone, because its ranks differ."""
    return _is_wheel_only


def use_wheel_only() -> None:
    """From now on the overlay, the user's store and downstream packages are left alone in this
    process; plans are made anew."""
    global _is_wheel_only
    _is_wheel_only = True
    forget_plans()


def keep(run: Run, samples: Sequence[Sample]) -> None:
    """Puts samples into the user's store, or where it cannot be written into memory, and says so.

    Either way plans are made anew, since those of mode off may have lacked just these. Without
    samples only the run is written, as at its end.
    """
    from stoneware.errors import StoreError
    from stoneware.tuning.store import user_store

    try:
        store = user_store()
        if store is None:
            raise StoreError("the user's store needs a folder, and there is no home for one; set STONEWARE_CACHE_DIR")
        store.add(run, samples)
    except StoreError as error:
        if samples:
            _say_not_stored(str(error))
            add_to_memory(run, samples)
        return
    if samples:
        forget_plans()


@functools.cache
def _say_not_stored(reason: str) -> None:
    _LOG.warning("timings are kept in memory and not in the user's store: %s", reason)


def add_to_memory(run: Run, samples: Iterable[Sample]) -> None:
    """Keeps samples for this process alone, where the user's store cannot be written."""
    _memory.extend((run, sample) for sample in samples)
    forget_plans()


def memory(op: str | None = None) -> list[tuple[Run, Sample]]:
    """The samples of an op, or all, that `add_to_memory` got."""
    return [item for item in _memory if op is None or item[1].op == op]


def forget_plans() -> None:
    """Makes every later call decide anew; called when this process got new samples."""
    EPOCH[0] = next(_epochs)


def is_capturing() -> bool:
    """Whether torch's current stream is capturing a CUDA graph."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
