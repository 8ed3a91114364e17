"""Tuning sessions whose measuring process hangs, dies and is restarted; and those that resume."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from fake_session import H100, H200, QUICK, Bench, problems

from stoneware.errors import StoreError
from stoneware.measuring.progress import Reporter
from stoneware.measuring.settings import Settings
from stoneware.sessions.child import WorkerError
from stoneware.sessions.session import Ranks
from stoneware.tuning.samples import Sample

ALONE = Ranks()


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def test_every_candidate_of_every_problem_gets_a_sample(bench):
    summary = bench.session(["ok_10.0", "wrong"]).measure(problems(1, 16), ALONE)
    assert bench.samples == {
        (m, kernel): status
        for m in (1, 16)
        for kernel, status in {"ok_15.0": "ok", "ok_20.0": "ok", "ok_10.0": "ok", "wrong": "wrong"}.items()
    }
    assert summary.statuses == {"ok": 6, "wrong": 2}
    assert (summary.num_problems, summary.num_measured, summary.failures) == (2, 2, [])
    [(run, sample), *_] = bench.store.samples()
    assert run.sm_clock_mhz_after == 1965, "the end of the run was not stored"
    assert isinstance(sample, Sample) and sample.count == 10


@pytest.mark.parametrize(
    ("kernel", "status", "detail"),
    [
        ("hang", "hung", "no progress for 1.5 s"),
        ("hang_timing", "hung", "no progress for 1.5 s"),
        ("sigkill", "failed", "signal SIGKILL"),
        ("exit_7", "failed", "exit code 1: no more memory on the planet"),
        ("lost", "failed", ""),
        ("vanish", "failed", "signal SIGKILL"),
    ],
)
def test_a_candidate_that_takes_its_process_along_is_recorded_and_the_others_measured(bench, kernel, status, detail):
    summary = bench.session([kernel, "ok_10.0"]).measure(problems(1, 16), ALONE)
    for m in (1, 16):
        assert bench.samples[m, kernel] == status
        assert bench.samples[m, "ok_10.0"] == bench.samples[m, "ok_15.0"] == "ok"
    assert summary.failures == []
    [of_kernel, _] = [s for _, s in bench.store.samples() if s.config.kernel == kernel]
    assert detail in of_kernel.detail


def test_a_candidate_that_hung_is_not_tried_again_unless_asked(bench):
    bench.session(["hang"]).measure(problems(1), ALONE)
    bench.session(["hang"], run="run-2").measure(problems(1), ALONE)
    assert bench.measured["1 hang"] == 1
    again = Settings(hang_limit_s=1.5, remeasure=True)
    bench.session(["hang"], run="run-3", settings=again).measure(problems(1), ALONE)
    assert bench.measured["1 hang"] == 2


def test_output_that_is_no_event_is_said_and_costs_nothing(bench, caplog):
    bench.session(["garbage"]).measure(problems(1), ALONE)
    assert bench.samples[1, "garbage"] == "ok"
    assert "not an event: b'not an event'" in caplog.text


def test_a_process_that_does_not_start_is_an_error_with_what_it_said(bench):
    session = bench.session()
    session.command = [*session.command[:1], "-c", "import sys; sys.exit('no such GPU')"]
    with pytest.raises(WorkerError, match="exit code 1: no such GPU"):
        session.measure(problems(1), ALONE)


def test_a_process_that_dies_without_a_candidate_gives_the_problem_up_after_two_losses(bench):
    session = bench.session()
    program = (
        'import sys; sys.stdin.readline(); print(\'{"event": "ready"}\', flush=True);'
        "sys.stdin.readline(); sys.exit('out of luck')"
    )
    session.command = [*session.command[:1], "-c", program]
    summary = session.measure(problems(1, 16), ALONE)
    assert len(summary.failures) == 2 and "out of luck" in summary.failures[0][1]
    assert bench.samples == {}
    session._num_given_up = 0
    with pytest.raises(WorkerError, match="3 problems in a row .* out of luck"):
        session.measure(problems(1, 16, 64, 128), ALONE)


def test_what_has_a_sample_is_not_measured_again(bench):
    bench.session(["ok_10.0"]).measure(problems(1, 16), ALONE)
    before = bench.measured
    summary = bench.session(["ok_10.0"], run="run-2").measure(problems(1, 16, 64), ALONE)
    assert summary.num_known == 2 and summary.num_measured == 1
    assert {name: count for name, count in bench.measured.items() if name not in before} == {
        "64 ok_15.0": 1,
        "64 ok_20.0": 1,
        "64 ok_10.0": 1,
    }


def test_other_hardware_measures_anew(bench):
    bench.session().measure(problems(1), ALONE)
    other = Bench(bench.folder, device=H100)
    assert other.session(run="run-2").measure(problems(1), ALONE).num_known == 0
    assert Bench(bench.folder, device=H200).session(run="run-3").measure(problems(1), ALONE).num_known == 1


def test_a_kernel_with_new_bytes_is_measured_anew(bench):
    bench.session().measure(problems(1), ALONE)
    changed = Bench(bench.folder, digest="1" * 64)
    assert changed.session(run="run-2").measure(problems(1), ALONE).num_known == 0


def test_a_new_candidate_races_against_default_vendor_and_the_best_of_before(bench):
    bench.session(["ok_10.0", "ok_12.0", "wrong"]).measure(problems(1), ALONE)
    before = bench.measured
    bench.session(["ok_10.0", "ok_12.0", "wrong", "ok_9.0"], run="run-2").measure(problems(1), ALONE)
    assert bench.measured - before == {"1 ok_9.0": 1, "1 ok_15.0": 1, "1 ok_20.0": 1, "1 ok_10.0": 1}


def test_one_measuring_process_serves_many_problems(bench):
    session = bench.session()
    starts = []
    start = session._start
    session._start = lambda: starts.append(start()) or starts[-1]
    session.measure(problems(1, 2, 3, 4), ALONE)
    assert len(starts) == 4 and len(set(map(id, starts))) == 1


def test_ranks_measure_each_problem_once_whatever_was_done_before(bench):
    all_problems = problems(*range(1, 12))
    bench.session(run="before").measure(all_problems[2:7], ALONE)
    for rank in range(3):
        bench.session(run=f"rank-{rank}").measure(all_problems, Ranks(rank=rank, world_size=3))
    assert set(bench.measured.values()) == {1}
    assert len(bench.samples) == 2 * len(all_problems)
    by_run = {f"rank-{rank}": {p.m for p in all_problems[rank::3]} for rank in range(3)}
    for run, sample in bench.store.samples():
        assert run.id == "before" or sample.key.m in by_run[run.id]


def test_ranks_are_read_from_torchruns_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(rank=0, world_size=1, local_rank=0)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Ranks.from_environment() == Ranks(rank=9, world_size=16, local_rank=1)
    monkeypatch.setenv("RANK", "16")
    with pytest.raises(ValueError, match="RANK=16 must be below WORLD_SIZE=16; start with torchrun"):
        Ranks.from_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK='one' must be a number"):
        Ranks.from_environment()


def test_an_error_of_the_store_ends_the_session_and_keeps_what_was_stored(bench, monkeypatch):
    from stoneware.tuning.store import Store

    add, calls = Store.add, []

    def full_at_the_second_problem(store, run, samples):
        calls.append(run.id)
        if len(calls) > 2:
            raise StoreError("the disk is full")
        add(store, run, samples)

    monkeypatch.setattr(Store, "add", full_at_the_second_problem)
    with pytest.raises(StoreError, match="the disk is full"):
        bench.session().measure(problems(1, 16), ALONE)
    assert set(bench.samples) == {(1, "ok_15.0"), (1, "ok_20.0")}


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_measured(bench):
    bench.folder.joinpath("samples.sqlite3.lock").mkdir()
    bench.folder.joinpath("samples.sqlite3").mkdir()
    with pytest.raises(StoreError, match="samples.sqlite3 cannot be written"):
        bench.session().measure(problems(1), ALONE)
    assert not bench.measured, "it measured first"


def test_progress_is_said_in_lines_with_the_time_left(bench, caplog):
    caplog.set_level(logging.INFO)
    bench.session(["ok_10.0", "hang"], reporter=Reporter()).measure(problems(1, 16), ALONE)
    assert "2 problems to measure on NVIDIA H200" in caplog.text
    assert "[2/2] scaled_mm m=16" in caplog.text
    assert "best of 3: triton_aot:ok_10.0 10.0 us, 1 wrong, failed or hung" in caplog.text
    assert "about 0 s left" in caplog.text
    assert "no progress for 1.5 s" in caplog.text
    assert "2 problems measured, 0 known, 0 not measurable; 8 samples (2 hung)" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"seconds_per_problem": 0}, "seconds_per_problem=0 must be positive"),
        ({"hang_limit_s": float("inf")}, "hang_limit_s=inf must be positive and finite"),
        ({"seconds_per_problem": float("nan")}, "seconds_per_problem=nan must be positive and finite"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes)
    assert Settings(**json.loads(json.dumps(dataclasses.asdict(QUICK)))) == QUICK
