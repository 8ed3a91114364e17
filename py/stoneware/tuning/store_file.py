"""The SQLite file of a store: reading the rows that are sound, and the locks of readers and writers.

A row is a line of samples.py with a name, by which lines are found, and a digest of both, so that a row
that was edited or cut is recognised and costs no other. Rows are numbered in the order in which they
were stored, and none is changed or deleted: if a sample is stored again, the later row counts.

Reading changes no file and makes none next to the store.

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
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stoneware.kernels.config import config_from_json
from stoneware.kernels.key import key_from_json
from stoneware.runtime.canonical import printable
from stoneware.runtime.regular_file import size_bytes
from stoneware.tuning.samples import PARSE_ERRORS, Run, Sample, decode, line_of_run, lines_of

if TYPE_CHECKING:
    import sqlite3

LAYOUT = 3
"""PRAGMA user_version."""

SCHEMA = (
    "CREATE TABLE lines (number INTEGER PRIMARY KEY, name TEXT, digest TEXT, line TEXT)",
    "CREATE INDEX names ON lines (name)",
)
_OURS = {(b"lines", SCHEMA[0].encode()), (b"names", SCHEMA[1].encode())}
"""All that sqlite_master may list; a trigger, for example, could undo what is written."""

_LAYOUT_2 = "CREATE TABLE records (id TEXT PRIMARY KEY, payload TEXT)"
_OF_LAYOUT_2 = {(b"records", _LAYOUT_2.encode()), (b"sqlite_autoindex_records_1", None)}

BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite keeps next to a database; the store has the first while it is written."""

WAIT_S = 60.0
"""How long a writer waits for its turn; enough for 16 processes and a slow disk."""

READER_WAIT_S = 5.0

_MOST_ROWS_PER_PAGE, _MOST_ROWS_OF_DAMAGED = 40, 1_000_000
"""A row is longer than 100 bytes, and a page has 4096. The second bounds the time."""

_LONGEST_ROW_BYTES = 64 << 20

_IN_SQLITE = threading.RLock()
"""Held by the thread that has a connection or the store's lock file open, and by one that forks."""

_REMEDY = "move away what is in its place, or set STONEWARE_CACHE_DIR to another folder"


Mark = tuple[int, str]
"""Number and digest of a row. A database with such a row has the rows before it, too: none is ever changed."""

START: Mark = (0, "")
"""Stands before the first row."""


class Row(NamedTuple):
    """One row that is sound."""

    number: int
    name: str
    line: bytes


class Refused(Exception):
    """This version must not write to the database."""


class Damaged(Exception):
    """The database is ours, but not as this version writes it."""


@dataclass
class Reading:
    """What is in a database.

    Attributes:
      rows: in the order of their numbers.
      problems: what was skipped or is wrong, each with its place.
      damage: why the database must be written anew; empty if it need not be.
      refusal: why this version must not write to it; empty if it may.
    """

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damage: str = ""
    refusal: str = ""


def digest(name: str, line: str | bytes) -> str:
    """What a row proves itself by."""
    text = line if isinstance(line, bytes) else line.encode()
    return hashlib.sha256(name.encode() + b" " + text).hexdigest()[:16]


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
            f"{path}: must be written anew: {reading.damage}; {len(reading.rows)} rows were read; "
            "if it is your store, the next measurement keeps it aside and writes them to a new one"
        )
    return reading


def decoded(path: Path, reading: Reading, op: str | None) -> tuple[list[tuple[Run, Sample]], list[str]]:
    """The samples of `op`, or all, sorted, each with its run; and every problem."""
    problems = list(dict.fromkeys(reading.problems))
    rows = [row for row in reading.rows if op is None or row.name == op or not row.line.startswith(b'{"key":')]
    content = decode(path, ((row.number, row.line) for row in rows), problems, before_number=": row ")
    # The last one counts where a sample was stored again.
    latest = {sample.identity: (number, sample) for number, sample in content.samples}
    pairs = []
    lacking: dict[str, list[int]] = {}
    for _, (number, sample) in sorted(latest.items()):
        if op is not None and sample.op != op:
            continue
        if sample.run in content.runs:
            pairs.append((content.runs[sample.run], sample))
        else:
            lacking.setdefault(sample.run, []).append(number)
    for run, numbers in lacking.items():
        problems.append(f"{path}: row {numbers[0]}: skipped and kept: no row has run {run!r} of {len(numbers)} samples")
    return pairs, problems


