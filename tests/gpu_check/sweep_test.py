"""gpu_check.pyz sweep without a GPU: what is compared at each m, what a dip is, and the ratios."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import walks

import stoneware as sw
from stoneware.runtime.device import CPU
from tools.gpu_check import sweep
from tools.gpu_check.sweep import MM, OURS, ROW, SETS, TENSOR


def torch_scaled_mm(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum, out):
    return out.copy_((a.float().double() * scale_a) @ (b.float().double() * scale_b))


@pytest.fixture(autouse=True)
def peer(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", torch_scaled_mm)


def case(name: str):
    return {"set": name, "n": 160, "k": 256}


@pytest.mark.parametrize("name", SETS)
def test_every_call_is_right_at_every_m(name):
    row, calls = sweep.prepare(case(name), CPU, [7, 16, 40], walks.walk)
    peers = {"fp8_row": [OURS, ROW, TENSOR], "fp8_block": [OURS], "bf16": [OURS, MM]}[name]
    assert list(calls) == [f"{peer}, m={m}" for peer in peers for m in (7, 16, 40)]
    assert all(0 < check["largest_error"] < 0.004 for check in row["checks"].values())


def test_block_scales_are_column_by_column_at_each_m(monkeypatch):
    strides = set()
    ours = sw.scaled_mm

    def scaled_mm(a, b, scale_a, scale_b, out):
        strides.add((len(a), scale_a.stride()))
        return ours(a, b, scale_a, scale_b, out=out)

    monkeypatch.setattr(sweep.sw, "scaled_mm", scaled_mm)
    sweep.prepare(case("fp8_block"), CPU, [8, 40], walks.walk)
    assert strides == {(8, (1, 8)), (40, (1, 40))}


def test_rows_that_a_call_leaves_out_are_wrong(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out[:-1].copy_(a[:-1] @ b))
    row, calls = sweep.prepare(case("bf16"), CPU, [8, 16], walks.walk)
    assert "m=8: relative error inf" in row["checks"][MM]["detail"]
    assert list(calls) == [f"{OURS}, m=8", f"{OURS}, m=16"]


def test_a_dip_is_over_the_fastest_larger_m():
    found = sweep.dips([96, 104, 112, 120], [10.0, 12.0, 11.0, 15.0])
    assert [(m, faster) for _, m, faster in found] == [(96, 112), (104, 112), (112, 120)]
    assert [dip for dip, *_ in found] == pytest.approx([-1 / 11, 1 / 11, -4 / 15])


def measured(folder, monkeypatch, sets) -> tuple[int, dict]:
    us = {OURS: 10.0, ROW: 15.0, TENSOR: 11.0, MM: 9.0}
    walks.replace(monkeypatch, lambda name: 12.0 if name == f"{OURS}, m=104" else us[name.rpartition(",")[0]])
    monkeypatch.setattr(sweep, "WEIGHTS", ((160, 256),))
    values = types.SimpleNamespace(
        out=folder, commit="c0ffee", wheel_sha256="w", command="python3 gpu_check.pyz", device=0, rounds=3,
        seconds=60.0, seconds_per_case=9.0, sets=sets, first=96, last=136, step=8,
    )  # fmt: skip
    code = sweep.Sweep(values).run()
    return code, json.loads((folder / "sweep.json").read_text())


def test_the_report_has_dips_and_the_fastest_of_torchs_kernels(tmp_path, monkeypatch):
    code, report = measured(tmp_path, monkeypatch, ["fp8_row", "bf16"])
    assert code == 0
    assert report["rows"][0]["device_us"][OURS]["median_us"] == [10.0, 12.0, 10.0, 10.0, 10.0, 10.0]
    smooth = report["summary"]["smoothness"][0]
    assert (smooth["largest_dip"], smooth["at"], smooth["above_limit"], smooth["num_m"]) == (0.2, 104, 1, 6)
    found = {
        (item["set"], item["band"]): (item["least"], item["num_problems"]) for item in report["summary"]["speedups"]
    }
    assert found == {
        ("fp8_row", "96 to 128"): (round(11 / 12, 4), 5),
        ("fp8_row", "129 to 256"): (1.1, 1),
        ("bf16", "96 to 128"): (0.75, 5),
        ("bf16", "129 to 256"): (0.9, 1),
    }
    page = (tmp_path / "sweep.md").read_text()
    assert "| fp8_row | 160x256 | 20.0 % | 104 |" in page and "| bf16 | 129 to 256 | 0.900 |" in page


def test_a_wrong_result_fails_and_has_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.sw, "matmul", lambda a, b, out: out.fill_(1.0))
    code, report = measured(tmp_path, monkeypatch, ["bf16"])
    assert code == 1 and "device_us" not in report["rows"][0]
    assert report["summary"] == {"smoothness": [], "speedups": []}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
