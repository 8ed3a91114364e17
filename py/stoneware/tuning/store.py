"""The user's store: the samples taken on this machine, in one SQLite file.

What a row holds, and reading, is `store_file.py`.

`add` holds a lock on a file beside the database: any number of processes take turns, and none has
the database open while another replaces it. What was added is on the disk when `add` returns
(rollback journal, synchronous=EXTRA).

Of a damaged database, the rows that SQL reaches are read. The next `add` writes them to a new file,
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
from collections.abc import Iterable
from pathlib import Path

from stoneware.errors import StoreError
from stoneware.runtime import environment
from stoneware.tuning import store_file
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.store_file import Row

SUFFIX = ".sqlite3"
FILE_NAME = "samples" + SUFFIX

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

    def add(self, run: Run, samples: Iterable[Sample]) -> None:
        """Stores samples of a run, all or none; they are on the disk when this returns.

        The run is stored with them, once by its id; a later `add` replaces it. So is a sample that
        was stored before, of the same key, config, kernel_sha256 and run.

        Raises:
          ValueError: a sample is of another run.
          StoreError: the disk is full, the folder cannot be written, or a newer Stoneware wrote the
            file. Nothing that was stored is lost.
        """
        rows = [store_file.row_of_run(run)]
        for sample in samples:
            if sample.run != run.id:
                raise ValueError(f"run={sample.run!r} of a sample must be the run it is added with, {run.id!r}")
            rows.append(store_file.row_of_sample(run, sample))
        import sqlite3

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = store_file.checked(self.path)
            with store_file.turn(database):
                self._write(database, rows)
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
        return sorted({sample.op for _, sample in self.samples()})

    def problems(self) -> list[str]:
        """What reading skips or finds wrong with the files, each with its place."""
        return self.read()[1]

    def stamp(self) -> tuple[int, ...]:
        """A value that changes whenever the content may have; () without a store. It takes one stat."""
        try:
            status = os.stat(self.path)
        except OSError:  # absent, or not ours to see: reading tells
            return ()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, op: str | None = None) -> tuple[list[tuple[Run, Sample]], list[str]]:
        """`samples` and `problems` in one reading, and nothing is logged."""
        return store_file.decoded(store_file.read(self.path), op)

    def _write(self, database: str, rows: list[Row]) -> None:
        try:
            if _inode(database) != self._sound_inode:
                # Once per file: to write to a damaged database could overwrite what SQL still reads.
                self._renew_if_damaged(database)
            _insert(database, rows)
        except Exception as error:
            if not store_file.is_damage(error):
                raise
            self._renew_if_damaged(database, str(error))
            _insert(database, rows)
        self._sound_inode = _inode(database)
        _touch(database)

    def _renew_if_damaged(self, database: str, damage: str = "") -> None:
        """Puts a new database with the rows that can be read in the place of a damaged one."""
        reading = store_file.read(self.path, has_turn=True)
        damage = reading.damage or damage
        if not damage or reading.refusal:
            return
        folder = tempfile.mkdtemp(prefix=".samples-", dir=os.path.dirname(database))
        try:
            draft = os.path.join(folder, FILE_NAME)
            _insert(draft, [row for row, _ in reading.rows.values()])
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
            "%s: was damaged (%s); it is kept as %s, and %d rows are in a new file",
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


def _insert(database: str, rows: Iterable[Row]) -> None:
    """Stores the rows, all or none; without a commit, closing the connection undoes them."""
    with store_file.connected(database, "rwc") as connection:
        connection.execute("PRAGMA synchronous=EXTRA")
        connection.execute("BEGIN IMMEDIATE")
        if not store_file.has_table(connection):
            connection.execute(store_file.TABLE)
            connection.execute(f"PRAGMA user_version={store_file.LAYOUT}")
        connection.executemany(
            "INSERT INTO records (id, payload) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET payload = excluded.payload",
            [(row.id, row.payload) for row in rows],
        )
        connection.execute("COMMIT")


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
