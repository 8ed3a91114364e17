"""Reading the user's store: every record that proves itself, and what is wrong with the rest.

Reading makes no file, changes none, and takes no lock that a writer waits for. SQLite reads the
rows; where it finds the database damaged, `salvage.py` reads the records from the bytes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.runtime import regular_file
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import record as record_format, salvage
from stoneware.tuning.record import Record
from stoneware.tuning.samples import SCHEMA, Run, Sample

if TYPE_CHECKING:
    import sqlite3

LAYOUT = 1
"""PRAGMA user_version: the tables of the database. What a row holds is its own `schema`."""

_WAIT_S = 5.0
"""How long to wait for another program that has the whole database locked."""

_INDEX_HEADER_BYTES = 48
"""WalIndexHdr of SQLite; the salts of its -wal are at 32, and at 16 of the -wal itself."""

_LONGEST_RECORD_BYTES = 64 << 20
_DAMAGE_CODES = (1, 11, 26)
"""SQLITE_ERROR (our SQL is right, so a table is not what it was), SQLITE_CORRUPT, SQLITE_NOTADB."""


class Refused(Exception):
    """The database is not this version's to read by SQL or to write."""


class Damaged(Exception):
    """The database is ours, and not what was written."""


@dataclass(frozen=True)
class Files:
    """The files of a store.

    Attributes:
      path: as the user knows it, for messages.
      database: with links resolved, as SQLite does before it names the -wal.
    """

    path: Path
    database: str

    @classmethod
    def at(cls, path: Path) -> Files:
        return cls(path, os.path.realpath(path))

    @property
    def wal(self) -> str:
        return self.database + "-wal"

    @property
    def shm(self) -> str:
        return self.database + "-shm"

    @property
    def new(self) -> str:
        """The new database of a renewal that is not finished."""
        return self.database + ".new"

    @property
    def lock(self) -> str:
        return self.database + ".lock"

    def stamp(self) -> tuple[int, ...]:
        """Changes when the content may have changed; () without a store."""
        stamp: list[int] = []
        for file in (self.database, self.wal, self.new):
            try:
                status = os.stat(file)
            except OSError:  # absent, or not ours to see: reading tells
                continue
            stamp += (status.st_ino, status.st_size, status.st_mtime_ns)
        return tuple(stamp)


@dataclass
class Reading:
    """What is in the files.

    Attributes:
      records: by id; each with its place.
      unlisted: ids of records that only the bytes have, not the table.
      problems: what was skipped or is wrong, each with its place.
      damage: why the database must be made anew; empty if it need not be.
      refusal: why this version must not write to it; empty if it may.
      is_snapshot: whether no writer can have come between.
    """

    records: dict[str, tuple[Record, str]] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    damage: str = ""
    refusal: str = ""
    is_snapshot: bool = False


def read(files: Files, *, has_turn: bool = False, is_suspect: bool = False) -> Reading:
    """Reads by SQL, and the bytes of whatever SQL does not reach.

    Args:
      files: what to read.
      has_turn: no other process writes, and this one is about to: SQLite may recover the -wal.
      is_suspect: the bytes of the database are read even if SQL finds nothing wrong.
    """
    for is_last in (False, False, True):
        before = files.stamp()
        reading = _read_once(files, has_turn, is_suspect)
        if is_last or has_turn or reading.is_snapshot or files.stamp() == before:
            break
    return reading


