"""What holds here and now: the mode of tuning, an overlay, samples in memory, and the epoch.

A miss is a problem on a GPU whose config comes from anything but a current measurement at that
very shape, dtype and device, or from the caller.

The state is a context variable: it holds for the code inside a `with sw.tuning(...)`, in that thread
and task alone. Another thread, such as the one in which autograd runs a backward on a GPU, has the
mode of STONEWARE_TUNING.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import field
from typing import TYPE_CHECKING

from stoneware.runtime import environment
from stoneware.runtime.fast_dataclass import dataclass

if TYPE_CHECKING:
    from stoneware.tuning.samples import Run, Sample
    from stoneware.tuning.table import Table

_LOG = logging.getLogger("stoneware.tuning")


@dataclass(frozen=True, eq=False)
class State:
    """What one `with sw.tuning(...)` asks for; the same asked for again is the same object.

    Attributes:
      mode: one of MODES.
      overlay: op -> its table, for the ops that the overlay has.
      is_batch_invariant: whether a row's bits may not depend on the batch.
    """

    mode: str
    overlay: dict[str, Table] = field(default_factory=dict)
    is_batch_invariant: bool = False


_STATE: ContextVar[State | None] = ContextVar("stoneware_tuning", default=None)
state = _STATE.get
"""The State inside a `with sw.tuning(...)`, else None: what a plan depends on beside its call, and a
part of the key of every plan cache."""

_MOST_STATES = 16
"""Of several overlays: those that were used last keep their plans, and their tables in memory."""

_epochs = itertools.count(1)

EPOCH = [0]
"""The epoch: a number that changes whenever plans must be made anew, and never comes back. In a list,
so that a native call reads it without running Python. It is part of the key of every plan, so nobody
is told to forget plans, and no lock is needed."""

_is_wheel_only = False
_memory: list[tuple[Run, Sample]] = []


@contextlib.contextmanager
def entered(
    mode: str | None = None, tables: dict[str, Table] | None = None, batch_invariant: bool | None = None
) -> Iterator[None]:
    """Makes a mode, an overlay and batch invariance hold inside the `with`; what is None stays as it
    is around it."""
    around = _STATE.get()
    if tables is None:
        tables = dict(around.overlay) if around is not None else {}
    if mode is None:
        mode = environment.tuning_mode() if around is None else around.mode
    if batch_invariant is None:
        batch_invariant = is_batch_invariant()
    token = _STATE.set(_interned(mode, batch_invariant, *sorted(tables.items())))
    try:
        yield
    finally:
        _STATE.reset(token)


@functools.lru_cache(maxsize=_MOST_STATES)
def _interned(mode: str, batch_invariant: bool, *tables: tuple[str, Table]) -> State:
    """The one State of these values: plans made in an earlier `with` of the same kind are found."""
    if _interned.cache_info().currsize == _MOST_STATES:
        forget_plans()  # one is dropped for this one, and its plans would hold its tables
    return State(mode, dict(tables), batch_invariant)


def is_batch_invariant() -> bool:
    """Whether a row's bits may not depend on the batch here: as the innermost `with` says, else
    STONEWARE_BATCH_INVARIANT."""
    found = _STATE.get()
    return environment.batch_invariant() if found is None else found.is_batch_invariant


def current_mode() -> str:
    """The mode that holds here: of the innermost `with`, else of STONEWARE_TUNING; not "on_miss" in
    a process that uses the wheel alone, where the samples would be left alone too."""
    found = _STATE.get()
    mode = environment.tuning_mode() if found is None else found.mode
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
