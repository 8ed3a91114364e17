"""Fuzz: whatever is damaged or killed, nothing crashes and nothing good is lost.

Several thousand cases, by seed: the arguments in a failure's traceback show the seed.
STONEWARE_FUZZ_ROUNDS multiplies their number:

    ./bazelw test //tests/autotune:fuzz_test --test_env=STONEWARE_FUZZ_ROUNDS=50

What must be found is computed from the bytes, or asked of SQLite, never of the code under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_strategies as data
from damage import OF_BYTES, OF_TEXT, mutated
from store_files import RUN, killed_while_adding, proved, rows_by_sql, samples_of_lines

from stoneware.errors import StoreError, TableError
from stoneware.runtime.canonical import canonical_document
from stoneware.tuning import differences, merge, table_file
from stoneware.tuning import samples as sample_format
from stoneware.tuning.entries import bake_samples
from stoneware.tuning.samples import DeviceRecord, Sample, samples_text
from stoneware.tuning.store import Store

ROUNDS = int(os.environ.get("STONEWARE_FUZZ_ROUNDS") or 1)


def fuzz(num_cases: int, check: Callable[..., None], *arguments: object) -> None:
    """Calls check(seed, an empty folder, *arguments) for each seed."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for seed in range(num_cases * ROUNDS):
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            check(seed, Path(folder), *arguments)


def text_of(sample: Sample) -> str:
    return samples_text([sample])


def many_samples() -> list[Sample]:
    samples = [data.sample(m=m, median_us=m) for m in range(1, 60)]
    samples += [data.kernel_sample(m=m) for m in range(1, 10)]
    # Longer than a page, and than two.
    return samples + [data.sample(m=m, kernel="tiny", status="failed", detail=f"{m} " * 1500 * m) for m in range(1, 4)]


@pytest.fixture(scope="module")
def stored() -> set[str]:
    return set(map(text_of, many_samples()))


@pytest.fixture(scope="module")
def store_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("original") / "samples.sqlite3"
    samples = many_samples()
    for begin in range(0, len(samples), 10):
        Store(path).add(RUN, samples[begin : begin + 10])
    return path.read_bytes()


def test_of_a_damaged_store_no_row_is_lost_that_sqlite_finds(store_bytes, stored):
    fuzz(1000, check_damaged_store, store_bytes, stored)


def check_damaged_store(seed, folder, store_bytes, stored):
    path = folder / "samples.sqlite3"
    changed = mutated(seed, store_bytes, OF_BYTES)
    path.write_bytes(changed)
    wanted = set(map(text_of, samples_of_lines(proved(rows_by_sql(path)))))
    own = Store(path)
    found = [text_of(sample) for _, sample in own.samples()]
    assert wanted <= set(found) and len(found) == len(set(found))
    assert set(found) <= stored, "a sample that nobody took"
    assert path.read_bytes() == changed
    assert [file.name for file in folder.iterdir()] == [path.name]
    if len(found) < len(stored) and changed:
        assert own.problems(), "samples are missing, and nobody says so"
    new = data.sample(m=1000)
    try:
        own.add(RUN, [new])
    except StoreError as error:
        assert "STONEWARE_CACHE_DIR" in str(error)
        assert path.read_bytes() == changed
    else:
        after = {text_of(sample) for _, sample in Store(path).samples()}
        assert after >= {*wanted, text_of(new)} and after <= {*stored, text_of(new)}
        kept = [file.read_bytes() for file in folder.glob("*.damaged-1")]
        assert kept in ([], [changed])


@pytest.fixture(scope="module")
def killed(tmp_path_factory, store_bytes) -> Path:
    """A folder with a store and the journal of a writer that was killed."""
    path = tmp_path_factory.mktemp("killed") / "samples.sqlite3"
    path.write_bytes(store_bytes)
    killed_while_adding(path)
    return path.parent


def test_a_damaged_journal_or_a_database_that_was_killed_crashes_nobody(killed, stored):
    fuzz(300, check_damaged_journal, killed, stored)


def check_damaged_journal(seed, folder, killed, stored):
    shutil.copytree(killed, folder / "store")
    path = folder / "store" / "samples.sqlite3"
    damaged = random.Random(seed).choice([path, Path(f"{path}-journal")])
    damaged.write_bytes(mutated(seed, damaged.read_bytes(), OF_BYTES))
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    found = {text_of(sample) for _, sample in Store(path).samples()}
    assert found <= stored
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    with contextlib.suppress(StoreError):
        new = data.sample(m=1000)
        Store(path).add(RUN, [new])
        assert text_of(new) in {text_of(sample) for _, sample in Store(path).samples()}


def test_writers_that_are_killed_at_any_moment_lose_nothing_that_they_finished(tmp_path):
    """Sixteen of them, as of one node; another takes the place of each that is killed."""
    path, rng = tmp_path / "samples.sqlite3", random.Random(0)
    promised: set[tuple[str, int]] = set()
    writers = {started(path, number) for number in range(16)}
    for number in range(16, 16 + 500 * ROUNDS):
        if number >= 16 + 50 * ROUNDS and len(promised) > 16:  # on a busy machine few adds end before a kill
            break
        select.select([handle for _, handle, _ in writers], [], [], rng.random() * 0.1)
        victim = rng.choice(sorted(writers))
        writers.remove(victim)
        promised |= finished_by(*victim)
        writers.add(started(path, number))
    for writer in writers:
        promised |= finished_by(*writer)
    found = {(sample.run, sample.key.m) for _, sample in Store(path).samples()}
    assert promised <= found and len(promised) > 16
    Store(path).add(RUN, [data.sample()])
    assert Store(path).problems() == [] and not list(tmp_path.glob("*damaged*"))


