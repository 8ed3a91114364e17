"""gpu_check.pyz held_out without a GPU: what is drawn, what is resumed, and what the figures say."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import types
from collections import Counter

import pytest
import torch

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.measuring.settings import Settings
from stoneware.measuring.stopwatch import CudaStopwatch
from stoneware.runtime.device import CPU, Device, DeviceFingerprint
from stoneware.sessions import session
from stoneware.sessions.session import Ranks
from stoneware.specs import scaled_mm as spec
from stoneware.specs import spec_of
from stoneware.specs.scaled_mm_problem import Problem
from stoneware.tuning import policy
from stoneware.tuning.lookup import Decision, Grade
from stoneware.tuning.samples import Run, Sample, lines_of
from stoneware.tuning.table_entry import Choice
from tools.gpu_check import document, held_out, held_out_figures, held_out_problems, weight_walk
from tools.gpu_check.held_out_problems import SETS

GPU = Device(
    ordinal=0,
    fingerprint=DeviceFingerprint(
        name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=1 << 26, memory_clock_khz=3201000
    ),
)
CHOICE, OTHER, VENDOR = (
    Config(backend=backend, kernel=kernel) for backend, kernel in (("sm90", "a"), ("sm90", "b"), ("vendor", "v"))
)


def nothing(op: str) -> frozenset[Key]:
    return frozenset()


def problems(*m_values: int) -> list[Problem]:
    return [Problem.dense(m=m, n=512, k=512) for m in m_values]


def sample(problem, config, us, run="r", digest="", status="ok") -> Sample:
    count = 5 if status == "ok" else 0
    return Sample(
        key=problem.key, config=config, median_us=us, spread_us=0.0, count=count, status=status, run=run,
        kernel_sha256=digest,
    )  # fmt: skip


def decision(problem) -> Decision:
    return Decision(config=CHOICE, step=Grade.NEAREST_SHAPE, grade=Grade.NEAREST_SHAPE, reason="")


def row(problem, **times_us):
    configs = {"choice": CHOICE, "other": OTHER, "vendor": VENDOR}
    times = {configs[name]: sample(problem, configs[name], us) for name, us in times_us.items()}
    return held_out_figures.row_of("fp8_row", str(problem), problem.key.m, decision(problem), times)


# What is drawn


@pytest.mark.parametrize("name", SETS)
def test_a_seed_draws_the_same_and_another_seed_others(name):
    one, same, other = (held_out_problems.take(name, seed, 40, nothing) for seed in (1, 1, 2))
    assert one == same
    assert len(set(one) - set(other)) > 30


@pytest.mark.parametrize("name", SETS)
def test_draws_are_of_models_and_random_of_few_rows_and_many(name):
    drawn = held_out_problems.take(name, 3, 200, nothing)
    product = SETS[name].product
    weights = {(layer.n, layer.k) for layer in held_out_problems._layers()}
    drawn_weights = {"forward": lambda one: (one.n, one.k), "dgrad": lambda one: (one.k, one.n)}
    drawn_weights["wgrad"] = lambda one: (one.m, one.n)
    assert 60 < sum(drawn_weights[product](one) in weights for one in drawn) < 140
    tokens = [one.k if product == "wgrad" else one.key.m for one in drawn]
    assert sum(count <= 16 for count in tokens) > 20
    assert sum(count >= 256 for count in tokens) > 20
    assert any(count % 2 for count in tokens if count > 64) == (product != "wgrad")
    assert {(one.op, one.key.scales, one.key.layout) for one in drawn} == {
        (SETS[name].op, drawn[0].key.scales, drawn[0].key.layout)
    }
    assert len({one.key for one in drawn}) == len(drawn)


def test_layers_are_apart_and_fused_cut_and_of_experts():
    found = {(layer.n, layer.k, layer.num_experts) for layer in held_out_problems._layers()}
    gemma3 = {(4096, 5376, 0), (2048, 5376, 0), (8192, 5376, 0), (43008, 5376, 0), (21504, 5376, 0), (262208, 5376, 0)}
    cut_in_eight = {(5376, 2688, 0), (1024, 5376, 0), (32776, 5376, 0)}
    experts = {(21504, 6144, 16), (2688, 6144, 16), (6144, 1344, 16)}
    assert gemma3 | cut_in_eight | experts <= found


def test_half_have_a_measured_weight_at_another_m_and_half_have_none():
    first = held_out_problems.take("bf16_nt", 1, 30, nothing)
    measured = frozenset(problem.key for problem in first[:10])
    drawn = held_out_problems.take("bf16_nt", 1, 20, lambda op: measured)
    weights = {(key.n, key.k) for key in measured}
    assert [(problem.n, problem.k) in weights for problem in drawn] == [False, True] * 10
    assert not {problem.key for problem in drawn} & measured
    others = [problem for problem in first if (problem.n, problem.k) not in weights]
    assert drawn[::2] == others[:10]


def test_the_weights_of_the_wheels_table_are_drawn_between_its_m():
    measured = held_out_problems.measured_keys("scaled_mm")
    assert any((key.n, key.k) in spec.WEIGHTS.values() for key in measured)
    drawn = held_out_problems.take("fp8_row", 1, 300)
    weights = {(key.n, key.k) for key in measured if key.scales == "row"}
    # About half: a problem that was drawn before is drawn again.
    assert 140 <= sum((problem.n, problem.k) in weights for problem in drawn) <= 160
    assert not {problem.key for problem in drawn} & measured
    assert len({problem.m for problem in drawn} - {key.m for key in measured}) > 60


@pytest.mark.parametrize("name", SETS)
def test_the_models_are_kept_apart_from_what_is_measured(name):
    """What is measured of them can no longer be drawn; if this fails, measure others or list others."""
    drawn = list(itertools.islice(held_out_problems.draw(name, 1), 400))
    measured = {(key.kind, key.n, key.k) for key in held_out_problems.measured_keys(SETS[name].op)}
    assert sum((one.key.kind, one.n, one.k) in measured for one in drawn) < len(drawn) / 6


def test_a_cut_off_run_is_of_all_sets():
    order = held_out_problems.interleaved([problems(1, 2, 3), [], problems(4)])
    assert [one.m for one in order] == [1, 4, 2, 3]


def test_ops_and_sets_are_named_alike():
    assert held_out.chosen_sets(["grouped_mm", "fp8_row"]) == [
        "fp8_row",
        "grouped_fp8",
        "grouped_block",
        "grouped_bf16",
    ]
    with pytest.raises(ValueError, match="ops=mm must be among"):
        held_out.chosen_sets(["mm"])


# What is measured


class FakeWorker:
    """Samples of fixed times instead of the measuring process."""

    log: Counter = Counter()
    commands: set = set()

    def __init__(self, command, hello):
        self.commands.add(tuple(command))
        self._run = hello["run"]

    def send(self, task):
        self._problem = spec_of(task["op"]).problem(**task["problem"])
        self._configs = [Config.from_json(data) for data in task["configs"]]

    def events(self, limit_s):
        us = {CHOICE: 11.0, OTHER: 10.0, VENDOR: 12.0}
        self.log.update((self._problem.m, config) for config in self._configs)
        made = [sample(self._problem, config, us[config], self._run) for config in self._configs]
        yield {"event": "samples", "lines": [line.text for line in lines_of(made)]}
        yield {"event": "done"}

    def kill(self):
        pass


@pytest.fixture
def worker(monkeypatch):
    ids = map("run-{}".format, itertools.count())

    def new_run(ordinal, command, commit="unknown"):
        values = {field.name: "" for field in dataclasses.fields(Run)}
        clocks = {name: 0 for name in values if "_clock_mhz_" in name}
        return Run(**{**values, **clocks, "id": next(ids), "device": GPU.fingerprint, "date": "2026"})

    monkeypatch.setattr(session, "Worker", FakeWorker)
    for module in (held_out, session):
        monkeypatch.setattr(module, "cuda_device", lambda ordinal: GPU)
    monkeypatch.setattr(session.machine, "new_run", new_run)
    monkeypatch.setattr(session.machine, "end_run", lambda run, ordinal: run)
    monkeypatch.setattr(held_out.candidates, "of_problem", lambda *_: ([VENDOR], [OTHER]))
    FakeWorker.log, FakeWorker.commands = Counter(), set()
    return FakeWorker


def measure(held, part, wanted, seconds=math.inf, ranks=Ranks()):
    held_out.measure(held, part, wanted, ranks, Settings(), seconds)


def test_a_run_whose_time_is_over_reports_and_the_next_goes_on(tmp_path, worker, capsys):
    drawn = problems(1, 2, 3)
    held = held_out.HeldOut(tmp_path, {"fp8_row": drawn}, GPU, decision)
    measure(held, "first", drawn, seconds=1e-9)
    assert set(worker.log) == {(1, one) for one in (CHOICE, OTHER, VENDOR)}
    assert "start again" in capsys.readouterr().out
    assert held.report()["groups"]["fp8_row"]["problems"] == 1
    measure(held, "first", drawn)
    assert set(worker.log.values()) == {1}, "measured twice"
    report = held.report()
    assert report["of_problems"] == {"fp8_row": 3}
    assert report["groups"]["fp8_row"]["problems"] == 3
    assert report["groups"]["fp8_row"]["regret"]["worst"]["ratio"] == 1.1
    assert json.loads(document.to_json(report)) == report


def test_the_program_measures_every_part_and_goes_on(tmp_path, worker, monkeypatch):
    values = {"seed": 5, "problems": 3, "ops": ["fp8_row", "bf16_nn"], "minutes": 0.0, "again": 1}
    values |= {"rounds": 2, "seconds_per_problem": 1.0, "part": None, "out": str(tmp_path), "command": "held_out"}
    values |= {"commit": "c", "wheel_sha256": "w"}
    monkeypatch.setattr(held_out, "wheels_decision", lambda device: decision)
    monkeypatch.setattr(held_out.HeldOutExperiment, "ordinal", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert held_out.HeldOutExperiment(types.SimpleNamespace(**values)).run() == 0
    report = json.loads((tmp_path / "held_out.json").read_text())
    assert report["of_problems"] == {"fp8_row": 3, "bf16_nn": 3}
    assert sum("again" in row for row in report["rows"]) == 2
    assert "bf16_nn, nearest shape" in (tmp_path / "held_out.txt").read_text()
    num_measured = worker.log.total()
    assert held_out.HeldOutExperiment(types.SimpleNamespace(**values)).run() == 0
    assert worker.log.total() == num_measured, "measured again"


def test_ranks_share_the_problems(tmp_path, worker):
    drawn = problems(1, 2, 3, 4)
    held = held_out.HeldOut(tmp_path, {"fp8_row": drawn}, GPU, decision)
    for rank in (0, 1):
        measure(held, "first", drawn, ranks=Ranks(rank=rank, world_size=2, local_rank=rank))
    assert len(held.rows("first")) == 4
    assert set(worker.log.values()) == {1}


def test_the_second_part_repeats_the_worst_of_the_first(tmp_path, worker):
    drawn = problems(1, 2, 3)
    held = held_out.HeldOut(tmp_path, {"fp8_row": drawn}, GPU, decision)
    measure(held, "first", held.to_measure("first", 2)[:2])
    assert worker.commands == {tuple(weight_walk.COMMAND)}
    assert [one.m for one in held.to_measure("again", 2)] == [1, 2]
    measure(held, "again", held.to_measure("again", 1))
    report = held.report()
    assert [row["is_noise"] for row in report["rows"] if "again" in row] == [False]
    assert "regret 1.100, again 1.100" in held_out_figures.table({**report})


def test_each_captured_call_reads_another_copy_of_the_weight(monkeypatch):
    problem = Problem.dense(m=4, n=32, k=64)
    walk = weight_walk.WeightWalk()
    plan = walk.make_plan(problem, Config(backend="reference", kernel="torch.matmul_float32"), CPU)
    a, b = (torch.randn(rows, 64).to(torch.float8_e4m3fn) for rows in (4, 32))
    weight, scales, out = b.t(), torch.ones(36), torch.empty(4, 32, dtype=torch.bfloat16)
    results = []
    for is_capturing in (False, True, True, False):
        monkeypatch.setattr(policy, "is_capturing", lambda: is_capturing)
        plan(a, weight, out, scales[:4, None], scales[None, 4:], None)
        results.append(bool(out.any()))
        walk.of_weight[1].zero_()
    assert len(walk.of_weight) == weight_walk.MOST_COPIES
    assert {one.stride() for one in walk.of_weight} == {weight.stride()}
    assert len({one.data_ptr() for one in walk.of_weight}) == len(walk.of_weight)
    assert results == [True, True, False, True], "outside of a capture the weight itself is read"


def test_a_captured_gradient_of_a_weight_is_written_to_another_copy(monkeypatch):
    problem = spec_of("matmul").make_problem(m=8, n=16, k=32, layout="tn")
    walk = weight_walk.WeightWalk()
    plan = walk.make_plan(problem, Config(backend="reference", kernel="torch.matmul_float32"), CPU)
    a, b, out = torch.ones(32, 8).bfloat16().t(), torch.ones(32, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    tensors = {"a": a, "b": b, "out": out, "bias": None}
    arguments = [tensors[name] for name in spec_of("matmul").plan_order]
    monkeypatch.setattr(policy, "is_capturing", lambda: True)
    plan(*arguments)
    assert out.all()
    out.zero_()
    plan(*arguments)
    assert not out.any()
    monkeypatch.setattr(policy, "is_capturing", lambda: False)
    plan(*arguments)
    assert out.all()


def test_copies_are_of_300_megabytes_within_bounds():
    assert weight_walk.num_copies(100 << 20) == 3
    assert weight_walk.num_copies(4 << 30) == 1
    assert weight_walk.num_copies(1) == weight_walk.MOST_COPIES


def test_a_walk_is_timed_as_the_mean_of_its_calls(monkeypatch):
    walk = weight_walk.WeightWalk()
    monkeypatch.setattr(weight_walk.WeightWalk, "of_weight", [torch.zeros(1)] * 5)
    watch = weight_walk.WalkStopwatch.__new__(weight_walk.WalkStopwatch)
    watch._walk, watch._copies, watch._graphs = walk, [], {"of another problem": None}
    monkeypatch.setattr(CudaStopwatch, "warm_up", lambda self, name, call: None)
    monkeypatch.setattr(CudaStopwatch, "capture", lambda self, call, count: f"{count} calls")
    monkeypatch.setattr(CudaStopwatch, "time_graph", lambda self, name, graph: 50.0)
    watch.warm_up("x", lambda: None)
    assert watch._graphs == {"x": "5 calls"}
    assert watch.time_call("x", lambda: None) == 10.0
    assert watch.capture(lambda: None, 8) is None, "DeviceTimer would time graphs of its own"
    monkeypatch.setattr(CudaStopwatch, "capture", lambda self, call, count: None)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        watch.warm_up("x", lambda: None)


# What the figures say


def test_figures_have_mean_percentiles_and_worst_with_their_problems():
    rows = [row(one, choice=100.0 + one.m, other=100.0, vendor=200.0) for one in problems(*range(1, 101))]
    of_set = held_out_figures.figures(rows)["fp8_row"]
    assert of_set["problems"] == 100
    assert of_set["regret"]["p50"] == {"ratio": 1.5, "problem": str(problems(50)[0])}
    assert of_set["regret"]["p99"]["ratio"] == 1.99
    assert of_set["regret"]["worst"] == {"ratio": 2.0, "problem": str(problems(100)[0])}
    assert of_set["torch_over_ours"]["worst"] == {"ratio": 1.0, "problem": str(problems(100)[0])}
    assert of_set["torch_over_ours"]["p50"]["ratio"] == pytest.approx(200 / 150, abs=1e-4)
    assert 1.45 < of_set["regret"]["geomean"] < 1.5
    assert of_set["coverage_of_90"] is None


def test_figures_are_by_set_grade_and_bucket_of_m():
    groups = held_out_figures.figures([row(one, choice=10.0, vendor=9.0) for one in problems(1, 9, 5000)])
    assert list(groups) == ["fp8_row", "fp8_row, nearest shape", "fp8_row, m 1", "fp8_row, m 2-16", "fp8_row, m 1025-"]


def test_a_problem_that_torch_cannot_run_has_a_regret_and_no_ratio():
    found = held_out_figures.figures([row(problems(3)[0], choice=10.0, other=8.0)])["fp8_row"]
    assert found["regret"]["worst"]["ratio"] == 1.25
    assert found["torch_over_ours"] is None


def test_a_problem_with_one_candidate_has_nothing_to_regret():
    one, two = problems(3, 4)
    rows = [row(one, choice=10.0), row(two, choice=12.0, other=10.0)]
    found = held_out_figures.figures(rows)["fp8_row"]
    assert (found["problems"], found["without_alternative"]) == (2, 1)
    assert found["regret"]["geomean"] == 1.2
    alone = held_out_figures.figures(rows[:1])
    assert alone["fp8_row"]["regret"] is None
    report = {"groups": alone, "rows": []}
    assert "fp8_row" in held_out_figures.table(report)


def test_a_choice_without_a_time_has_no_row():
    assert row(problems(3)[0], other=8.0) is None


def test_wrong_values_and_older_kernels_are_no_times():
    [problem] = problems(4)
    taken = [
        sample(problem, CHOICE, 3.0),
        sample(problem, OTHER, 1.0, digest="0" * 64),
        sample(problem, VENDOR, 0.0, status="wrong"),
    ]
    assert held_out_figures.right_samples(taken, lambda config: "") == {problem.key: {CHOICE: taken[0]}}


def test_noise_is_what_a_second_pass_does_not_confirm():
    noisy, lasting, unseen = problems(1, 2, 3)
    rows = [row(one, choice=12.0, other=10.0, vendor=20.0) for one in (noisy, lasting, unseen)]
    again = [row(noisy, choice=10.1, other=10.0, vendor=20.0), row(lasting, choice=11.9, other=10.0, vendor=20.0)]
    found = held_out_figures.with_second_pass(rows, again)
    assert [one.get("is_noise") for one in found] == [True, False, None]
    assert found[0]["again"]["regret"] == 1.01
    of_set = held_out_figures.figures(found)["fp8_row"]
    assert of_set["regret"]["worst"]["ratio"] == of_set["regret_without_noise"]["worst"]["ratio"] == 1.2


def test_the_worst_are_by_regret_or_by_torchs_lead():
    slow, behind, good = problems(1, 2, 3)
    rows = [
        row(good, choice=10.0, other=10.1, vendor=12.0),
        row(slow, choice=12.0, other=10.0, vendor=13.0),
        row(behind, choice=13.0, other=14.0, vendor=10.0),
    ]
    assert [one["m"] for one in held_out_figures.worst(rows, 2)] == [2, 1]


def test_coverage_counts_the_times_within_their_interval():
    chosen = Choice(config=CHOICE, median_us=10.0, spread_us=0.0, run="", interval_us=(9.0, 12.0))
    rows = []
    for problem, us in zip(problems(1, 2, 3, 4), (10.0, 11.9, 12.1, 8.0)):
        estimated = dataclasses.replace(decision(problem), chosen=chosen)
        times = {CHOICE: sample(problem, CHOICE, us)}
        rows.append(held_out_figures.row_of("fp8_row", str(problem), problem.key.m, estimated, times))
    rows.append(row(problems(5)[0], choice=100.0))  # it was measured, not estimated
    assert held_out_figures.figures(rows)["fp8_row"]["coverage_of_90"] == 0.5