def decoded(reading: Reading, op: str | None) -> tuple[list[tuple[Run, Sample]], list[str]]:
    """The samples of `op`, or all, sorted, each with its run; and every problem."""
    problems = list(reading.problems)
    own: dict[str, Run] = {}
    taken_with: dict[bytes, Run] = {}
    samples: list[Sample] = []
    for record, place in reading.records.values():
        if record.schema != SCHEMA:
            age = "a newer" if record.schema > SCHEMA else "an older"
            problems.append(
                f"{place}: skipped and kept: schema {record.schema} of {age} stoneware, "
                f"this one reads {SCHEMA}"
            )
            continue
        if op is not None and record.kind == "sample" and not record.may_be_of(op):
            continue
        try:
            if record.kind == "run":
                run = record.run()
                own[run.id] = run
            elif record.kind == "sample":
                if record.run_text not in taken_with:
                    taken_with[record.run_text] = record.run()
                samples.append(record.sample())
            else:
                problems.append(f"{place}: skipped and kept: kind {record.kind!r} is not known")
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            problems.append(f"{place}: skipped: {error}")
    # A run's own record has its end, too. If it is lost, what its last sample was taken with.
    runs = {run.id: run for run in sorted(taken_with.values(), key=_completeness)} | own
    pairs = [(runs[sample.run], sample) for sample in samples if op is None or sample.op == op]
    # By text first: keys such as 1 and True compare equal, and their order must not be by chance.
    pairs.sort(key=lambda pair: canonical_json(pair[1].to_json()))
    pairs.sort(key=lambda pair: (pair[1].op, pair[1].sort_key))
    return pairs, problems


def prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A connection that is wary of what it opens."""
    import sqlite3

    connection.text_factory = bytes  # a text that is not UTF-8 must not fail its neighbours
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_RECORD_BYTES)
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the tables are there; a database with nothing in it is fine, too.

    Raises:
      Refused: it is of a newer version, or of something else.
      Damaged: it is ours, but not whole.
    """
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    names = ", ".join(sorted(name.decode("utf-8", "replace") for name in tables)) or "no table"
    if layout > LAYOUT:
        raise Refused(f"layout {layout} is of a newer stoneware, this one knows {LAYOUT}")
    if layout == 0 and not tables:
        return False
    if layout == 0 and b"records" not in tables:
        raise Refused(f"it is a database of something else, with {names}")
    if layout != LAYOUT or b"records" not in tables:
        raise Damaged(f"layout {layout} with {names} was never written")
    return True


