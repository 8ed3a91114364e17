"""gpu_check.pyz deep_gemm without a GPU or DeepGEMM: what is padded, compared and refused, and the ratios."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import walks

from stoneware.measuring import operands
from stoneware.runtime.device import CPU
from tools.gpu_check import deep_gemm_bench, walk_experiment
from tools.gpu_check.deep_gemm_bench import CONTIGUOUS, DENSE, MASKED, OURS, ROW_MAJOR

BLOCK = 128


def product(a, scale_a, b, scale_b):
    rows = scale_a.repeat_interleave(BLOCK, 1)
    matrix = scale_b.repeat_interleave(BLOCK, 0)[: len(b)].repeat_interleave(BLOCK, 1)
    return (a.float().double() * rows) @ (b.float().double() * matrix).t()


class Peer(types.ModuleType):
    """DeepGEMM in plain torch, which checks what the kernels of DeepGEMM expect of their arguments."""

    __version__ = "0.0"
    is_wrong = False

    def get_mn_major_tma_aligned_tensor(self, scales):
        assert scales.is_contiguous()
        return scales.mT.contiguous().mT

    def fp8_gemm_nt(self, a, b, out, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast and all(tensor.is_contiguous() for tensor in (a[0], *b, out))
        out.copy_(product(*a, *b) * (2 if self.is_wrong else 1))

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, out, groups, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast and len(groups) == len(a[0]) == len(out) and len(groups) % 128 == 0
        assert all(len(set(tile.tolist()) - {-1}) <= 1 for tile in groups.split(128)), "a tile has rows of two groups"
        for group in range(len(b[0])):
            rows = groups == group
            out[rows] = product(a[0].float()[rows], a[1][rows], b[0][group], b[1][group]).to(out.dtype)

    def m_grouped_fp8_gemm_nt_masked(self, a, b, out, counts, expected, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast and counts.dtype == torch.int32 and expected >= 1
        assert a[0].shape[0] == len(counts) == len(out) and int(counts.max()) <= a[0].shape[1] == out.shape[1]
        for group, count in enumerate(counts.tolist()):
            out[group, :count] = product(a[0][group, :count], a[1][group, :count], b[0][group], b[1][group])


@pytest.fixture
def peer(monkeypatch):
    module = Peer("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def case(kind="dense", groups=0, m=20, n=160, k=384):
    return {"kind": kind, "groups": groups, "m": m, "n": n, "k": k}


GROUPED = case("grouped", groups=3, m=150)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (case(), [OURS, ROW_MAJOR, DENSE]),
        (GROUPED, [OURS, CONTIGUOUS, MASKED]),
        (case("grouped", groups=5, m=1), [OURS, CONTIGUOUS, MASKED]),
        (case("grouped", groups=2, m=257, k=128), [OURS, CONTIGUOUS]),
    ],
)
def test_all_compute_the_same_problem(peer, row, names):
    made, calls = deep_gemm_bench.prepare(row, CPU, walks.walk)
    assert list(calls) == names
    assert all(check["is_right"] and 0 < check["errors"][name] < 0.004 for name, check in made["checks"].items())


def test_a_walk_calls_with_each_copy_of_the_weight_once(peer, monkeypatch):
    monkeypatch.setattr(walk_experiment, "num_copies", lambda num_bytes: 3)
    weights = []
    peer.fp8_gemm_nt = lambda a, b, out, **flags: weights.append(b[0]) or Peer.fp8_gemm_nt(peer, a, b, out, **flags)
    made, calls = deep_gemm_bench.prepare(case(), CPU, walks.walk)
    weights.clear()
    calls[DENSE]()
    assert made["copies"] == len({weight.data_ptr() for weight in weights}) == 3
    assert all(torch.equal(weight.float(), weights[0].float()) for weight in weights)


def test_a_walk_that_cannot_be_captured_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be captured"):
        walk_experiment.replay(types.SimpleNamespace(capture=lambda run, pairs: None), print, [])


def measured(folder, monkeypatch, chosen) -> tuple[int, dict]:
    us = {OURS: 10.0, ROW_MAJOR: 11.0, DENSE: 12.0, CONTIGUOUS: 8.0, MASKED: 20.0}
    walks.replace(monkeypatch, us.__getitem__)
    monkeypatch.setattr(deep_gemm_bench, "cases", lambda kinds: [row for row in chosen if row["kind"] in kinds])
    values = types.SimpleNamespace(
        out=folder, commit="c0ffee", wheel_sha256="w", command="python3 gpu_check.pyz", device=0, rounds=3,
        seconds=60.0, seconds_per_case=1.0, kinds=["dense", "grouped"], compile_processes=0,
    )  # fmt: skip
    code = deep_gemm_bench.DeepGemmBench(values).run()
    return code, json.loads((folder / "deep_gemm.json").read_text())


def test_figures_are_of_one_call_and_ratios_of_a_kind_and_m(peer, tmp_path, monkeypatch):
    code, report = measured(tmp_path, monkeypatch, [case(), case(n=128), GROUPED])
    assert (code, report["deep_gemm"]) == (0, "0.0")
    assert report["rows"][0]["device_us"][DENSE]["median_us"] == 12.0
    summary = {
        (item["kind"], item["peer"]): (item["m"], item["geomean"], item["num_problems"]) for item in report["summary"]
    }
    assert summary == {
        ("dense", DENSE): (20, 1.2, 2),
        ("dense", ROW_MAJOR): (20, 1.1, 2),
        ("grouped", CONTIGUOUS): (150, 0.8, 1),
        ("grouped", MASKED): (150, 2.0, 1),
    }
    assert f"| dense | 20 | {DENSE} | 1.200 | 1.200 | 160x384 | 2 |" in (tmp_path / "deep_gemm.md").read_text()


def test_a_wrong_result_has_no_figure_and_fails(peer, tmp_path, monkeypatch):
    peer.is_wrong = True
    code, report = measured(tmp_path, monkeypatch, [case()])
    assert code == 1 and DENSE not in report["rows"][0]["device_us"]
    assert [item["peer"] for item in report["summary"]] == [ROW_MAJOR]
    assert f"{DENSE}: relative error 1 must be below" in report["problems"][0]


def test_without_deep_gemm_the_error_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(SystemExit, match="deep_gemm must be importable .*; build DeepGEMM"):
        measured(tmp_path, monkeypatch, [case()])


def test_a_peer_that_refuses_is_reported(peer, tmp_path, monkeypatch):
    def refuse(*arguments, **flags):
        raise RuntimeError("no kernel for this shape")

    peer.fp8_gemm_nt = refuse
    code, report = measured(tmp_path, monkeypatch, [case()])
    assert code == 1 and "no kernel for this shape" in report["problems"][0]


def test_what_deep_gemm_refuses_keeps_no_other_kernel_from_being_compiled(peer, monkeypatch):
    calls = []
    peer.m_grouped_fp8_gemm_nt_contiguous = lambda *arguments, **flags: 1 / 0
    peer.m_grouped_fp8_gemm_nt_masked = lambda *arguments, **flags: calls.append("masked")
    make = operands.make
    monkeypatch.setattr(operands, "make", lambda problem, device: make(problem, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert deep_gemm_bench.compile_kernels(GROUPED) == ["ZeroDivisionError: division by zero"]
    assert calls == ["masked"]


def test_every_problem_is_valid_and_drawn_once():
    chosen = deep_gemm_bench.cases(["dense", "grouped"])
    problems = [deep_gemm_bench.problem_of(row) for row in chosen]
    assert len({problem.key for problem in problems}) == len(chosen)
    assert all(problem.k % BLOCK == 0 for problem in problems)
    assert any(row["m"] % 2 for row in chosen)
    assert max(problem.m for problem in problems) <= deep_gemm_bench.MOST_ROWS


def test_ragged_groups_end_within_their_padding(peer):
    tensors = operands.make(deep_gemm_bench.problem_of(GROUPED), "cpu")
    counts = tensors.offs.diff(prepend=tensors.offs.new_zeros(1))
    rows = deep_gemm_bench.contenders(tensors)[MASKED].rows
    assert len(set(counts.tolist())) > 1 and len(rows) == int(counts.sum())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
