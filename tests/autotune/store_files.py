"""Files of a store, for its tests: reading, editing and damaging them, and a killed writer."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import sample_strategies as data

from stoneware.runtime.canonical import canonical_json
from stoneware.tuning.store import Store

RUN = data.run()


def texts(samples) -> list[str]:
    """Samples as text: 1 and True are equal in Python, and different in a key."""
    return sorted(canonical_json(sample.to_json()) for sample in samples)


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


def rows_by_sql(path: Path) -> list[tuple[str, str]]:
    """The id and payload of each row that SQLite itself still finds, asked one by one."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    found = []
    for rowid in range(1, 200):
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):  # a message may quote damaged bytes
            found += connection.execute("SELECT id, payload FROM records WHERE rowid = ?", (rowid,))
    connection.close()
    return found


def killed_while_adding(path: Path) -> None:
    """Leaves what a process leaves that is killed half way through a large `add`."""
    subprocess.run([sys.executable, "-c", KILLED, path])
    assert Path(f"{path}-journal").stat().st_size > 4096


KILLED = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size=2")  # so that pages are written before the end
connection.execute("BEGIN")
connection.execute("UPDATE records SET payload = 'half done'")
for number in range(100):
    connection.execute("INSERT INTO records VALUES (?, ?)", (str(number), "half done" * 500))
os.kill(os.getpid(), 9)
"""
