"""The real measuring process under a real session, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_session import H200, Bench
from fake_stopwatch import FakeStopwatch

from stoneware.errors import StoreError
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.measuring import candidates, device_timer, machine, workloads
from stoneware.measuring.settings import Settings
from stoneware.ops.grouped_mm import reference as grouped_reference
from stoneware.ops.scaled_mm import reference
from stoneware.runtime.device import CPU
from stoneware.sessions.session import Ranks
from stoneware.specs.grouped_mm_problem import Problem as GroupedMmProblem
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import entries, lookup, policy, sources
from stoneware.tuning import store as store_module

PROBLEMS = [Problem.dense(m=m, n=32, k=64) for m in (1, 16)]


def test_every_end_of_a_candidate_reaches_the_store_through_the_process(tmp_path, caplog):
    bench = Bench(tmp_path)
    kernels = ["lost_1", "wrong_1", "sigkill_1", "right_300", "hang_1"]
    tuned = bench.session(kernels, settings=Settings(hang_limit_s=5.0), has_default=False)
    tuned.command = [sys.executable, str(Path(__file__).with_name("cpu_child.py"))]
    summary = tuned.measure(PROBLEMS[:1], Ranks())
    assert bench.samples == {
        (1, "lost_1"): "failed",
        (1, "wrong_1"): "wrong",
        (1, "sigkill_1"): "failed",
        (1, "hang_1"): "hung",
        (1, "right_300"): "ok",
    }
    assert summary.failures == []
    samples = {sample.config.kernel: sample for _, sample in bench.store.samples()}
    assert (samples["right_300"].median_us, samples["right_300"].count) == (300.0, 50)
    assert "an illegal memory access" in samples["lost_1"].detail
    assert samples["right_300"].run == "run-1"
    assert "no event" not in caplog.text, "what a library prints stood among the events"


def test_a_grouped_problem_is_measured_stored_and_looked_up_by_its_groups(tmp_path, monkeypatch):
    kernels = [
        KernelRecord(
            id=name,
            op="grouped_mm",
            backend="triton_aot",
            arch="sm_90",
            sha256="",
            size_bytes=1,
            config={"a": "bf16", "b": "bf16", "out": "bf16", "tile": [64, 64, 64]},
        )
        for name in ("right_300", "right_200")
    ]
    monkeypatch.setattr("stoneware.kernels.manifest.packaged", lambda: Manifest({one.id: one for one in kernels}))
    bench = Bench(tmp_path)
    problems = workloads.problems(ops=["grouped_mm"], shapes=["4x5x32x64", "4x20x32x64"], dtypes=["bf16"])
    tuned = bench.session(["wrong_1", "right_300", "right_200"], has_default=False)
    tuned.command = [sys.executable, str(Path(__file__).with_name("cpu_child.py"))]
    summary = tuned.measure(problems, Ranks())
    assert summary.failures == [] and summary.statuses == {"ok": 4, "wrong": 2}
    table = entries.table_of_samples("grouped_mm", bench.store.samples())

    def found(**sizes):
        key = GroupedMmProblem.dense(**sizes, dtype="bf16").key
        one = lookup.find(key, H200, [sources.Source("store", table)])
        return one and (one.step, one.entry.key.m, one.choice.config.kernel)

    assert found(m=20, n=32, k=64, num_groups=4) == ("exact", 5, "right_200")
    assert found(m=17, n=32, k=64, num_groups=4) == ("exact", 5, "right_200")
    assert found(m=21, n=32, k=64, num_groups=4) == ("nearest m", 20, "right_200")
    assert found(m=20, n=64, k=64, num_groups=4) == ("nearest shape", 5, "right_200")


class OneCandidate:
    """An op with the reference alone."""

    def make_plan(self, problem, config, device):
        of_op = grouped_reference if problem.key.op == "grouped_mm" else reference
        return of_op.BACKEND.plan(problem, config, device)

    def candidates(self, problem, device):
        return [Config(backend="triton_aot", kernel="right_300")]

    def preferred(self, key, compute_capability, manifest):
        return []


class Stopwatch(FakeStopwatch):
    def warm_up(self, name, call):
        call()

    def time_call(self, name, call):
        call()
        return self._spent(name, 300.0)


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(candidates.manifest, "packaged", lambda: Manifest({}))
    record = Bench(tmp_path).session().run
    monkeypatch.setattr(machine, "new_run", lambda ordinal, command: record)
    monkeypatch.setattr(machine, "end_run", lambda run, ordinal: run)
    real = device_timer.DeviceTimer
    monkeypatch.setattr(candidates, "DeviceTimer", lambda ordinal: real(0, Stopwatch(iter([1980]))))
    policy._say_not_stored.cache_clear()


@pytest.mark.parametrize("problem", [PROBLEMS[0], GroupedMmProblem.dense(m=20, n=32, k=64, num_groups=4)], ids=str)
def test_a_miss_is_measured_here_stored_and_leaves_the_random_numbers_alone(on_cpu, problem):
    import torch

    before, epoch = torch.random.get_rng_state(), policy.EPOCH[0]
    candidates.tune_on_miss(OneCandidate(), problem, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert policy.EPOCH[0] != epoch, "plans made before the samples came are kept"
    [(_, sample)] = store_module.user_store().samples()
    assert (sample.key, sample.median_us, sample.status) == (problem.key, 300.0, "ok")


def test_of_a_miss_only_the_most_promising_candidates_are_measured(on_cpu, monkeypatch):
    asked, of_problem = [], candidates.of_problem

    def asking(operation, problem, device, fastest):
        asked.append(fastest)
        return of_problem(operation, problem, device, fastest)

    monkeypatch.setattr(candidates, "of_problem", asking)
    candidates.tune_on_miss(OneCandidate(), PROBLEMS[0], CPU)
    assert asked == [12]


def test_a_miss_that_cannot_be_stored_is_kept_in_memory_and_said_once(on_cpu, monkeypatch, caplog):
    kept = []
    monkeypatch.setattr(policy, "add_to_memory", lambda run, samples: kept.append((run, samples)))

    def full(store, run, samples):
        raise StoreError("the disk is full")

    monkeypatch.setattr(store_module.Store, "add", full)
    for problem in PROBLEMS:
        candidates.tune_on_miss(OneCandidate(), problem, CPU)
    assert [samples[0].key for _, samples in kept] == [problem.key for problem in PROBLEMS]
    assert caplog.text.count("the disk is full") == 1
