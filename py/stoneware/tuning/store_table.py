"""The tables of the user's store: one per op, in files next to the store.

    samples.sqlite3            every sample, written as it is taken (store.py)
    samples.tables/<op>.table  what look-ups read, like a table of the wheel

A table has the number of the last row that it was baked from, and a digest of the tables and kernels of
the installation. A look-up takes the samples that were stored after that row as exact entries
(`unbaked.py`) and bakes nothing. If the folder has the time of the store, all is baked, and the store
is not opened. A table that is missing, damaged, of another store or of another installation is left
out: then all samples are exact entries.

The store is baked at the end of `stoneware tune` and `sw.tune`, and at the end of a process that stored
samples or found some that no table has, for example because a writer was killed. Nothing waits for it
there; a thread would slow down the calls of the program. Processes bake one after another. A damaged store is
renewed only by `stoneware tune`, `sw.tune` or the next sample: the end of a process that looked up leaves it.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.errors import StonewareError, TableError
from stoneware.kernels import manifest
from stoneware.kernels.key import is_kernel
from stoneware.runtime import regular_file
from stoneware.runtime.regular_file import Stamp, file_stamp
from stoneware.tuning import table_file
from stoneware.tuning.table import Table

if TYPE_CHECKING:  # what only samples need costs an import a third of its time
    from stoneware.tuning.store_file import Mark, Reading
    from stoneware.tuning.unbaked import Unbaked

REMEDY = "it is baked anew when this process ends"


_START: Mark = (0, "")
_MOST_OPEN = 64

_LOG = logging.getLogger("stoneware.tuning")
_warn_once = functools.cache(_LOG.warning)
_info_once = functools.cache(_LOG.info)


class _Open(NamedTuple):
    """What was read of a store and an op's table.

    Attributes:
      stamps: of the store, and of the table's file.
      baked: the table, if it may be used.
      unbaked: what was stored after it, if anything.
      last: the last row that `baked` and `unbaked` have.
    """

    stamps: tuple[Stamp, Stamp]
    baked: Table | None = None
    unbaked: Unbaked | None = None
    last: Mark = _START

    @property
    def tables(self) -> tuple[Table, ...]:
        newer = () if self.unbaked is None or not self.unbaked.table.devices else (self.unbaked.table,)
        return newer if self.baked is None else (*newer, self.baked)


_opened: dict[tuple[Path, str], _Open] = {}


def tables(store: Path, op: str) -> tuple[Table, ...]:
    """The tables that hold an op's samples of a store: of those that are not baked yet, and the baked one.

    Each may be missing. It takes two stats while neither file has changed.

    Args:
      store: the path of the store, which need not exist.
      op: an op of ours, or a decorated kernel as "module:function".

    Raises:
      TableError: this installation's kernels or tables are damaged.
    """
    path = table_path(store, op)
    # The stamps before the reading: what is written meanwhile is read the next time.
    stamps = file_stamp(store), file_stamp(path)
    opened = _opened.get((store, op))
    if opened is None or opened.stamps != stamps:
        # No lock, which a fork could leave held: of two threads that read the same samples both add them.
        opened = _read(store, op, path, stamps, opened)
        if len(_opened) >= _MOST_OPEN:
            _opened.clear()
        _opened[store, op] = opened
    return opened.tables


def forget() -> None:
    """Opens every table anew at the next look-up; for tests and benchmarks."""
    _opened.clear()


def table_path(store: Path, op: str) -> Path:
    return _folder(store) / f"{table_file.safe_name(op)}{table_file.SUFFIX}"


def _folder(store: Path) -> Path:
    """The folder of the tables. It has the time of the store of which every sample is baked."""
    return store.with_suffix(".tables")


def bake(store: Path, *, renews: bool = True) -> None:
    """Bakes the table of each op of which samples were stored since; other tables stay as they are.

    Args:
      store: the file of the store.
      renews: whether a damaged store is renewed first; otherwise nothing of it is baked.

    Raises:
      OSError: a table cannot be written; those before it are.
      StoreError: the store is damaged or of Stoneware 0.1, and cannot be written anew.
      TableError: this installation's kernels or tables are damaged.
    """
    if not store.exists():
        return
    from stoneware.tuning import store_file
    from stoneware.tuning.store import Store

    folder = _folder(store)
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # who waited finds little left to bake
        stamp, reading = file_stamp(store), store_file.read(store)
        if reading.damage:
            if not renews:
                return
            Store(store).renew()
            stamp, reading = file_stamp(store), store_file.read(store)
        _bake_all(store, reading)
        os.utime(folder, ns=(stamp[-1], stamp[-1]))
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the handle, too
        os.close(handle)


def _bake_all(store: Path, reading: Reading) -> None:
    from stoneware.tuning import store_file

    marks = {row.number: (row.number, store_file.digest(row.name, row.line)) for row in reading.rows}
    last_of_op = {row.name: row.number for row in reading.rows if row.line.startswith(b'{"key":')}
    for op, number in last_of_op.items():
        path, installation = table_path(store, op), _installation(op)
        baked, last = _usable(path, op, installation)
        if baked is None or last[0] < number or marks.get(last[0]) != last:
            _bake(store, op, reading, {"row": marks[reading.rows[-1].number], "installation": installation})


def _bake(store: Path, op: str, reading: Reading, basis: Mapping[str, Any]) -> None:
    from stoneware.tuning import entries, store_file

    path = table_path(store, op)
    samples, _ = store_file.decoded(store, reading, op)
    regular_file.write(path, entries.bake_here(op, samples, table_file.packaged(op), basis=basis))


def bake_user_store(*, renews: bool = True) -> None:
    """`bake`, of the user's store if there is one; what goes wrong is logged."""
    from stoneware.tuning.store import user_store

    try:
        store = user_store()
        if store is not None:
            bake(store.path, renews=renews)
    except (OSError, ValueError, StonewareError) as error:
        _warn_once("the tables of the user's store cannot be baked: %s; its samples are used without", error)


