"""The benchmark without a GPU: what is not checked gets no figure, what is missing is listed, the
summary's arithmetic, and the cases' own products against plain ones."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch
from bench_rows import ROWS, report, row, wrong

from stoneware.measuring import operands
from stoneware.measuring.device_timer import Timing, TimingFailed
from stoneware.runtime import device
from tools.gpu_check import bench, bench_cases, bench_summary, document, first_call
from tools.gpu_check.bench_cases import FAMILIES, OURS, Call, Workload

CPU = torch.device("cpu")


def test_speedups_are_geometric_means_over_what_was_measured():
    found = {(item["family"], item["peer"], item["most_m"]): item for item in bench_summary.speedups(ROWS)}
    of_row = found["scaled_mm", "torch_row", 128]
    assert (of_row["geomean"], of_row["least"], of_row["num_shapes"]) == (pytest.approx(4), 2, 2)
    assert found["scaled_mm", "torch_row", None]["least_at"] == "down, m=512"
    assert found["scaled_mm", "torch_row", None]["geomean"] == pytest.approx(2)
    fastest = found["scaled_mm", bench_summary.FASTEST, None]
    assert fastest["geomean"] == pytest.approx((2 * 0.5 * 0.5) ** (1 / 3))
    # 64 rows in each of 16 groups are few, though 1024 in all.
    assert found["grouped_mm", "torch_grouped", 128]["num_shapes"] == 1
    assert ("grouped_mm", bench_summary.FASTEST, None) not in found


def test_the_floor_is_the_weight_over_the_bandwidth_where_rows_are_few_and_weights_large():
    rows = [
        row(64, stoneware=20.0),  # 43 MB take 10 us
        row(1, stoneware=40.0, layer="other"),
        row(65, stoneware=100.0),
        row(1, stoneware=100.0, weight_bytes=3.2e7),
        wrong(1),
    ]
    (floor,) = bench_summary.floors(rows)
    assert floor["geomean"] == pytest.approx(math.sqrt(0.5 * 0.25))
    assert (floor["least"], floor["least_at"]) == (pytest.approx(0.25), "other, m=1")
    assert floor["num_shapes"] == 2


def test_first_calls_are_medians_of_the_processes_that_ended_well():
    runs = [*report()["first_calls"], {"family": "scaled_mm", "call": OURS, "error": "killed"}]
    (found,) = bench_summary.first_calls(runs)
    assert (found["first_call_ms"], found["num_processes"]) == (5.0, 3)
    assert found["import_and_first_call_ms"] == 14.0
    assert found["errors"] == ["killed"]
    assert found["full_collections"] == 3
    uncounted = [{name: run[name] for name in run if name != "full_collections"} for run in runs]
    assert bench_summary.first_calls(uncounted)[0]["full_collections"] is None


def test_the_one_number_of_a_first_use_is_that_of_the_slowest_family():
    (run, *_) = report()["first_calls"]
    runs = [
        run,
        {**run, "family": "matmul", "import_and_first_call_ms": 20.0},
        {**run, "family": "matmul", "import_and_first_call_ms": 90.0},
        {**run, "family": "matmul", "import_and_first_call_ms": 22.0},
        {**run, "family": "matmul", "call": "torch_mm", "first_call_ms": 7.0, "import_and_first_call_ms": 99.0},
        {"family": "grouped_mm", "call": OURS, "error": "killed"},
    ]
    found = bench_summary.import_and_first_call(runs)
    assert found == {
        "family": "matmul", "ms": 22.0, "num_processes": 3, "full_collections": 3, "torch_first_call_ms": 7.0
    }  # fmt: skip
    said = "take 22.0 ms in the slowest family, matmul, bf16: the median of 3 processes, which ran 3 full"
    assert said in bench_summary.to_markdown(report(first_calls=runs))
    assert bench_summary.import_and_first_call(runs[-1:]) is None


def test_full_collections_are_counted_and_others_are_not():
    with first_call.full_collections() as seen:
        gc.collect(0)
        gc.collect(1)
        assert len(seen) == 0
        gc.collect()
    gc.collect()
    assert len(seen) == 1


def test_the_page_has_every_family_and_every_shape():
    text = bench_summary.to_markdown(report(problems=["matmul o m=16:\nno figure"]))
    assert "an L2 that holds lines that were read of another buffer" in text
    assert "lines that were written" in bench_summary.to_markdown(report(l2="dirty"))
    assert "| scaled_mm, fp8 with row scales | torch_row | up to 128 | 4.000 | 2.000 | o, m=1 | 2 |" in text
    assert "- PROBLEM: matmul o m=16: no figure\n" in text
    assert "| scaled_mm, fp8 with row scales | stoneware | - | - | 9.0 | 5.00 | 14.0 | 0.040 | 3 | 3 |" in text
    assert "| matmul, bf16 | stoneware | 5.0 ± 0.2 | 5.0 ± 0.2 | - | - | - | - | - | - |" in text
    assert "| o | 16 | 64 | 32 | - | `sm90:x` | exact | - | - | - | - | - | - |" in text
    assert text.count("\n| o |") + text.count("\n| down |") == len(ROWS)


def test_what_fails_a_run():
    good = report(rows=[ROWS[0]])
    assert bench.problems_of(good) == [] and bench.why_no_figure(ROWS[0]) == []
    assert bench.why_no_figure(wrong(16)) == ["no figure: relative error 0.5"]
    (run, *_) = good["first_calls"]
    slow = {**run, "import_and_first_call_ms": 120.0, "outside": ["open 'x' for writing"]}
    problems = bench.problems_of(report(first_calls=[slow], host_failures={"matmul": "OSError"}))
    for said in (
        "took 120.0 ms with its import and must take under 100 ms", "reached outside: open 'x' for writing",
        "matmul: no host time: OSError",
    ):  # fmt: skip
        assert any(said in problem for problem in problems), said
    assert len(problems) == 3
    failed = {"family": "grouped_mm", "call": OURS, "error": "no such op"}
    assert bench.problems_of(report(first_calls=[failed])) == ["the first call of grouped_mm failed: no such op"]


def test_the_json_has_a_row_a_line_and_reads_back():
    text = document.to_json(report())
    assert json.loads(text) == report()
    assert json.loads(document.to_json({"a": {1: [], 2: {}, "b": [1, "x", {"c": [[0]]}]}})) == {
        "a": {"1": [], "2": {}, "b": [1, "x", {"c": [[0]]}]}
    }
    assert sum('"device_us"' in line for line in text.splitlines()) == len(ROWS) - 1


def test_only_right_calls_are_timed():
    case = FAMILIES["matmul"].make(Workload(layer="x", m=8, n=32, k=64), CPU)
    a, b = case.a, case.b

    def half_written(out):
        out[:4] = a[:4] @ b
        return out

    def refuses(out):
        raise RuntimeError("not on this device")

    calls = {
        OURS: Call(load=lambda: half_written),
        "right": Call(load=lambda: lambda out: a @ b, takes_out=False),
        "refuses": Call(load=lambda: refuses),
        "elsewhere": Call(load=lambda: lambda out: (a @ b).float(), takes_out=False),
    }
    right, checks = bench.right_calls(case.__class__(**{**vars(case), "calls": calls}), "bf16")
    assert list(right) == ["right"]
    assert checks[OURS].errors[OURS] is None  # NaN is left where nothing was written
    assert "not on this device" in checks["refuses"].wrong[0]
    assert "gave torch.float32" in checks["elsewhere"].wrong[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cases_product_is_that_of_the_scaled_matrices(name, monkeypatch):
    monkeypatch.setattr(operands, "_CHUNK_BYTES", 8 * 256 * 128)  # so that there are chunks
    groups = 5 if name.startswith("grouped") else 0
    case = FAMILIES[name].make(Workload(layer="x", m=300, n=272, k=256, groups=groups), CPU)
    scales = case.calls[OURS].scales
    got = case.expected(case.calls[OURS]).double()
    if groups:
        assert len(case.ends) == groups and case.ends[-1] == 300
        owner = torch.bucketize(torch.arange(300), torch.tensor(case.ends), right=True)
        want = torch.stack([case.a[i].float().double() @ case.b[owner[i]].float().double() for i in range(300)])
        if scales:
            want *= scales[0][:, None].double() * scales[1][owner].double()
    elif name == "scaled_mm_block":
        assert [list(scale.shape) for scale in scales] == [[300, 2], [2, 3]]
        k_block, n_block = torch.arange(256) // 128, torch.arange(272) // 128
        a = case.a.float().double() * scales[0][:, k_block].double()
        want = a @ (case.b.float().double() * scales[1][k_block][:, n_block].double())
    else:
        want = case.a.float().double() @ case.b.float().double()
        for scale in scales:
            want *= scale.double()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["scaled_mm", "matmul"])
def test_ours_is_right_by_the_case(name):
    family = FAMILIES[name]
    case = family.make(Workload(layer="x", m=48, n=64, k=128), CPU)
    right, checks = bench.right_calls(case, family.dtype)
    assert OURS in right, checks
    decided = bench.decide(family, Workload(layer="x", m=48, n=64, k=128), device.CPU)
    assert decided["config"].startswith("reference") and decided["decided_by"]


def test_workloads_are_those_that_the_family_takes():
    assert len(FAMILIES["matmul"].workloads("bench")) == 11 * 7
    assert all(item.k % 128 == 0 for item in FAMILIES["scaled_mm_block"].workloads("all"))
    assert len(FAMILIES["scaled_mm"].workloads("all")) > 2 * 11 * 7
    experts = FAMILIES["grouped_mm"].workloads("bench")
    assert {item.groups for item in experts} >= {8, 256}
    assert {item.m // item.groups for item in experts} == set(bench_cases.TOKENS_PER_EXPERT)
    assert max(item.m for item in experts) <= bench_cases.MAX_ROUTED_TOKENS


def test_weight_bytes_leave_out_groups_without_rows():
    case = FAMILIES["grouped_mm"].make(Workload(layer="x", m=1, n=32, k=16, groups=4), CPU)
    assert case.weight_bytes == 32 * 16 * 2
    assert case.num_bytes == 32 * 16 * 2 + 16 * 2 + 32 * 2


class FakeTimer:
    """Takes 7 us for every call; `failing` names the one that fails when it is timed."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing = failing

    def time(self, calls, *, rounds, max_seconds):
        for name, call in calls.items():
            if name == self.failing:
                raise TimingFailed(name, RuntimeError("lost"))
            call()
        return {name: Timing.of([6.0, 7.0, 8.0]) for name in calls}