def started(path: Path, number: int) -> tuple[int, int, str]:
    """A process that adds for ever: its id, a pipe with a byte for each finished add, its run."""
    run = data.run(f"run-{number}")
    handle, write_handle = os.pipe()
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            own = Store(path)
            for m in range(1, 10_000):
                own.add(run, [data.sample(m=m, run=run.id)])
                os.write(write_handle, b".")
        os._exit(1)
    os.close(write_handle)
    return process, handle, run.id


def finished_by(process: int, handle: int, run: str) -> set[tuple[str, int]]:
    """Kills a writer; returns what it had finished."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with os.fdopen(handle, "rb") as pipe:
        return {(run, m) for m in range(1, len(pipe.read()) + 1)}


def test_of_a_damaged_file_of_samples_no_line_is_lost_that_was_not_touched():
    fuzz(800, check_damaged_lines)


def check_damaged_lines(seed, folder):
    path = folder / "scaled_mm.jsonl"
    sample_format.write_samples(path, many_samples()[:20])
    content = path.read_bytes()
    changed = mutated(seed, content, OF_TEXT)
    lines = set(content.split(b"\n")) - {b""}
    candidates = {json.loads(line)["candidate"]: line for line in lines if line.startswith(b'{"candidate"')}
    texts = {line: [] for line in lines}
    for number, sample in sample_format.read_samples(path):
        texts[content.split(b"\n")[number - 1]].append(text_of(sample))
    path.write_bytes(changed)
    left = [line for line in changed.split(b"\n") if line in lines]
    # A line keeps its samples if those of its candidates are there too, and nothing else has their ids.
    intact = {
        id for id, line in candidates.items() if 0 < left.count(line) == changed.count(f'"candidate":"{id}"'.encode())
    }
    whole = [line for line in left if all(id in intact or f'"{id}"'.encode() not in line for id in candidates)]
    untouched = [text for line in whole for text in texts[line]]
    touched = sum(len(texts[line]) for line in left if line not in whole)
    problems = []
    found = sample_format.read_samples(path, problems)
    good = sorted(text_of(sample) for _, sample in found)
    # A changed digit is a sample, too: no digest is kept of a line that people may edit.
    for text in untouched:
        good.remove(text)
    # A damaged line gives at most the samples that it had, or those of the two that grew together.
    most = 2 * max(map(len, texts.values()))
    damaged = [line for line in changed.split(b"\n") if line not in lines]
    assert len(good) + len(problems) <= most * len(damaged) + touched
    for problem in problems:
        if problem.startswith(f"{path}: not samples: no line names a candidate"):
            continue
        place, line, _ = problem.removeprefix(f"{path}:").partition(": not a sample: ")
        assert line and place.isdigit() and len(problem) < 1000, problem
    try:
        assert len(sample_format.read_samples(path)) == len(found) and not problems
    except TableError as error:
        assert str(path) in str(error)


def test_a_damaged_folder_is_merged_compared_and_verified_as_far_as_it_is_good():
    fuzz(800, check_damaged_folder)


def check_damaged_folder(seed, folder):
    runs = [data.run(f"run-{idx}") for idx in range(5)]
    there = folder / "x"
    there.mkdir()
    samples = [data.sample(run=run.id) for run in runs]
    sample_format.write_samples(there / "scaled_mm.jsonl", samples)
    sample_format.write_runs(there / "runs.json", runs)
    sample_format.write_device(there / "device.json", DeviceRecord(fingerprint=data.H200))
    name = random.Random(seed).choice(["scaled_mm.jsonl", "runs.json", "device.json"])
    changed = mutated(seed, (there / name).read_bytes(), OF_TEXT)
    (there / name).write_bytes(changed)
    source = merge.read_source(there)
    found = {run.id for _, taken in source.devices for run, _ in taken}
    if name == "device.json":
        assert found == {run.id for run in runs}
    elif name == "runs.json":
        blocks = [canonical_document({"runs": [run.to_json()]})[14:-5] for run in runs]
        whole = {run.id for run, block in zip(runs, blocks) if block.encode() in changed}
        assert whole <= found or any("runs.json: not runs" in problem for problem in source.problems)
    if len(found) < len(runs):
        assert source.problems
    differences.verify(there)
    for function, arguments in ((merge.merge, ([there], folder / "out")), (differences.diff, (there, there))):
        with contextlib.suppress(TableError):  # such as one run with two meanings
            function(*arguments)
    shutil.rmtree(folder / "out", ignore_errors=True)


def test_a_damaged_table_is_refused_whole():
    table = bake_samples("scaled_mm", [(RUN, data.sample(m=m)) for m in range(1, 20)], None)
    fuzz(500, check_damaged_table, table)


def check_damaged_table(seed, folder, content):
    path = folder / "scaled_mm.table"
    changed = mutated(seed, content, OF_TEXT)
    path.write_bytes(changed)
    if changed == content:
        assert differences.verify(path) == []
        return
    with pytest.raises(TableError, match="scaled_mm.table"):
        table_file.decode(changed, path, "scaled_mm")
    (problem,) = differences.verify(path)
    assert str(path) in problem
