"""What holds here and now: the mode of tuning, an overlay, samples in memory, and the epoch.

A miss is a problem on a GPU whose config comes from anything but a current measurement at that
very shape, dtype and device, or from the caller.

The state is in context variables: it holds for the code inside a `with sw.tuning(...)`, in that thread
and task alone. Another thread has the mode of STONEWARE_TUNING. Backward is an exception, see `run_in`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING, Any

from stoneware.runtime import environment
from stoneware.runtime.fast_dataclass import dataclass

if TYPE_CHECKING:
    from stoneware.tuning.samples import Run, Sample
    from stoneware.tuning.table import Table

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
"""The State inside a `with sw.tuning(...)`, else None: what a plan depends on in addition to its call, and a
part of the key of every plan cache."""

_SCOPES: ContextVar[tuple[Scope, ...]] = ContextVar("stoneware_tuning_scopes", default=())
"""The open scopes, from the outermost to the innermost; `_STATE` holds their settings."""

_TLS_KEY = "stoneware_tuning_scopes"

_torch_c: Any = None
"""torch._C, once a scope was opened after the import of torch."""

_MOST_STATES = 16
"""Overlays whose plans and tables stay in memory: those that were used last."""

_epochs = itertools.count(1)

EPOCH = [0]
"""The epoch: a number that changes whenever plans must be made anew, and never comes back. In a list,
so that a native call reads it without running Python. It is part of the key of every plan, so nobody
is told to forget plans, and no lock is needed."""

_is_wheel_only = False
_memory: list[tuple[Run, Sample]] = []


class Scope:
    """A `with sw.tuning(...)` or `with sw.batch_invariant()`.

    Scopes need not be left in the reverse order: interleaved generators leave theirs as
    they end.

    Args:
      mode, tables, batch_invariant: what it sets: the mode, op -> table of the overlay, and batch
        invariance. None leaves the setting of the scope around it.
    """

    def __init__(
        self, mode: str | None = None, tables: dict[str, Table] | None = None, batch_invariant: bool | None = None
    ) -> None:
        self.settings = mode, tables, batch_invariant
        self.is_open = False
        self.thread = 0

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
    scopes = tuple([scope for scope in _SCOPES.get() if scope not in remove]) + add
    _SCOPES.set(scopes)
    _STATE.set(_merged(scopes))
    for scope in add:
        scope.thread = threading.get_ident()
    global _torch_c
    if _torch_c is None:
        _torch_c = getattr(sys.modules.get("torch"), "_C", None)
        if _torch_c is not None:
            forget_plans()  # some were made because `has_had_scopes()` was False
    if _torch_c is not None:
        scopes = tuple([scope for scope in _thread_scopes() if scope.is_open and scope not in remove])
        _stash(scopes + add)


class _ThreadScopes(threading.local):
    """A list of each thread with its scopes, which torch copies to the threads of autograd."""

    def __init__(self) -> None:
        self.scopes: list[tuple[Scope, ...]] = [()]


_LOCAL = _ThreadScopes()


def _stash(scopes: tuple[Scope, ...]) -> None:
    import ctypes

    holder = _LOCAL.scopes
    holder[0] = scopes
    # torch 2.11 does not count the reference that it takes, but releases it later; 2.13 counts. A thread has one
    # object as long as the process lives, so that a reference too many costs no memory.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))
    _torch_c._stash_obj_in_tls(_TLS_KEY, holder)


def has_had_scopes() -> bool:
    """Whether a scope was ever opened in this process, after the import of torch."""
    return _torch_c is not None


def _thread_scopes() -> tuple[Scope, ...]:
    """The scopes of this thread; in a thread of autograd, of the one that called backward(), which torch
    copies (at::ThreadLocalState). Some may be closed since."""
    if _torch_c is None or not _torch_c._is_key_in_tls(_TLS_KEY):
        return ()
    scopes: tuple[Scope, ...] = _torch_c._get_obj_in_tls(_TLS_KEY)[0]
    return scopes


def run_in(state: State | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in the state of an earlier call, as its backward must run.

    The settings of `state` come first, then those that hold here. In a thread of autograd, those hold
    here that hold where backward() was called. Batch invariance holds if either has it. Without any
    scope this is the call alone.

    Args:
      state: `policy.state()` at the call whose backward this is; None adds nothing.
      function: called with the arguments; its result is returned.
    """
    if state is None and _torch_c is None:  # no scope was ever opened
        return function(*arguments)
    here = around = _STATE.get()
    if here is None and (scopes := _thread_scopes()):
        around = _state_of_backward_caller(scopes)
    if around is here and (state is None or state is here):
        return function(*arguments)
    states = [each for each in (around, state) if each is not None]
    invariance = [each.is_batch_invariant for each in states]
    with Scope(
        _last([each.mode for each in states]),
        _last([each.overlay or None for each in states]),
        any(invariance) or _last(invariance),
    ):
        return function(*arguments)


def _state_of_backward_caller(scopes: tuple[Scope, ...]) -> State | None:
    """The state where backward() was called, in a thread of autograd; None in other threads, whose own
    context has their open scopes.

    Args:
      scopes: `_thread_scopes()`.
    """
    this_thread = threading.get_ident()
    return _merged(scope for scope in scopes if scope.is_open and scope.thread != this_thread)


def _merged(scopes: Iterable[Scope]) -> State | None:
    """The settings of nested scopes, the innermost last; None without scopes."""
    settings = [scope.settings for scope in scopes]
    if not settings:
        return None
    mode, tables, batch_invariant = (_last(values) for values in zip(*settings))
    return _interned(mode, batch_invariant, *sorted((tables or {}).items()))


def _last(values: Sequence[Any]) -> Any:
    """The last value that is not None, else None."""
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
    current = _STATE.get()
    if current is None or current.is_batch_invariant is None:
        return environment.batch_invariant()
    return current.is_batch_invariant


def current_mode() -> str:
    """The mode that holds here: of the innermost `with`, else of STONEWARE_TUNING; not "on_miss" in
    a process that uses the wheel alone, where the samples would be left alone too."""
    current = _STATE.get()
    mode = environment.tuning_mode() if current is None or current.mode is None else current.mode
    return "off" if _is_wheel_only and mode == "on_miss" else mode


def current_overlay() -> State | None:
    """The State whose overlay holds here; None if no overlay holds."""
    current = _STATE.get()
    return current if current is not None and current.overlay and not _is_wheel_only else None


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
    from stoneware.tuning import store_table
    from stoneware.tuning.store import user_store

    try:
        store = user_store()
        if store is None:
            raise StoreError(
                "the user's store needs a folder, and this user has no home folder; set STONEWARE_CACHE_DIR"
            )
        store.add(run, samples)
        store_table.bake_at_exit()
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