def is_damage(error: Exception) -> bool:
    """Whether an error of SQLite is about what is in the file, and not about disk or locks."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # The message of an error can quote a damaged table's name, which Python then fails to decode.
    return code in _DAMAGE_CODES or isinstance(error, (Damaged, UnicodeDecodeError))


def _read_once(files: Files, has_turn: bool, is_suspect: bool) -> Reading:
    reading = Reading()
    try:
        database_bytes = regular_file.size_bytes(files.database)
    except OSError as error:
        reading.problems.append(
            f"{files.path}: cannot be read: {error}; move away what is in its place, or set "
            "STONEWARE_CACHE_DIR to another folder"
        )
        return reading
    # Before the database: what a checkpoint moves meanwhile is then seen twice, and not missed.
    wal, new = _content(files.wal, reading), _content(files.new, reading)
    if not (database_bytes or wal or new):
        return reading
    listed: set[str] = set()
    is_sound = False
    if not database_bytes:
        reading.damage = "it is empty or missing, and files beside it are not"
    elif mode := _mode(files, wal, has_turn):
        is_sound = _select(files, mode, reading, listed)
        reading.is_snapshot = is_sound and bool(wal)
    if new:
        reading.damage = reading.damage or "its renewal was interrupted"
    if is_suspect or not is_sound:
        _salvage(files.database, _content(files.database, reading), False, reading, set())
    # The end of a -wal that SQLite does not take, since it is torn or damaged. A row that does not
    # prove itself was edited; the log does not bring it back as long as the table is sound.
    for file, data, is_wal in ((files.wal, wal, True), (files.new, new, False)):
        _salvage(file, data, is_wal, reading, listed if is_sound else set())
    if reading.damage:
        reading.problems.append(
            f"{files.path}: damaged: {reading.damage}; {len(reading.records)} records were read "
            "nevertheless; the next measurement keeps it aside and writes them to a new one"
        )
    return reading


def _mode(files: Files, wal: bytes, has_turn: bool) -> str:
    """How SQLite can open the database without making or changing a file; "" if it cannot."""
    if not wal:
        # No writer is at work, and SQLite need not look for one, which would make a -shm.
        return "immutable=1"
    # The -shm is the index of the -wal. A writer that was killed between the two leaves an index
    # of another log; SQLite would wait 10 s for that writer (walTryBeginRead, SQLITE_PROTOCOL).
    try:
        index = regular_file.read(files.shm)[:_INDEX_HEADER_BYTES]
    except OSError:
        index = b""
    if len(index) == _INDEX_HEADER_BYTES and index[32:40] == wal[16:24] and _is_log(wal):
        return "mode=ro&readonly_shm=1"
    return "mode=rw" if has_turn else ""


def _is_log(wal: bytes) -> bool:
    """Whether the header of a -wal proves itself (fileformat2.html, section 4.2)."""
    magic = int.from_bytes(wal[:4], "big")
    order = "big" if magic & 1 else "little"
    first = second = 0
    for idx in range(0, 24, 8):
        first = (first + int.from_bytes(wal[idx:idx + 4], order) + second) & 0xFFFFFFFF
        second = (second + int.from_bytes(wal[idx + 4:idx + 8], order) + first) & 0xFFFFFFFF
    checksum = first.to_bytes(4, "big") + second.to_bytes(4, "big")
    return magic in salvage.WAL_MAGICS and checksum == wal[24:32]


def _select(files: Files, mode: str, reading: Reading, listed: set[str]) -> bool:
    """Reads the rows by SQL; whether that went through and the database is sound.

    Adds the id of every row to `listed`, also of those that do not prove themselves.
    """
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(
            f"{Path(files.database).as_uri()}?{mode}", uri=True, timeout=_WAIT_S,
            isolation_level=None,
        )) as connection:
            prepared(connection)
            connection.execute("BEGIN")
            if has_tables(connection):
                for rowid, id, payload in connection.execute(
                    "SELECT rowid, id, payload FROM records"
                ):
                    if isinstance(id, bytes):
                        listed.add(id.decode("ascii", "replace"))
                    place = f"{files.path}: row {rowid}"
                    try:
                        record = record_format.unpack(payload)
                    except ValueError as error:
                        reading.problems.append(f"{place}: skipped: {error}")
                        continue
                    listed.add(record.id)
                    _take(reading, record, place)
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != b"ok":
                raise Damaged(found.decode("utf-8", "replace").replace("\n", " "))
        return True
    except Refused as error:
        reading.refusal = str(error)
        reading.problems.append(f"{files.path}: {error}")
    except (Damaged, sqlite3.Error, MemoryError, UnicodeDecodeError) as error:
        if is_damage(error):
            reading.damage = str(error)
        elif mode == "immutable=1":
            reading.problems.append(
                f"{files.path}: SQLite cannot read it ({error}); its bytes were read instead"
            )
        # Else a writer is in the way, or was killed: nothing is amiss that the bytes do not show.
    return False


def _content(file: str, reading: Reading) -> bytes:
    try:
        return regular_file.read(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        reading.problems.append(
            f"{file}: cannot be read: {error}; make it readable, or move it away"
        )
        return b""


def _salvage(file: str, data: bytes, is_wal: bool, reading: Reading, listed: set[str]) -> None:
    """Takes the records of a file's bytes whose ids are not `listed`."""
    for record in salvage.scan(data, is_wal=is_wal):
        if record.id not in listed:
            if record.id not in reading.records:
                reading.unlisted.append(record.id)
            _take(reading, record, f"{file}: record {record.id}")


def _take(reading: Reading, record: Record, place: str) -> None:
    known = reading.records.get(record.id)
    if not known or known[0].revision < record.revision:
        reading.records[record.id] = record, place


def _completeness(run: Run) -> tuple[bool, str]:
    return run.sm_clock_mhz_after > 0, canonical_json(run.to_json())