class Newer(NamedTuple):
    """What `newer` finds: the lines of samples, the lines that these refer to by name, and the last row's mark."""

    samples: list[bytes]
    named: dict[str, bytes]
    last: Mark


def newer(path: Path, last: Mark, op: str, named: Container[str] = ()) -> Newer | None:
    """The samples of an op that were stored after a row. It takes as long as these rows are many, whatever else
    the store has.

    Args:
      path: of the database.
      last: of that row; START for all rows.
      op: whose.
      named: names of lines that are not needed.

    Returns:
      None if the database has no such row, or cannot be read like this: damaged, of another layout, or
      with the journal of a killed writer.
    """
    import sqlite3

    select = "SELECT number, name, digest, line FROM lines WHERE name = ?"
    try:
        with connected(checked(path), "ro") as connection:
            connection.execute("BEGIN")
            if not has_table(connection) or (last != START and _mark(connection, last[0]) != last):
                return None
            samples = [row.line for row in _sound(connection.execute(f"{select} AND number > ?", (op, last[0])))]
            names: set[str] = set()
            for line in map(json.loads, samples):
                names.update([line["run"], *(values[0] for values in line["samples"])])
            lines: dict[str, bytes] = {}
            for name in names:
                if name not in named:
                    rows = _sound(connection.execute(f"{select} ORDER BY number DESC", (name,)))
                    lines.update((row.name, row.line) for row in itertools.islice(rows, 1))
            return Newer(samples, lines, last_mark(connection))
    except (OSError, Damaged, Refused, sqlite3.Error, UnicodeDecodeError, *PARSE_ERRORS):
        return None


def all_of(reading: Reading, op: str) -> Newer:
    """The same of a whole reading."""
    samples = [row.line for row in reading.rows if row.name == op]
    named = {row.name: row.line for row in reading.rows if not row.line.startswith(b'{"key":')}
    end = reading.rows[-1] if reading.rows else None
    return Newer(samples, named, START if end is None else (end.number, digest(end.name, end.line)))


def last_mark(connection: sqlite3.Connection) -> Mark:
    """The mark of the last row; START without any."""
    number = connection.execute("SELECT max(number) FROM lines").fetchone()[0]
    return START if number is None else _mark(connection, number)


def _mark(connection: sqlite3.Connection, number: int) -> Mark:
    cells = connection.execute("SELECT digest FROM lines WHERE number = ?", (number,)).fetchone()
    return number, cells[0].decode("ascii", "replace") if cells and isinstance(cells[0], bytes) else ""


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
    """Whether the table is there; an empty database is also fine.

    Raises:
      Refused: a newer version wrote the database, or another program.
      Damaged: it is ours, but not as it was written.
    """
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    schema = set(connection.execute("SELECT name, sql FROM sqlite_master"))
    if layout == LAYOUT and schema == _OURS:
        return True
    names = ", ".join(sorted({printable(name.decode("utf-8", "replace")) for name, _ in schema}))
    if layout > LAYOUT:
        raise Refused(f"layout {layout} is of a newer stoneware, this one knows {LAYOUT}")
    if layout == 0 and not schema:
        return False
    if layout == 0 and not any(name in (b"lines", b"records") for name, _ in schema):
        raise Refused(f"it is a database of something else, with {names}")
    if layout == 2 and schema == _OF_LAYOUT_2:
        raise Damaged("an older Stoneware wrote it")
    raise Damaged(f"layout {layout} with {names or 'no table'} is not what stoneware writes")


def is_damage(error: Exception) -> bool:
    """Whether an error is about the content of the file, not about disk or locks."""
    import sqlite3

    # SQLITE_CORRUPT and SQLITE_NOTADB are of the base class; DataError is a row that is too long.
    # A message can quote a damaged table's name, which Python then fails to decode.
    return type(error) is sqlite3.DatabaseError or isinstance(
        error, (sqlite3.IntegrityError, sqlite3.DataError, Damaged, UnicodeDecodeError)
    )


