"""The SQLite file of the user's store: its rows, and reading all of them that are sound.

Every row proves itself, so a bad one costs no other. It has an id and a payload, one text:

    <digest> <kind> <schema> <body>

`kind` is run or sample, or what a newer version adds; `schema` is SCHEMA of the writer.
`body` is canonical JSON, ASCII: a run, or a run without its command and on the next line a sample
that it took, so that no sample depends on another row. `id` is a digest of what is the same when
the row is stored again. `digest` covers the id and the rest, so a row that was edited, cut or moved
is recognised.

Reading changes no file and makes none beside the store.

No connection may be carried across a fork (https://sqlite.org/howtocorrupt.html, 2.6). The child would
inherit SQLite's record of the locks that the process holds, but not the locks, so it would find the
database locked for as long as it lives. So a lock of this process is held from opening a connection to
closing it, and os.fork waits for this lock. A fork by C code that runs no hooks of Python does not wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.runtime.canonical import canonical_json, printable
from stoneware.runtime.regular_file import size_bytes
from stoneware.tuning.samples import PARSE_ERRORS, Run, Sample

if TYPE_CHECKING:
    import sqlite3

SCHEMA = 2
"""Of a row's body."""

LAYOUT = 2
"""PRAGMA user_version, for the table of the database; the rows have a `schema` of their own."""

TABLE = "CREATE TABLE records (id TEXT PRIMARY KEY, payload TEXT)"

_OURS = {(b"records", TABLE.encode()), (b"sqlite_autoindex_records_1", None)}
"""All that sqlite_master may list; a trigger, for example, could undo what is written."""

BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite keeps beside a database; the store has the first while it is written."""

WAIT_S = 60.0
"""How long a writer waits for its turn; enough for 16 processes and a slow disk."""

READER_WAIT_S = 5.0

_MOST_ROWS_PER_PAGE, _MOST_ROWS_OF_DAMAGED = 10, 1_000_000
"""A row is longer than 400 bytes, and a page has 4096. The second bounds the time."""

_LONGEST_ROW_BYTES = 64 << 20

_IN_SQLITE = threading.RLock()
"""Held by the thread that has a connection or the store's lock file open, and by one that forks."""

_REMEDY = "move away what is in its place, or set STONEWARE_CACHE_DIR to another folder"


class Row(NamedTuple):
    """One row, as it is stored."""

    id: str
    payload: str


class Refused(Exception):
    """This version must not write to the database."""


class Damaged(Exception):
    """The database is ours, but not as it was written."""


