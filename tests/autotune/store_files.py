"""Files of a store, for its tests: reading, editing and damaging them, and a killed writer."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import sample_strategies as data

from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import record
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


def killed_while_adding(path: Path, samples) -> None:
    """Leaves the log of a process that was killed after it stored `samples`."""
    rows = [
        replace(record.of_sample(RUN, sample), revision=idx + 1).payload.decode()
        for idx, sample in enumerate(samples)
    ]
    subprocess.run([sys.executable, "-c", KILLED, path], input=json.dumps(rows), text=True)
    assert Path(f"{path}-wal").stat().st_size > len(rows) * 4096


KILLED = """
import json, os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode=WAL")
for text in json.load(sys.stdin):
    connection.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (text.split(" ")[5], text))
os.kill(os.getpid(), 9)
"""