@functools.cache
def bake_at_exit() -> None:
    """Calls `bake_user_store` when this process ends, which leaves a damaged store as it is."""
    atexit.register(bake_user_store, renews=False)


def _read(store: Path, op: str, path: Path, stamps: tuple[Stamp, Stamp], before: _Open | None) -> _Open:
    if not stamps[0]:
        return _Open(stamps)
    unbaked = None
    if before is not None and before.stamps[1] == stamps[1]:
        _, baked, unbaked, last = before
    else:
        baked, last = _usable(path, op, _installation(op))
        if (baked is not None or not stamps[1]) and file_stamp(_folder(store))[-1:] == stamps[0][-1:]:
            return _Open(stamps, baked, None, last)
    from stoneware.tuning import store_file
    from stoneware.tuning.unbaked import Unbaked

    bake_at_exit()
    newer = store_file.newer(store, last, op, () if unbaked is None else unbaked.named)
    if newer is None:
        if baked is not None:
            _info_once("%s is not used: the store lacks the row with which it ends; %s", path, REMEDY)
        reading = store_file.read(store)
        baked, unbaked, newer = None, None, store_file.all_of(reading, op)
    if unbaked is None:
        unbaked = Unbaked(op, baked)
    if newer.samples:
        unbaked.add(newer.samples, newer.named)
    return _Open(stamps, baked, unbaked, newer.last)


def _usable(path: Path, op: str, installation: str) -> tuple[Table | None, Mark]:
    """The table of a file, and the last row that it has; nothing where it must be baked anew."""
    try:
        table = table_file.read(path, op, REMEDY)
        number, digest = table.basis["row"]
        if table.basis["installation"] == installation:
            return table, (int(number), str(digest))
        reason = f"{path} was baked with other tables or kernels of the installation; {REMEDY}"
    except TableError as error:
        reason = "" if isinstance(error.__cause__, FileNotFoundError) else str(error)
    except (LookupError, ValueError, TypeError) as error:
        reason = f"{path} is not the table of a store: {error}; {REMEDY}"
    if reason:
        _info_once("a table is not used: %s", reason)
    return None, _START


def _installation(op: str) -> str:
    """A digest of all that a table depends on besides the samples."""
    wheel = table_file.packaged(op)
    kernels = "" if is_kernel(op) else manifest.packaged().digest
    text = " ".join((str(table_file.SCHEMA), "" if wheel is None else wheel.digest, kernels))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
