"""sw.autotune's and sw.batch_invariant's programs without a GPU: what they report, and what they go on with."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from stoneware.runtime.device import CPU
from tools.gpu_check import autotune_bench, batch_invariance
from tools.gpu_check.autotune_bench import OURS, TRITON

ORIGIN = {"commit": "c0ffee", "wheel_sha256": "w", "command": "python3 gpu_check.pyz", "device": 0}


def run_of(first_ms: float, **changed) -> dict:
    run = {"first_launch_ms": first_ms, "second_launch_ms": 0.1, "error": 3e-4, "config": "BM: 64"}
    return {**run, "asked_triton_key": False, "made_triton_driver": False, **changed}


def autotune(folder, monkeypatch, runs, launched) -> tuple[int, dict]:
    def first(*arguments):
        launched.append("first")
        return runs

    def launches(*arguments):
        launched.append("each")
        return {f"{name}, tuple grid": [14.0, 15.0, 16.0] for name in (OURS, TRITON)}

    monkeypatch.setattr(autotune_bench, "first_launches", first)
    monkeypatch.setattr(autotune_bench, "launches", launches)
    monkeypatch.setattr(autotune_bench.Autotune, "ordinal", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda ordinal: None)
    values = types.SimpleNamespace(**ORIGIN, out=folder, processes=2, rounds=3, size=512)
    code = autotune_bench.Autotune(values).run()
    return code, json.loads((folder / "autotune.json").read_text())


def test_autotune_compares_first_launches_and_each_launch_and_does_not_measure_twice(tmp_path, monkeypatch):
    launched = []
    runs = {OURS: [run_of(16.0), run_of(18.0)], TRITON: [run_of(400.0), run_of(450.0)]}
    code, report = autotune(tmp_path, monkeypatch, runs, launched)
    assert (code, report["first_launch_ratio"]) == (0, 25.0)
    assert report["first_launch_ms"][OURS]["count"] == 2
    page = (tmp_path / "autotune.md").read_text()
    assert "| stoneware.autotune | 17.0 ± 1.0 | 0.100 ± 0.000 |" in page
    assert "| triton.autotune, tuple grid | 15.0 ± 1.0 |" in page
    autotune(tmp_path, monkeypatch, runs, launched)
    assert launched == ["first", "each"]


def test_a_wrong_result_or_a_launch_that_asks_triton_fails(tmp_path, monkeypatch):
    runs = {OURS: [run_of(16.0, asked_triton_key=True)], TRITON: [run_of(400.0, error=0.5)]}
    code, report = autotune(tmp_path, monkeypatch, runs, [])
    assert code == 1
    assert report["problems"] == ["triton.autotune: error 0.5", "stoneware.autotune asked Triton in 1 first launches"]


def test_shapes_whose_cost_is_measured_are_of_all_groups_and_depend_on_the_seed_alone():
    cases = batch_invariance.cost_cases(1)
    assert len(cases) == 1104 and cases == batch_invariance.cost_cases(1) != batch_invariance.cost_cases(2)
    assert {case["group"] for case in cases[:50]} == {"benchmark", "layers", "random"}
    assert all(case["m"] % 4 == 0 for case in cases if case["kind"] == "fp8 block")


BITS = {"by_kind": {"bf16 nt": {"pairs": 8, "rows": 80, "rows_that_differ": 0}}, "digest": "d1", "differing": []}


def invariance(folder, monkeypatch, prepare, bits=BITS, seconds=1e9) -> tuple[int, dict]:
    class Timer:
        def __init__(self, ordinal):
            pass

        def time(self, calls, *, rounds, max_seconds):
            times = {"invariant": 11.0, "free": 10.0, "torch": 22.0}
            return {name: types.SimpleNamespace(median_us=times[name]) for name in calls}

    monkeypatch.setattr(batch_invariance, "bits", lambda pairs, seed: bits)
    monkeypatch.setattr(batch_invariance, "prepare", prepare)
    monkeypatch.setattr(batch_invariance, "DeviceTimer", Timer)
    monkeypatch.setattr(batch_invariance, "cuda_device", lambda ordinal: CPU)
    monkeypatch.setattr(batch_invariance, "cost_cases", lambda seed: CASES)
    monkeypatch.setattr(batch_invariance.BatchInvariance, "ordinal", None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    values = types.SimpleNamespace(**ORIGIN, out=folder, pairs=8, seed=1, cost_seconds=seconds)
    code = batch_invariance.BatchInvariance(values).run()
    return code, json.loads((folder / "batch_invariance.json").read_text())


CASES = [{"kind": "bf16 nt", "group": "random", "m": m, "n": 128, "k": 256} for m in (1, 16)]


def prepared(case, device):
    return {"config": "vendor:x", "free": "a", "wrong": []}, dict.fromkeys(("invariant", "free", "torch"), int)


def test_the_cost_is_the_invariant_time_over_the_free_one(tmp_path, monkeypatch):
    code, report = invariance(tmp_path, monkeypatch, prepared)
    assert code == 0
    means = report["cost"]["summary"]["bf16 nt, random"]
    assert (means["problems"], means["cost"], means["torch_over_ours"], means["vendor"]) == (2, 1.1, 2.0, 2)
    assert "bits: 8 pairs, 80 rows, 0 rows_that_differ; d1" in (tmp_path / "batch_invariance.txt").read_text()


def test_without_seconds_for_the_cost_the_bits_are_the_report(tmp_path, monkeypatch):
    code, report = invariance(tmp_path, monkeypatch, prepared, seconds=0.0)
    assert (code, report["bits"]["digest"]) == (0, "d1") and "cost" not in report


def test_a_wrong_value_and_a_row_that_differs_fail(tmp_path, monkeypatch):
    def wrong(case, device):
        return {**prepared(case, device)[0], "wrong": ["free: off"]}, {}

    code, report = invariance(tmp_path, monkeypatch, wrong, {**BITS, "differing": ["bf16 nt rows 0+1"]})
    assert code == 1
    assert len(report["problems"]) == 3 and report["problems"][-1] == "differs: bf16 nt rows 0+1"
    assert not any("us" in row for row in report["rows"])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
