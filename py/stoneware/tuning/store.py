"""The user's store: the samples taken on this machine, in one SQLite file.

Every row proves itself (`record.py`), so what is wrong with one costs no other. Reading is
`store_reader.py`.

Writing takes a lock on a file beside the database, for the whole of `add`: any number of processes
take turns, and none has the database open while another puts a new one in its place. A commit is
on the disk when `add` returns (write-ahead log, synchronous=FULL).

A damaged database is read as far as its bytes go. The next `add` writes what was read to a new
file, and keeps the damaged one:

    1. samples.sqlite3.new      is written under another name, then renamed: it is complete
    2. samples.sqlite3, -wal    are renamed to samples.sqlite3.damaged-N, ...-N-wal
    3. samples.sqlite3.new      is renamed to samples.sqlite3

Readers take .new in as well, so that a kill between any two steps loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.errors import StoreError
from stoneware.runtime import environment
from stoneware.runtime.regular_file import size_bytes
from stoneware.tuning import record as record_format, store_reader
from stoneware.tuning.record import Record
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.store_reader import LAYOUT, Files, Reading

if TYPE_CHECKING:
    import sqlite3

SUFFIX = ".sqlite3"
FILE_NAME = "samples" + SUFFIX

_WAIT_S = 60.0
"""How long an `add` waits for its turn: 16 processes at some 10 ms each, and a slow disk."""

_LOG = logging.getLogger("stoneware.tuning")
_REPORTED: set[str] = set()
_LOCK_OF_PROCESS: dict[int, threading.RLock] = {}


class Store:
    """Samples in a SQLite file, which is made at the first `add`.

    Attributes:
      path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._sound_inode = 0
        self._resolved: tuple[tuple[int, int], Files] | None = None

    def add(self, run: Run, samples: Iterable[Sample]) -> None:
        """Stores samples of a run, all or none; they are on the disk when this returns.

        The run is stored with them, once by its id; a later `add` replaces it. So is a sample that
        was stored before, of the same key, config, kernel_sha256 and run.

        Raises:
          ValueError: a sample is of another run.
          StoreError: the disk is full, the folder cannot be written, or a newer Stoneware wrote the
            file. Nothing that was stored is lost.
        """
        samples = list(samples)
        for sample in samples:
            if sample.run != run.id:
                raise ValueError(
                    f"run={sample.run!r} of a sample must be the run it is added with, {run.id!r}"
                )
        records = [record_format.of_run(run)]
        records += [record_format.of_sample(run, sample) for sample in samples]
        import sqlite3

        with _lock_of_process():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with _turn(self._files):
                    self._write(records)
            except (
                OSError, sqlite3.Error, store_reader.Damaged, MemoryError, UnicodeDecodeError
            ) as error:
                raise StoreError(
                    f"a sample is stored as it is taken, and {self.path} cannot be written: "
                    f"{error}; free space or make the folder writable, or set STONEWARE_CACHE_DIR "
                    "to a folder on a local disk that is; what was stored before is intact"
                ) from error

    def samples(self, op: str | None = None) -> list[tuple[Run, Sample]]:
        """Every sample, or those of an op, sorted; each with the run that took it.

        Never raises for what the files hold: what is skipped is logged, once in a process.
        """
        pairs, problems = self._decoded(op)
        for problem in problems:
            if problem not in _REPORTED:
                _REPORTED.add(problem)
                _LOG.warning("%s", problem)
        return pairs

    def ops(self) -> list[str]:
        """The ops that have samples, sorted."""
        return sorted({sample.op for _, sample in self.samples()})

    def problems(self) -> list[str]:
        """What is skipped in reading or wrong with the files, each with its place."""
        return self._decoded(None)[1]

    def stamp(self) -> tuple[int, ...]:
        """A value that changes when the content may have changed; () without a store.

        Cheap: no file is opened, and links are resolved anew only when the path leads to another
        file than before, since that takes longer than the rest.
        """
        try:
            status = os.stat(self.path)
        except OSError:  # there may be other files beside it
            return self._files.stamp()
        file, resolved = (status.st_dev, status.st_ino), self._resolved
        if resolved is None or resolved[0] != file:
            resolved = self._resolved = file, self._files
        return resolved[1].stamp()

    @property
    def _files(self) -> Files:
        return Files.at(self.path)

    def _decoded(self, op: str | None) -> tuple[list[tuple[Run, Sample]], list[str]]:
        with _lock_of_process():
            reading = store_reader.read(self._files)
        return store_reader.decoded(reading, op)

    def _write(self, records: list[Record]) -> None:
        files = self._files
        leftover: list[Record] = []
        for file in (files.wal, files.shm):
            size_bytes(file)  # raises where SQLite would wait for ever, at a pipe
        is_unknown = not self._sound_inode or _inode(files.database) != self._sound_inode
        if is_unknown or not size_bytes(files.database) or size_bytes(files.new):
            # Once per file: an `add` to a damaged database would overwrite what can be salvaged,
            # and SQLite overwrites the end of a -wal that it does not take.
            leftover = self._mended(files)
        try:
            self._insert(files, leftover + records)
        except Exception as error:
            if not store_reader.is_damage(error):
                raise
            reading = store_reader.read(files, has_turn=True, is_suspect=True)
            reading.damage = reading.damage or str(error)
            self._renew(files, reading)
            self._insert(files, records)
        self._sound_inode = _inode(files.database)
        _touch(files.database)

    def _mended(self, files: Files) -> list[Record]:
        """Renews a damaged database; of a sound one, returns what it does not list."""
        reading = store_reader.read(files, has_turn=True)
        if reading.refusal:
            raise self._refused(reading.refusal)
        if reading.damage:
            self._renew(files, reading)
            return []
        return [reading.records[id][0] for id in reading.unlisted]

    def _insert(self, files: Files, records: list[Record]) -> None:
        with contextlib.closing(self._open(files)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                _upsert(connection, records)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _open(self, files: Files) -> sqlite3.Connection:
        import sqlite3

        is_new_file = not size_bytes(files.database)
        connection = sqlite3.connect(files.database, timeout=_WAIT_S, isolation_level=None)
        try:
            store_reader.prepared(connection)
            try:
                has_tables = store_reader.has_tables(connection)
            except store_reader.Refused as error:
                raise self._refused(str(error)) from error
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            if not has_tables:
                _create_tables(connection)
            if is_new_file:
                _sync_folder(files.database)
            return connection
        except BaseException:
            connection.close()
            raise

    def _renew(self, files: Files, reading: Reading) -> None:
        """Puts a new database with the records of `reading` in the place of the damaged one."""
        import sqlite3

        draft = files.new + "-draft"
        for file in (draft, draft + "-journal"):
            _remove(file)  # of a renewal that was interrupted; its sources are all still there
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            store_reader.prepared(connection)
            connection.execute("PRAGMA synchronous=FULL")
            _create_tables(connection)
            connection.execute("BEGIN")
            _upsert(connection, [reading.records[id][0] for id in sorted(reading.records)])
            connection.execute("COMMIT")
        os.replace(draft, files.new)
        aside = _free_name(files.database)
        for file, name in ((files.database, aside), (files.wal, aside + "-wal")):
            with contextlib.suppress(FileNotFoundError):
                os.rename(file, name)
        _remove(files.shm)  # an index of the -wal, which SQLite makes anew
        os.rename(files.new, files.database)
        _sync_folder(files.database)
        _LOG.warning(
            "%s: was damaged (%s); it is kept as %s, and %d records are in a new file",
            self.path, reading.damage, aside, len(reading.records),
        )

    def _refused(self, reason: str) -> StoreError:
        return StoreError(
            f"a store is written only by a version that knows its layout; {self.path}: {reason}; "
            "upgrade stoneware, or set STONEWARE_CACHE_DIR to another folder; nothing was changed"
        )


def user_store() -> Store | None:
    """The user's store, in STONEWARE_CACHE_DIR or under the home; None without a home.

    Raises:
      ValueError: STONEWARE_CACHE_DIR is not absolute.
    """
    folder = environment.tuning_folder()
    return None if folder is None else store_in(folder)


@functools.cache
def store_in(folder: str) -> Store:
    """The store in a folder: one object, which then checks that the file is sound once in a
    process."""
    return Store(Path(folder, FILE_NAME))


@contextlib.contextmanager
def _turn(files: Files) -> Iterator[None]:
    """Waits for the lock on the file beside the database, and holds it."""
    handle = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(
                        errno.EAGAIN, f"another process has held its lock for {_WAIT_S:g} s",
                        files.lock,
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def _lock_of_process() -> threading.RLock:
    """One per process, and another in a fork, where the thread that held it is gone.

    Closing a file that was read drops the locks that another thread's connection has on it
    (https://www.sqlite.org/howtocorrupt.html, section 2.2), so a process does one thing at a time.
    """
    return _LOCK_OF_PROCESS.setdefault(os.getpid(), threading.RLock())


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, payload TEXT)")
    connection.execute(f"PRAGMA user_version={LAYOUT}")
    connection.execute("COMMIT")


def _upsert(connection: sqlite3.Connection, records: Iterable[Record]) -> None:
    for record in records:
        row = connection.execute(
            "SELECT payload FROM records WHERE id = ?", (record.id,)
        ).fetchone()
        if row:
            with contextlib.suppress(ValueError):  # the row was edited: this takes its place
                before = record_format.unpack(row[0])
                if before.body == record.body:
                    continue
                record = replace(record, revision=max(before.revision + 1, record.revision))
        connection.execute(
            "INSERT OR REPLACE INTO records (id, payload) VALUES (?, ?)",
            (record.id, record.payload.decode("ascii")),
        )


def _inode(file: str) -> int:
    try:
        return os.stat(file).st_ino
    except FileNotFoundError:
        return 0


def _free_name(database: str) -> str:
    number = 1
    while any(os.path.lexists(f"{database}.damaged-{number}{end}") for end in ("", "-wal")):
        number += 1
    return f"{database}.damaged-{number}"


def _remove(file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(file)


def _sync_folder(file: str) -> None:
    handle = os.open(os.path.dirname(file), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _touch(file: str) -> None:
    """Gives a file this very moment as its time: the file system's own clock ticks too slowly for
    `stamp` to tell two writes apart."""
    now = time.time_ns()
    with contextlib.suppress(PermissionError):  # another user's file, in a shared folder
        os.utime(file, ns=(now, now))
