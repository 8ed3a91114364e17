"""Files of a store, for its tests: reading, editing and damaging them, and a killed writer."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import sample_strategies as data

from stoneware.tuning.samples import Sample, decode, samples_text
from stoneware.tuning.store import Store

RUN = data.run()


def texts(samples) -> list[str]:
    """Samples as text: 1 and True are equal in Python, and different in a key."""
    return sorted(samples_text([sample]) for sample in samples)


def read(path: Path, op: str | None = None) -> list[str]:
    return texts(sample for _, sample in Store(path).samples(op))


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:100] = b"\xff" * 100
    path.write_bytes(content)


def state(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def rows_by_sql(path: Path, most: int = 200) -> list[tuple[str, str, str]]:
    """The name, digest and line of each row that SQLite itself still finds, asked one by one."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    found = []
    for number in range(1, most):
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):  # a message may quote damaged bytes
            found += connection.execute("SELECT name, digest, line FROM lines WHERE number = ?", (number,))
    connection.close()
    return found


def proved(rows: list[tuple[str, str, str]]) -> list[str]:
    """The lines of the rows whose digests match."""
    return [
        line
        for name, digest, line in rows
        if isinstance(line, str) and hashlib.sha256(f"{name} {line}".encode()).hexdigest()[:16] == digest
    ]


def samples_of_lines(lines: Iterable[str]) -> list[Sample]:
    """The samples of lines that have their candidates and runs among the others; the last of those that were stored
    again."""
    decoded = decode(Path(), enumerate(line.encode() for line in lines), [])
    return list({sample.identity: sample for _, sample in decoded.samples if sample.run in decoded.runs}.values())


def killed_while_adding(path: Path) -> None:
    """Leaves what a process leaves that is killed half way through a large `add`."""
    subprocess.run([sys.executable, "-c", KILLED, path])
    assert Path(f"{path}-journal").stat().st_size > 4096


KILLED = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=2")  # so that pages are written before the end
connection.execute("BEGIN")
connection.execute("UPDATE lines SET line = 'half done'")
for number in range(1000, 1100):
    connection.execute("INSERT INTO lines VALUES (?, '', '', ?)", (number, "half done" * 500))
os.kill(os.getpid(), 9)
"""