def checked(path: Path) -> str:
    """The path of the database without links; SQLite keeps its other files next to it.

    Raises:
      OSError: it is not a file, or a pipe is next to it, at which SQLite would wait for ever.
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
    """Waits for the lock on the file next to the database, and holds it; readers share it.

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
        # A view has no page. It could be endless.
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE rootpage > 0")}
        if b"lines" in tables:
            for cells in _cells(connection, "number, name, digest, line FROM lines", "number", reading):
                try:
                    reading.rows.append(_row(*cells))
                except ValueError as error:
                    reading.problems.append(f"{path}: row {cells[0]}: skipped: {error}")
        elif b"records" in tables:
            reading.rows = _rows_of_layout_2(path, connection, reading)
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != b"ok":
            reading.damage = verdict.decode("utf-8", "replace")


def _cells(connection: sqlite3.Connection, columns: str, key: str, reading: Reading) -> Iterator[tuple[Any, ...]]:
    """The cells of each row in the order of the rows' numbers; of a damaged table, those that SQL finds by number."""
    select = f"SELECT {columns}"
    numbers = set()
    try:
        for cells in connection.execute(f"{select} ORDER BY {key}"):
            numbers.add(cells[0])
            yield cells
    except Exception as error:
        if not is_damage(error):
            raise
        import sqlite3

        reading.damage = str(error)
        num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
        # The rows are numbered from 1, without gaps.
        for number in range(1, min(num_pages * _MOST_ROWS_PER_PAGE, _MOST_ROWS_OF_DAMAGED)):
            if number not in numbers:
                with contextlib.suppress(sqlite3.Error):
                    yield from connection.execute(f"{select} WHERE {key} = ?", (number,))


def _row(number: int, name: object, proof: object, line: object) -> Row:
    """The row with these cells (text comes as bytes); ValueError if it was changed."""
    if not isinstance(name, bytes) or not isinstance(line, bytes):
        raise ValueError(f"name and line must be text, found {name!r:.40} and {line!r:.40}")
    row = Row(number, name.decode("ascii", "replace"), line)
    if digest(row.name, line).encode() != proof:
        raise ValueError(f"its digest does not match, it was edited or damaged: {line[:80]!r}")
    return row


def _sound(rows: Iterable[Sequence[Any]]) -> Iterator[Row]:
    for cells in rows:
        with contextlib.suppress(ValueError):
            yield _row(*cells)


def _rows_of_layout_2(path: Path, connection: sqlite3.Connection, reading: Reading) -> list[Row]:
    """The rows of a database of Stoneware 0.1, as this version would have stored them.

    Its rows were <digest> <kind> 2 <run>, and of a sample another line with its JSON. They call the
    backend `sm90` cutlass_sm90.
    """
    runs: dict[str, dict[bool, str]] = {}
    samples: list[Sample] = []
    for number, id, payload in _cells(connection, "rowid, id, payload FROM records", "rowid", reading):
        try:
            text = payload.decode("ascii")
            proof, _, rest = text.partition(" ")
            if hashlib.sha256(f"{id.decode()} {rest}".encode()).hexdigest()[:32] != proof:
                raise ValueError("its digest does not match, it was edited or damaged")
            kind, schema, body = rest.split(" ", 2)
            run, _, sample = body.partition("\n")
            if schema != "2":
                raise ValueError(f"it has schema {schema}")
            if kind == "sample":
                data = json.loads(sample.replace('"cutlass_sm90"', '"sm90"'))
                key = key_from_json(data["key"])
                samples.append(Sample(**{**data, "key": key, "config": config_from_json(key.op, data["config"])}))
            # A run's own row has its command and its end. If that is lost, a row of its samples has the rest.
            runs.setdefault(Run.from_json(json.loads(run)).id, {})[kind == "run"] = run
        except (AttributeError, *PARSE_ERRORS) as error:
            reading.problems.append(f"{path}: row {number}: skipped: {error}")
    best = [line_of_run(Run.from_json(json.loads(texts[max(texts)]))) for texts in runs.values()]
    lines = enumerate([*best, *lines_of(samples)], start=1)
    return [Row(number, line.name, line.text.encode()) for number, line in lines]
