"""Many processes at once: what `add` returned for is there. Killed ones are in fuzz_test.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sample_strategies as data

from stoneware.tuning import store_file
from stoneware.tuning.store import Store

NUM_PROCESSES, NUM_ADDS = 16, 40

WRITER = f"""
import sys
sys.path[:0] = {sys.path!r}
import sample_strategies as data
from stoneware.tuning.store import Store
path, writer, num_adds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run = data.run(f"run-{{writer}}")
own = Store(path)
print("ready", flush=True)
sys.stdin.readline()
for m in range(1, num_adds + 1):
    own.add(run, [data.sample(m=m, run=run.id)])
    print(m, flush=True)
"""


def start(path: Path, writer: int, num_adds: int = NUM_ADDS) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(writer), str(num_adds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process


def race(path: Path, num_processes: int) -> None:
    """Lets writers begin at once; each must end well."""
    processes = [start(path, writer) for writer in range(num_processes)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


def stored(path: Path) -> set[tuple[str, int]]:
    return {(sample.run, sample.key.m) for _, sample in Store(path).samples()}


def test_sixteen_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "tuning" / "samples.sqlite3"
    race(path, NUM_PROCESSES)
    expected = {(f"run-{writer}", m) for writer in range(NUM_PROCESSES) for m in range(1, NUM_ADDS + 1)}
    assert stored(path) == expected
    assert Store(path).problems() == []


def test_processes_that_find_the_file_damaged_at_once_lose_nothing(tmp_path):
    path = tmp_path / "samples.sqlite3"
    Store(path).add(data.run(), [data.sample(m=m) for m in range(1, 50)])
    content = path.read_bytes()
    path.write_bytes(content[: 5 * 4096] + b"\xff" * 4096 + content[6 * 4096 :])
    before = stored(path)
    assert 20 < len(before) < 49
    race(path, 4)
    assert before < stored(path)
    assert len(stored(path)) == len(before) + 4 * NUM_ADDS
    assert [file.name for file in tmp_path.glob("*damaged*")] == ["samples.sqlite3.damaged-1"]


def test_a_file_that_is_damaged_while_others_write_to_it_loses_only_what_was_overwritten(tmp_path):
    path = tmp_path / "samples.sqlite3"
    own = Store(path)
    own.add(data.run(), [data.sample(m=m) for m in range(1, 50)])
    writer = start(path, 1)
    assert writer.stdout.readline() == "ready\n"
    writer.stdin.write("\n")
    writer.stdin.flush()
    for expected in range(1, 6):
        assert int(writer.stdout.readline()) == expected
    # It writes on, at any moment of this.
    with path.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 4096)
    Store(path).add(data.run(), [data.sample(m=1000)])
    _, errors = writer.communicate()
    assert writer.returncode == 0, errors
    found = stored(path)
    assert found >= {(data.run().id, 1000), *(("run-1", m) for m in range(1, NUM_ADDS + 1))}
    assert len(found) > 20 + 1 + NUM_ADDS
    assert Path(f"{path}.damaged-1").exists() and Store(path).problems() == []


@pytest.mark.parametrize("num_readers", [3])
def test_readers_beside_a_writer_see_every_sample_that_was_there_when_they_began(tmp_path, num_readers):
    path = tmp_path / "samples.sqlite3"
    writer = start(path, 1)
    assert writer.stdout.readline() == "ready\n"
    writer.stdin.write("\n")
    writer.stdin.flush()
    readers = [Store(path) for _ in range(num_readers)]
    for last in range(1, NUM_ADDS + 1):
        assert int(writer.stdout.readline()) == last
        for reader in readers:
            found = {sample.key.m for _, sample in reader.samples()}
            assert found >= set(range(1, last + 1))
            assert found == set(range(1, len(found) + 1))
    writer.communicate()
    assert writer.returncode == 0
    assert readers[0].problems() == []


def exit_code_of_fork(path: Path, num_stored: int) -> int:
    """Forks a child that reads the store and adds to it; returns 0 if it did both."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            pairs, problems = Store(path).read()
            assert len(pairs) >= num_stored and not problems, (len(pairs), problems)
            Store(path).add(data.run("child"), [data.sample(m=os.getpid(), run="child")])
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_writing", [True, False])
def test_a_child_that_is_forked_while_a_thread_has_the_database_open_reads_and_writes(
    tmp_path, monkeypatch, is_writing
):
    path = tmp_path / "samples.sqlite3"
    own = Store(path)
    own.add(data.run(), [data.sample(m=m) for m in range(1, 10)])
    is_open, forked = threading.Event(), threading.Event()
    has_table = store_file.has_table

    def slow_has_table(connection):
        found = has_table(connection)
        if threading.current_thread() is thread:
            is_open.set()
            forked.wait(1)  # a fork that waits for this connection does not end it
        return found

    monkeypatch.setattr(store_file, "has_table", slow_has_table)
    target = (lambda: own.add(data.run(), [data.sample(m=100)])) if is_writing else own.read
    thread = threading.Thread(target=target)
    thread.start()
    assert is_open.wait(30)
    try:
        assert exit_code_of_fork(path, 9) == 0
    finally:
        forked.set()
        thread.join()
    assert len(stored(path)) == 10 + is_writing and Store(path).problems() == []


def test_children_that_are_forked_while_a_thread_reads_and_writes_read_every_sample(tmp_path):
    path = tmp_path / "samples.sqlite3"
    Store(path).add(data.run(), [data.sample(m=m) for m in range(1, 50)])
    num_added, is_over = 0, threading.Event()

    def read_and_write() -> None:
        nonlocal num_added
        while not is_over.is_set():
            Store(path).add(data.run(), [data.sample(m=1000 + num_added)])
            num_added += 1
            Store(path).read()

    thread = threading.Thread(target=read_and_write)
    thread.start()
    try:
        codes = [exit_code_of_fork(path, 49 + num_added) for _ in range(40)]
    finally:
        is_over.set()
        thread.join()
    assert codes == [0] * 40
    assert len(stored(path)) == 49 + num_added + 40 and Store(path).problems() == []