def prepared() -> tuple[dict, dict]:
    row = {"family": "matmul", "layer": "x", "m": 8, "n": 32, "k": 64, "groups": 0}
    more, calls = bench.prepare(row, device.CPU)
    return row | more, calls


def test_a_peer_that_fails_when_it_is_timed_leaves_the_others_their_figures():
    row, calls = prepared()
    figures = bench.time_calls(calls, 1.0, row, FakeTimer("torch_mm"), 3)
    assert set(figures) == {OURS}
    assert figures[OURS]["median_us"] == 7.0
    assert "lost" in row["no_figure"]["torch_mm"]
    assert (row["weight_bytes"], row["m"], row["family"]) == (32 * 64 * 2, 8, "matmul")
    with pytest.raises(TimingFailed):
        bench.time_calls(calls, 1.0, row, FakeTimer(OURS), 3)


def test_nothing_is_timed_where_ours_is_wrong(monkeypatch):
    monkeypatch.setattr(operands, "compare_within", lambda *_: operands.Comparison(error=1, element_error=1, limit=0))
    row, calls = prepared()
    assert calls == {} and "relative error 1" in row["no_figure"][OURS]


def test_the_program_measures_all_and_goes_on_with_what_it_lacks(tmp_path, monkeypatch, capsys):
    family, ran, runs = FAMILIES["matmul"], [], report()["first_calls"]
    workloads = [Workload(layer="x", m=m, n=32, k=64) for m in (1, 2, 3)]
    small = {**vars(family), "first": workloads[0], "workloads": lambda weights: workloads}
    monkeypatch.setitem(FAMILIES, "matmul", family.__class__(**small))
    monkeypatch.setattr(bench, "installed", lambda: {"num_files": 1, "num_bytes": 1})
    monkeypatch.setattr(bench, "cuda_device", lambda ordinal: device.CPU)
    monkeypatch.setattr(bench, "CudaStopwatch", lambda *_: None)
    monkeypatch.setattr(bench, "DeviceTimer", lambda *_: FakeTimer())
    monkeypatch.setattr(bench.Bench, "ordinal", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda ordinal: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        bench, "first_calls", lambda names, _: ran.append("first") or [{**run, "family": "matmul"} for run in runs]
    )
    prepare = bench.prepare
    monkeypatch.setattr(bench, "prepare", lambda row, device: ran.append(row["m"]) or prepare(row, device))
    values = {"out": tmp_path, "commit": "c0ffee", "wheel_sha256": "w", "command": "bench", "device": 0}
    values |= {"families": ["matmul"], "workloads": "bench", "rounds": 3, "seconds": 100.0, "seconds_per_shape": 1.0}
    values |= {"l2": "clean", "processes": 1}

    def run(**changed):
        return bench.Bench(types.SimpleNamespace(**{**values, **changed})).run()

    assert run(seconds=0.0) == 1
    assert "FAILED bench: time was over before 3 cases; the same command goes on with them" in capsys.readouterr().out
    assert run() == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["device_us"][OURS]["median_us"] for row in found["rows"]] == [7.0] * 3
    assert found["host_us"]["matmul"]["out"][OURS]["count"] == 12 * 25
    assert "| matmul, bf16 | torch_mm | all | 1.000 |" in (tmp_path / "bench.md").read_text()
    assert run() == 0
    assert ran == ["first", 1, 2, 3]


def test_a_process_that_cannot_measure_its_first_call_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (found,) = first_call.in_new_process("matmul")
    assert (found["family"], found["call"]) == ("matmul", OURS)
    assert "first_call must end with exit code 0 and ended with 1" in found["error"]
    assert "CUDA" in found["error"]


def test_first_calls_import_stoneware_only_when_the_clock_runs():
    code = "import sys, tools.gpu_check.first_call; sys.exit('stoneware' in sys.modules)"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