@dataclass
class Reading:
    """What is in a database.

    Attributes:
      rows: by id; each with its place.
      problems: what was skipped or is wrong, each with its place.
      damage: why the database must be made anew; empty if it need not be.
      refusal: why this version must not write to it; empty if it may.
    """

    rows: dict[str, tuple[Row, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    damage: str = ""
    refusal: str = ""


def row_of_run(run: Run) -> Row:
    return _row("run", run.id, canonical_json(run.to_json()))


def row_of_sample(run: Run, sample: Sample) -> Row:
    identity = [sample.key.to_json(), sample.config.to_json(), sample.kernel_sha256, sample.run]
    # A command that names a thousand shapes would be most of the row.
    bodies = replace(run, command="").to_json(), sample.to_json()
    return _row("sample", identity, "\n".join(map(canonical_json, bodies)))


def read(path: Path, *, has_turn: bool = False) -> Reading:
    """Reads a database, or the rows of a damaged one that SQL reaches; never raises for its content.

    Args:
      path: of the database.
      has_turn: this process holds the lock: SQLite may undo in place what a killed writer left half
        done.
    """
    reading = Reading()
    try:
        database = checked(path)
        if size_bytes(database):
            _read(path, database, has_turn, reading)
    except OSError as error:
        reading.problems.append(f"{path}: cannot be read: {error}; {_REMEDY}")
    if reading.refusal:
        reading.problems.append(f"{path}: {reading.refusal}")
    if reading.damage:
        reading.damage = printable(reading.damage)  # it may name what somebody planted
        reading.problems.append(
            f"{path}: damaged: {reading.damage}; {len(reading.rows)} rows were read "
            "nevertheless; the next measurement keeps it aside and writes them to a new one"
        )
    return reading


def decoded(reading: Reading, op: str | None) -> tuple[list[tuple[Run, Sample]], list[str]]:
    """The samples of `op`, or all, sorted, each with its run; and every problem."""
    problems = list(dict.fromkeys(reading.problems))
    runs: dict[str, Run] = {}
    best: dict[str, tuple[bool, str]] = {}
    samples: list[Sample] = []
    for row, place in reading.rows.values():
        _, kind, schema, body = row.payload.split(" ", 3)
        if schema != str(SCHEMA):
            problems.append(f"{place}: skipped and kept: it has schema {schema}, and this stoneware reads {SCHEMA}")
        elif kind not in ("run", "sample"):
            problems.append(f"{place}: skipped and kept: kind {kind!r} is not known")
        # To search the text takes far less time than to parse it.
        elif kind == "run" or op is None or f'"op":{canonical_json(op)}' in body:
            text, _, sample_text = body.partition("\n")
            try:
                if text not in runs:
                    runs[text] = Run.from_json(json.loads(text))
                if kind == "sample":
                    samples.append(Sample.from_json(json.loads(sample_text)))
            except PARSE_ERRORS as error:
                problems.append(f"{place}: skipped: {error}")
                continue
            # A run's own row has its command and its end. If that is lost, one of its samples' rows does.
            id = runs[text].id
            best[id] = max(best.get(id, (False, "")), (kind == "run", text))
    pairs = [(runs[best[sample.run][1]], sample) for sample in samples if op is None or sample.op == op]
    # By text last: keys such as 1 and True compare equal, and their order must not be by chance.
    pairs.sort(key=lambda pair: (pair[1].sort_key, pair[1].text))
    return pairs, problems


@contextlib.contextmanager
def connected(database: str, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection that distrusts the file, closed at the end; `mode` is SQLite's: ro, rw or rwc."""
    import sqlite3

    with (
        _alone_in_process(),
        contextlib.closing(
            sqlite3.connect(
                f"{Path(database).as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=READER_WAIT_S if mode == "ro" else WAIT_S,
            )
        ) as connection,
    ):
        connection.text_factory = bytes  # bad UTF-8 in one row must not fail the others
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_ROW_BYTES)
        connection.execute("PRAGMA trusted_schema=OFF")
        yield connection


def has_table(connection: sqlite3.Connection) -> bool:
    """Whether the table is there; an empty database is fine, too.

    Raises:
      Refused: a newer version wrote the database, or another program.
      Damaged: it is ours, but not as it was written.
    """
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    found = _schema(connection)
    names = ", ".join(sorted({printable(name.decode("utf-8", "replace")) for name, _ in found}))
    if layout > LAYOUT:
        raise Refused(f"layout {layout} is of a newer stoneware, this one knows {LAYOUT}")
    if layout == 0 and not found:
        return False
    if layout == 0 and not any(name == b"records" for name, _ in found):
        raise Refused(f"it is a database of something else, with {names}")
    if layout != LAYOUT or found != _OURS:
        raise Damaged(f"layout {layout} with {names or 'no table'} is not what stoneware writes")
    return True


def is_damage(error: Exception) -> bool:
    """Whether an error is about the content of the file, not about disk or locks."""
    import sqlite3

    # SQLITE_CORRUPT and SQLITE_NOTADB are of the base class; DataError is a row that is too long.
    # A message can quote a damaged table's name, which Python then fails to decode.
    return type(error) is sqlite3.DatabaseError or isinstance(
        error, (sqlite3.IntegrityError, sqlite3.DataError, Damaged, UnicodeDecodeError)
    )


def checked(path: Path) -> str:
    """The path of the database without links; SQLite keeps its other files beside it.

    Raises:
      OSError: it is not a file, or beside it is a pipe, at which SQLite would wait for ever.
    """
    database = os.path.realpath(path)
    for end in ("", *BESIDE):
        size_bytes(database + end)
    return database


@contextlib.contextmanager
def _alone_in_process() -> Iterator[None]:
    """No other thread of this process uses SQLite or forks inside the `with`."""
    _register_fork_hooks()
    with _IN_SQLITE:
        yield


@functools.cache
def _register_fork_hooks() -> None:
    """Makes os.fork take the lock, from the first use of a store on, since importing has no side effects.

    Two threads may both register the hooks. The lock counts, so taking it twice is harmless.
    """
    os.register_at_fork(
        before=_IN_SQLITE.acquire, after_in_parent=_IN_SQLITE.release, after_in_child=_IN_SQLITE.release
    )


@contextlib.contextmanager
def turn(database: str, is_reader: bool = False) -> Iterator[None]:
    """Waits for the lock on the file beside the database, and holds it; readers share it.

    Other threads of this process may use SQLite and fork while this one waits, but not while it holds
    the lock.

    Raises:
      OSError: the file cannot be made, or another process holds its lock for too long.
    """
    name = f"{database}.lock"
    if is_reader and not os.path.exists(name):
        yield
        return
    flags, operation, wait_s = (
        (os.O_RDONLY, fcntl.LOCK_SH, READER_WAIT_S) if is_reader else (os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, WAIT_S)
    )
    deadline = time.monotonic() + wait_s
    while True:
        with _alone_in_process():
            # Opened anew for each try: a child that is forked between two tries must not share the handle.
            handle = os.open(name, flags | os.O_CLOEXEC, 0o666)
            try:
                if _is_locked_now(handle, operation):
                    yield
                    return
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked in this very thread has the handle, too
                os.close(handle)
        if time.monotonic() > deadline:
            raise OSError(errno.EAGAIN, f"another process has held its lock for {wait_s:g} s", name)
        time.sleep(0.005)


def _is_locked_now(handle: int, operation: int) -> bool:
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path, database: str, has_turn: bool, reading: Reading) -> None:
    import sqlite3

    try:
        try:
            _select(path, database, "rw" if has_turn else "ro", reading)
        except sqlite3.OperationalError:
            if has_turn or not os.path.exists(f"{database}-journal"):
                raise
            # A writer was killed, or is at work for longer than we wait.
            with turn(database, is_reader=True), tempfile.TemporaryDirectory() as folder:
                copy = os.path.join(folder, "copy")
                shutil.copyfile(database, copy)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{database}-journal", f"{copy}-journal")
                _select(path, copy, "rw", reading)
    except (MemoryError, sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            reading.damage = str(error)
        else:
            reading.problems.append(f"{path}: cannot be read: {error}; {_REMEDY}")


def _select(path: Path, database: str, mode: str, reading: Reading) -> None:
    with connected(database, mode) as connection:
        connection.execute("BEGIN")
        try:
            has_table(connection)
        except Refused as error:
            reading.refusal = str(error)
        except Damaged as error:
            reading.damage = str(error)
        if (b"records", TABLE.encode()) not in _schema(connection):
            return
        for rowid, id, payload in _cells(connection, reading):
            place = f"{path}: row {rowid}"
            try:
                row = _proved(id, payload)
                reading.rows[row.id] = row, place
            except ValueError as error:
                reading.problems.append(f"{place}: skipped: {error}")
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != b"ok":
            reading.damage = found.decode("utf-8", "replace")


def _cells(connection: sqlite3.Connection, reading: Reading) -> Iterator[tuple[int, object, object]]:
    """(rowid, id, payload) of each row; of a damaged table, those that SQL finds by rowid."""
    select = "SELECT rowid, id, payload FROM records"
    try:
        yield from connection.execute(select)
    except Exception as error:
        if not is_damage(error):
            raise
        import sqlite3

        reading.damage = str(error)
        num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
        # The rows are numbered from 1, without gaps.
        for rowid in range(1, min(num_pages * _MOST_ROWS_PER_PAGE, _MOST_ROWS_OF_DAMAGED)):
            with contextlib.suppress(sqlite3.Error):
                yield from connection.execute(f"{select} WHERE rowid = ?", (rowid,))


def _schema(connection: sqlite3.Connection) -> set[tuple[bytes, bytes | None]]:
    return set(connection.execute("SELECT name, sql FROM sqlite_master"))


def _proved(id: object, payload: object) -> Row:
    """The row with these cells (text comes as bytes); ValueError if it was changed."""
    if not isinstance(id, bytes) or not isinstance(payload, bytes):
        raise ValueError(f"id and payload must be text, found {id!r:.40} and {payload!r:.40}")
    row = Row(id.decode("ascii", "replace"), payload.decode("ascii", "replace"))
    digest, _, rest = row.payload.partition(" ")
    if _digest(f"{row.id} {rest}") != digest or rest.count(" ") < 2:
        raise ValueError(f"its digest does not match, it was edited or damaged: {payload[:80]!r}")
    return row


def _row(kind: str, identity: Any, body: str) -> Row:
    # The schema is part of the id, so that a row of another version is never replaced.
    id = _digest(canonical_json([kind, SCHEMA, identity]))
    rest = f"{kind} {SCHEMA} {body}"
    return Row(id, f"{_digest(f'{id} {rest}')} {rest}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
