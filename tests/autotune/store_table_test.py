"""The table of the user's store: baked next to it, read like the wheel's, and never wrong."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import small_package as small
from damage import OF_BYTES, mutated
from small_kernel import OP, kernel_config, kernel_sample
from store_files import edit

from stoneware.ops.scaled_mm.api import OPERATION
from stoneware.runtime.device import Device
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import entries, lookup, policy, sources, store_file, store_table, table_file
from stoneware.tuning.samples import Sample
from stoneware.tuning.store import user_store

BIG, TINY, SMALL = (small.sm90(suffix) for suffix in (small.BIG, small.TINY, small.SMALL))


@pytest.fixture(autouse=True)
def nothing_at_exit(monkeypatch):
    monkeypatch.setattr(store_table, "bake_at_exit", lambda: None)


def decide(*, m=16, n=4096, k=4096, **changes):
    problem = dataclasses.replace(Problem.dense(m=m, n=n, k=k), **changes)
    return OPERATION.decide(problem, Device(fingerprint=small.H200))


def add(*samples: Sample, run=None) -> None:
    user_store().add(run or small.run(), samples)


def bake() -> None:
    store_table.bake(user_store().path)


def path(op: str = "scaled_mm"):
    return store_table.table_path(user_store().path, op)


def many() -> list[Sample]:
    return [
        small.sample(config, us * m, m=m, n=n)
        for m in (20, 40, 80)
        for n in (2112, 4096)
        for config, us in ((TINY, 9.5), (BIG, 12.5), (small.VENDOR, 11.0))
    ]


def test_a_sample_is_an_exact_entry_at_once_and_known_to_its_neighbours_after_the_bake(package):
    add(small.sample(BIG, 1.0, m=100))
    assert (decide(m=100).config, decide(m=100).source, decide(m=100).grade) == (BIG, "user's store", "exact")
    assert decide(m=90).source == "wheel"
    bake()
    assert (decide(m=100).config, decide(m=100).source, decide(m=100).grade) == (BIG, "user's store", "exact")
    assert (decide(m=90).config, decide(m=90).source) == (BIG, "user's store")


def test_samples_that_are_not_baked_yet_give_the_entries_that_the_bake_gives(package):
    add(*many())
    bake()
    again = [small.sample(SMALL, 180.0, m=20), small.sample(TINY, 300.0, m=20), small.sample(BIG, 1.0, m=40)]
    again = [dataclasses.replace(sample, run="run-2") for sample in again]
    failed = small.sample(BIG, 0.0, m=20, run="run-2", count=0, status="failed", detail="x")
    add(*again, failed, run=small.run("run-2", date="2026-11-22"))
    keys = [small.key(m=m, n=4096) for m in (20, 40, 80)]

    def found():
        return [lookup.find(key, small.H200, sources.sources("scaled_mm")).entry for key in keys]

    before = found()
    bake()
    assert found() == before
    assert [choice.config for choice in before[0].choices] == [SMALL, small.VENDOR, TINY]


def test_a_table_is_baked_from_all_samples_whatever_was_baked_before(package, tmp_path, monkeypatch):
    for sample in many():
        add(sample)
        bake()
    baked = table_file.read(path(), "scaled_mm")
    path().unlink()
    bake()
    assert table_file.read(path(), "scaled_mm").digest == baked.digest


def test_an_op_without_new_samples_is_not_baked_again(package):
    add(*many())
    bake()
    before = path().stat().st_ino
    user_store().add(small.run(), [kernel_sample(64, 1.0, run="run-1")])
    bake()
    assert path().stat().st_ino == before and path(OP).exists()
    found = lookup.find(kernel_sample(64, 1.0).key, small.H200, sources.sources(OP), "a" * 64)
    assert (found.choice.config, found.grade) == (kernel_config(64), "exact")


def test_a_look_up_does_not_open_a_store_that_is_baked(package, monkeypatch):
    add(*many())
    bake()
    small.forget()
    monkeypatch.setattr(store_file, "connected", lambda *_: pytest.fail("the store was opened"))
    monkeypatch.setattr(entries, "entries", lambda *_: pytest.fail("entries were made"))
    assert decide(m=20).source == "user's store" and decide(m=16).source == "wheel"
    assert [source.name for source in sources.sources("matmul", has_packages=False)] == ["wheel"]


def changed(data: bytes) -> dict[str, bytes | None]:
    return {
        "missing": None,
        "empty": b"",
        "half": data[: len(data) // 2],
        "edited": data.replace(b"sm90", b"sm91", 1),
        "no table": b"\xff" * 5000,
        "of the wheel": b"",
    }


@pytest.mark.parametrize("how", list(changed(b"")))
def test_a_damaged_table_is_left_out_and_baked_anew(package, how, caplog):
    add(*many())
    bake()
    whole = path().read_bytes()
    content = changed(whole)[how]
    if how == "of the wheel":
        content = (package / "tables" / "scaled_mm.table").read_bytes()
    path().unlink() if content is None else path().write_bytes(content)
    small.forget()
    store_table._info_once.cache_clear()
    with caplog.at_level("INFO", "stoneware.tuning"):
        for m, config in ((20, TINY), (80, TINY)):
            assert (decide(m=m).config, decide(m=m).source, decide(m=m).grade) == (config, "user's store", "exact")
    assert [str(path()) in line for line in caplog.messages if "not used" in line] == [True] * (content is not None)
    bake()
    assert path().read_bytes() == whole


def test_whatever_happens_to_the_bytes_of_a_table_the_answers_are_those_of_the_samples(package):
    add(*many())
    bake()
    whole, expected = path().read_bytes(), [decide(m=m, n=n) for m in (20, 40, 80) for n in (2112, 4096)]
    for seed in range(60):
        path().write_bytes(mutated(seed, whole, OF_BYTES))
        small.forget()
        found = [decide(m=m, n=n) for m in (20, 40, 80) for n in (2112, 4096)]
        assert [(one.config, one.grade) for one in found] == [(one.config, one.grade) for one in expected]
        bake()
        assert path().read_bytes() == whole


def test_a_table_of_another_store_or_an_older_state_is_left_out(package, tmp_path, monkeypatch):
    add(*many())
    bake()
    other = path().read_bytes()
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "other"))
    small.forget()
    add(small.sample(SMALL, 1.0, m=20))
    path().parent.mkdir()
    path().write_bytes(other)
    assert decide(m=20).config == SMALL
    assert (decide(m=80).source, decide(m=40).source) == ("wheel", "wheel"), "no sample of the other store"
    bake()
    assert decide(m=20).config == SMALL and path().read_bytes() != other


def test_a_table_that_was_baked_with_other_kernels_is_left_out(package):
    add(*many())
    bake()
    text = (package / "kernel_manifest.json").read_text()
    (package / "kernel_manifest.json").write_text(
        small.manifest_text(
            [
                {**vars(record), "sha256": "0" * 64} if record.id == TINY.kernel else vars(record)
                for record in small.kernel_records()
            ]
        )
    )
    assert text != (package / "kernel_manifest.json").read_text()
    small.forget()
    assert (decide(m=20).config, decide(m=20).grade) == (TINY, "stale kernel")
    bake()
    assert (decide(m=20).config, decide(m=20).grade) == (TINY, "stale kernel")


def test_a_folder_that_cannot_be_written_costs_the_bake_alone(package, monkeypatch, caplog):
    add(*many())
    path().parent.parent.joinpath("samples.tables").write_text("a file in its place")
    store_table.bake_user_store()
    assert "cannot be baked" in caplog.text
    assert (decide(m=20).config, decide(m=20).source) == (TINY, "user's store")


def test_a_damaged_store_is_used_without_its_table_and_written_anew_by_the_bake(package):
    add(*many())
    bake()
    store = user_store().path
    content = bytearray(store.read_bytes())
    content[60:64] = b"\xff" * 4
    store.write_bytes(content)
    small.forget()
    assert (decide(m=20).config, decide(m=20).source) == (TINY, "user's store")
    store_table.bake_user_store()
    assert user_store().problems() == [] and store.with_name("samples.sqlite3.damaged-1").read_bytes() == content
    add(small.sample(SMALL, 1.0, m=20))
    for _ in range(2):
        assert decide(m=20).config == SMALL and decide(m=80).config == TINY
        bake()


def test_a_store_of_a_newer_stoneware_is_neither_written_nor_baked_wrongly(package):
    add(*many())
    bake()
    edit(user_store().path, "PRAGMA user_version = 99")
    before = user_store().path.read_bytes()
    small.forget()
    assert (decide(m=20).config, decide(m=20).source) == (TINY, "user's store")
    store_table.bake_user_store()
    assert (decide(m=20).config, decide(m=20).source) == (TINY, "user's store")
    assert user_store().path.read_bytes() == before


PROGRAM = """
import os, sys
import small_package as small
from pathlib import Path
from stoneware.runtime import package_files
package_files.ROOT = Path(sys.argv[1])
from stoneware.tuning import policy, store_table
from stoneware.tuning.store import user_store
policy.keep(small.run(), [small.sample(small.sm90(small.BIG), 1.0, m=int(sys.argv[2]))])
assert not store_table.table_path(user_store().path, "scaled_mm").exists() or sys.argv[2] != "100"
if sys.argv[3] == "kill": os.kill(os.getpid(), 9)
"""


def test_a_process_that_stored_samples_bakes_at_its_end_also_those_of_one_that_was_killed(package):
    def run(m: int, end: str) -> int:
        command = [sys.executable, "-c", PROGRAM, str(package), str(m), end]
        return subprocess.run(command, env=small.environment(package)).returncode

    assert run(100, "kill") == -signal.SIGKILL and not path().exists()
    assert run(200, "exit") == 0
    assert decide(m=90).source == decide(m=190).source == "user's store"


LOOK_UP = """
import sys
from pathlib import Path
from stoneware.runtime import package_files
package_files.ROOT = Path(sys.argv[1])
import stoneware as sw
assert sw.explain("scaled_mm", m=20, n=4096, k=4096, device="H200").source == "user's store"
"""


def test_a_process_that_looked_up_leaves_a_damaged_store_as_it_is(package):
    add(*many())
    store = user_store().path
    content = bytearray(store.read_bytes())
    content[60:64] = b"\xff" * 4
    store.write_bytes(content)
    subprocess.run([sys.executable, "-c", LOOK_UP, str(package)], env=small.environment(package), check=True)
    assert store.read_bytes() == content and not [*store.parent.glob("*.damaged-*")]


def test_samples_in_memory_are_exact_entries(package):
    for m in (100, 200):
        policy.add_to_memory(small.run(), [small.sample(BIG, 1.0, m=m), small.sample(TINY, 2.0, m=m)])
        assert (decide(m=m).config, decide(m=m).source, decide(m=m).grade) == (BIG, "memory", "exact")
    assert (decide(m=100).config, decide(m=190).source) == (BIG, "wheel")


def test_processes_bake_one_after_another(package):
    add(*many())
    store = user_store().path
    program = PROGRAM.partition("policy.keep")[0] + f"\nstore_table.bake(Path({str(store)!r}))"
    command = [sys.executable, "-c", program, str(package)]
    running = [subprocess.Popen(command, env=small.environment(package)) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert os.stat(path().parent).st_mtime_ns == store.stat().st_mtime_ns
    assert sorted(file.name for file in path().parent.iterdir()) == [path().name]
    assert time.time_ns() > store.stat().st_mtime_ns
