"""The user's store: the samples taken on this machine, in one SQLite file.

What a row holds, and reading, is `store_file.py`.

`add` holds a lock on a file next to the database: any number of processes take turns, and none has
the database open while another replaces it. What was added is on the disk when `add` returns
(rollback journal, synchronous=EXTRA).

If the database is damaged, the rows that SQL reaches are read. The next `add` writes them to a new file,
links the damaged one to samples.sqlite3.damaged-1 (or -2, ...), and then replaces it. A kill between
any two steps loses nothing, and nothing is ever deleted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.errors import StoreError
from stoneware.runtime import environment
from stoneware.runtime.regular_file import file_stamp
from stoneware.tuning import store_file
from stoneware.tuning.samples import Line, Run, Sample, line_of_run, lines_of
from stoneware.tuning.store_file import Row

if TYPE_CHECKING:
    import sqlite3

SUFFIX = ".sqlite3"
FILE_NAME = environment.STORE_NAME

_REPEAT_AFTER = 100
"""Rows after which a candidate and a run are stored once more, so that a page that is lost costs few samples."""

_LOG = logging.getLogger("stoneware.tuning")
_warn_once = functools.cache(_LOG.warning)


class Store:
    """Samples in a SQLite file, which is made at the first `add`.

    Attributes:
      path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._sound_inode = 0
        self._number_of: dict[str, int] = {}

    def add(self, run: Run, samples: Iterable[Sample]) -> None:
        """Stores samples of a run, all or none; they are on the disk when this returns.

        The run is stored with them; by its id the last that was added counts. So does a sample that was
        stored before, of the same key, config, kernel_sha256 and run.

        Raises:
          ValueError: a sample is of another run.
          StoreError: the disk is full, the folder cannot be written, or a newer Stoneware wrote the
            file. Nothing that was stored is lost.
        """
        samples = list(samples)
        if other := next((sample.run for sample in samples if sample.run != run.id), ""):
            raise ValueError(f"run={other!r} of a sample must be the run it is added with, {run.id!r}")
        lines = [line_of_run(run), *lines_of(samples)]
        self._in_turn(lambda database: self._write(database, lines))

    def renew(self) -> None:
        """Replaces a database that is damaged, or that Stoneware 0.1 wrote, like `add` does.

        Raises:
          StoreError: like `add`.
        """
        self._in_turn(self._renew_if_damaged)

    def _in_turn(self, write: Callable[[str], None]) -> None:
        import sqlite3

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = store_file.checked(self.path)
            with store_file.turn(database):
                write(database)
        except store_file.Refused as error:
            raise StoreError(
                f"a store is written only by a version that knows its layout; {self.path}: "
                f"{error}; upgrade stoneware, or set STONEWARE_CACHE_DIR to another folder; "
                "nothing was changed"
            ) from error
        except (OSError, MemoryError, sqlite3.Error, store_file.Damaged, UnicodeDecodeError) as error:
            raise StoreError(
                f"every sample is stored as it is taken, and {self.path} cannot be written: "
                f"{error}; free space or make the folder writable, or set STONEWARE_CACHE_DIR "
                "to a folder on a local disk that is; what was stored before is intact"
            ) from error

    def samples(self, op: str | None = None) -> list[tuple[Run, Sample]]:
        """Every sample, or those of an op, sorted; each with the run that took it.

        Never raises for what the files hold: what is skipped is logged, once in a process.
        """
        pairs, problems = self.read(op)
        for problem in problems:
            _warn_once("%s", problem)
        return pairs

    def ops(self) -> list[str]:
        """The ops that have samples, sorted."""
        return sorted({row.name for row in store_file.read(self.path).rows if row.line.startswith(b'{"key":')})

    def problems(self) -> list[str]:
        """What reading skips or finds wrong with the files, each with its place."""
        return self.read()[1]

    def stamp(self) -> tuple[int, ...]:
        """A value that changes whenever the content may have; () without a store. It takes one stat."""
        return file_stamp(self.path)

    def read(self, op: str | None = None) -> tuple[list[tuple[Run, Sample]], list[str]]:
        """`samples` and `problems` in one reading, and nothing is logged."""
        return store_file.decoded(self.path, store_file.read(self.path), op)

    def _write(self, database: str, lines: Sequence[Line]) -> None:
        try:
            if _inode(database) != self._sound_inode:
                # Once per file: to write to a damaged database could overwrite what SQL still reads.
                self._renew_if_damaged(database)
            self._insert(database, lines)
        except Exception as error:
            if not store_file.is_damage(error):
                raise
            self._renew_if_damaged(database, str(error))
            self._insert(database, lines)
        self._sound_inode = _inode(database)
        _touch(database)

    def _insert(self, database: str, lines: Sequence[Line]) -> None:
        """Stores the lines, all or none; candidates and runs again only if the rows that have them are far away."""
        with _writing(database) as connection:
            last, _ = store_file.last_mark(connection)
            lines = [
                line
                for line in lines
                if line.is_of_samples or last - self._number_of.get(line.text, -_REPEAT_AFTER) >= _REPEAT_AFTER
            ]
            rows = [Row(number, line.name, line.text.encode()) for number, line in enumerate(lines, start=last + 1)]
            _store(connection, rows)
        self._number_of.update((line.text, row.number) for line, row in zip(lines, rows) if not line.is_of_samples)

    def _renew_if_damaged(self, database: str, damage: str = "") -> None:
        """Replaces a damaged database by a new one with the rows that can be read."""
        reading = store_file.read(self.path, has_turn=True)
        self._number_of = {row.line.decode(): row.number for row in reading.rows if not row.line.startswith(b'{"key":')}
        damage = reading.damage or damage
        if not damage or reading.refusal:
            return
        folder = tempfile.mkdtemp(prefix=".samples-", dir=os.path.dirname(database))
        try:
            draft = os.path.join(folder, FILE_NAME)
            with _writing(draft) as connection:
                _store(connection, reading.rows)
            names = (f"{database}.damaged-{number}" for number in itertools.count(1))
            aside = next(name for name in names if not os.path.lexists(name))
            os.link(database, aside)
            for end in store_file.BESIDE:  # otherwise SQLite would take them for those of the new one
                with contextlib.suppress(FileNotFoundError):
                    os.rename(database + end, aside + end)
            os.replace(draft, database)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _LOG.warning(
            "%s: was written anew (%s); the old file is kept as %s, and %d rows are in the new one",
            self.path,
            damage,
            aside,
            len(reading.rows),
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
    """The store in a folder; one object, so that a process checks the file once."""
    return Store(Path(folder, FILE_NAME))


@contextlib.contextmanager
def _writing(database: str) -> Iterator[sqlite3.Connection]:
    """A transaction; without a commit, closing the connection undoes it."""
    with store_file.connected(database, "rwc") as connection:
        connection.execute("PRAGMA synchronous=EXTRA")
        connection.execute("BEGIN IMMEDIATE")
        if not store_file.has_table(connection):
            for statement in store_file.SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={store_file.LAYOUT}")
        yield connection
        connection.execute("COMMIT")


def _store(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    connection.executemany(
        "INSERT INTO lines (number, name, digest, line) VALUES (?, ?, ?, ?)",
        [(row.number, row.name, store_file.digest(row.name, row.line), row.line.decode()) for row in rows],
    )


def _inode(file: str) -> int:
    try:
        return os.stat(file).st_ino
    except FileNotFoundError:
        return 0


def _touch(file: str) -> None:
    """Sets a file's time to now: the file system's own clock is too coarse for `stamp`."""
    now = time.time_ns()
    with contextlib.suppress(PermissionError):  # another user's file, in a shared folder
        os.utime(file, ns=(now, now))
