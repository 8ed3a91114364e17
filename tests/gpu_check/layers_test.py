"""gpu_check's layers without a GPU: all parts run at tiny sizes, what is wrong has no figure, and what is
there already is not measured again."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import sys
import types

import pytest
import torch

from tools.gpu_check import layers, layers_clock, layers_linear, layers_peers, layers_summary, layers_train
from tools.gpu_check.layers_clock import Budget, HostClock
from tools.gpu_check.layers_sizes import TINY, TORCH

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers, which no rule provides"
)
ONE_LAYER = dataclasses.replace(TINY, linears={"down": (512, 256)}, linear_tokens=(48,))


def flags_of(folder, **changed):
    values = {
        "out": folder, "parts": ["linear"], "seconds": 100.0, "layers": 0, "steps": 4, "sizes": "tiny", "device": "cpu",
        "commit": "c0ffee", "wheel_sha256": "5ha", "command": "python3 gpu_check.pyz layers --out DIR",
    }  # fmt: skip
    return types.SimpleNamespace(**{**values, **changed})


def test_every_kind_of_linear_is_right_and_timed():
    part = layers_linear.measure(ONE_LAYER, HostClock(), Budget(1.0))
    assert part["problems"] == []
    (row,) = part["rows"]
    assert all(check["is_right"] for check in row["checks"].values()), row["checks"]
    assert len(row["step"]) == 8
    assert all(step["median_ms"] > 0 and step["blocks"] == 2 for step in row["step"].values())


def test_a_wrong_gradient_has_no_figure_and_fails_the_part(monkeypatch):
    right = layers_peers._Rowwise.backward

    def doubled(ctx, gradient):
        return tuple(2 * one for one in right(ctx, gradient))

    monkeypatch.setattr(layers_peers._Rowwise, "backward", staticmethod(doubled))
    contenders = layers_linear._contenders()
    wrong = contenders["torchao's rowwise, compiled"]
    chosen = {
        TORCH: contenders[TORCH],
        "a peer": dataclasses.replace(wrong, is_compiled=False),
        "ours": dataclasses.replace(wrong, is_compiled=False, is_ours=True),
    }
    monkeypatch.setattr(layers_linear, "_contenders", lambda: chosen)
    part = layers_linear.measure(ONE_LAYER, HostClock(), Budget(1.0))
    (row,) = part["rows"]
    assert set(row["step"]) == {TORCH}
    (problem,) = part["problems"]
    assert problem.startswith("ours: down at 48 tokens: dx: torch.bfloat16, relative error ")


def test_a_call_that_raises_leaves_the_others_their_figures():
    counter = itertools.count()
    calls = {"good": lambda: next(counter), "bad": lambda: 1 / 0}
    found = layers_clock.compare(calls, HostClock(), rounds=4, seconds=10.0)
    assert found["bad"] == {"failure": "ZeroDivisionError: division by zero"}
    assert found["good"]["blocks"] == 4
    assert next(counter) == 3 + 3 + 4 * found["good"]["steps_in_block"]


def test_rounds_end_with_the_time_but_not_before_the_third():
    found = layers_clock.compare({"one": lambda: sum(range(1000))}, HostClock(), rounds=9, seconds=0.0)
    assert found["one"]["blocks"] == 3


def test_the_budget_leaves_half_for_preparing():
    now = iter([0.0, 0.0, 8.0, 20.0])
    budget = Budget(10.0, lambda: next(now))
    assert [budget.share(2, 100.0), budget.share(1, 0.5), budget.share(1, 9.0)] == [2.5, 0.5, 0.0]


def test_rows_are_quantized_as_the_triton_kernel_does():
    x = torch.randn(5, 96).bfloat16() * torch.tensor([1.0, 1e-3, 0.0, 300.0, 1.0])[:, None].bfloat16()
    values, scale = layers_peers.quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 1)
    torch.testing.assert_close(values.float() * scale, x.float(), rtol=2**-4, atol=float(scale.max()) * 2**-9)


def test_a_run_that_is_killed_and_resumed_has_the_losses_of_the_whole_run(tmp_path):
    arguments = ["--sizes=tiny", "--device=cpu"]
    runs = layers_train.Runs(tmp_path / "runs", {"wheel": 1}, arguments, 4, Budget(300.0))
    results = {"rowwise": runs.whole("rowwise"), layers_train.KILLED: runs.killed_and_resumed("rowwise")}
    losses, wrong = layers_train.judged(results, 2)
    assert wrong == []
    assert losses[layers_train.KILLED]["first_step"] == 2
    assert losses[layers_train.KILLED]["first_difference"] is None
    assert results["rowwise"]["num_bytes"] > 1e6
    # Results of the same key are read; those of another one are not.
    (tmp_path / "runs" / "rowwise.json").write_text("{}")
    assert layers_train.Runs(tmp_path / "runs", {"wheel": 1}, arguments, 4, Budget(0.0)).whole("rowwise") == {}
    with pytest.raises(layers_train.RunFailed, match="within the part's budget"):
        layers_train.Runs(tmp_path / "runs", {"wheel": 2}, arguments, 4, Budget(0.0)).whole("rowwise")


def test_a_run_that_fails_says_why(tmp_path):
    runs = layers_train.Runs(tmp_path / "runs", {}, ["--sizes=huge", "--device=cpu"], 4, Budget(300.0))
    with pytest.raises(layers_train.RunFailed, match="(?s)must end with 0 and ended with 2:.*invalid choice: 'huge'"):
        runs.whole("torch")


def result_of(*losses, first_step=0):
    return {"losses": list(losses), "first_step": first_step}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"rowwise": result_of(9.0, 2.0, 2.05), layers_train.KILLED: result_of(9.0, 2.0, 2.05, first_step=1)}, "+1.2"),
        ({"blockwise": result_of(9.0, 2.0, 1.9)}, "-2.50% of bf16's and must be within 1%"),
        ({"blockwise": result_of(9.0, 2.0, math.nan)}, "not finite"),
        ({layers_train.KILLED: result_of(9.0, 2.0, 2.001, first_step=1)}, "differ from step 2 on"),
        ({layers_train.KILLED: result_of(9.0, 2.0, first_step=1)}, "differ from step 2 on"),
        ({layers_train.KILLED: result_of(9.0, 2.0, 2.0)}, "must go on from its checkpoint"),
    ],
)
def test_what_fails_the_training(changed, problem):
    names = ("torch", "rowwise", "blockwise")
    results = {name: result_of(9.0, 2.0, 2.0) for name in names}
    results |= {layers_train.KILLED: result_of(9.0, 2.0, 2.0, first_step=1)} | changed
    _, wrong = layers_train.judged(results, 2)
    if problem is None:
        assert wrong == []
    else:
        assert any(problem in one for one in wrong), wrong


def test_parts_are_written_as_they_end_and_not_measured_twice(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(name, *arguments):
        measured.append(name)
        if name == "train":
            raise RuntimeError("no such GPU")
        return {"rows": [], "problems": ["wrong"] if name == "lora" and len(measured) < 4 else []}

    monkeypatch.setattr(layers, "_measure", measure)
    monkeypatch.setattr(layers_summary, "TABLES", {})
    parts = ["linear", "train", "lora"]
    assert layers.measure(flags_of(tmp_path, parts=parts)) == 1
    report = json.loads((tmp_path / "layers.json").read_text())
    assert report["parts"]["train"]["problems"] == ["RuntimeError: no such GPU"]
    assert report["parts"]["linear"]["machine"]["torch"] == torch.__version__
    assert "layers: train: FAILED RuntimeError: no such GPU" in capsys.readouterr().out
    assert "- PROBLEM: wrong" in (tmp_path / "layers.md").read_text()
    assert layers.measure(flags_of(tmp_path, parts=parts)) == 1
    assert measured == [*parts, "train", "lora"]  # what failed is measured again
    assert layers.measure(flags_of(tmp_path, parts=["linear", "lora"])) == 0
    assert layers.measure(flags_of(tmp_path, parts=["train"], steps=5)) == 1
    assert measured == [*parts, "train", "lora", "train"]
    assert layers.measure(flags_of(tmp_path, parts=["lora"], wheel_sha256="another")) == 0
    assert set(json.loads((tmp_path / "layers.json").read_text())["parts"]) == {"lora"}


def test_the_page_has_the_sum_of_the_layers_where_all_have_a_figure():
    def row(layer, **ms):
        step = {name: {"median_ms": one, "spread_ms": 0.1} for name, one in ms.items()}
        checks = {name: {"errors": {"y": 0.01}} for name in ("torch bf16", "ours", "a peer")}
        return {"layer": layer, "tokens": 64, "in": 2, "out": 3, "step": step, "checks": checks}

    rows = [row("o", **{"torch bf16": 4.0, "ours": 2.0}), row("qkv", **{"torch bf16": 6.0, "ours": 3.0, "a peer": 1.0})]
    assert layers_summary.linear_sums(rows) == [{"tokens": 64, "sum_ms": {"torch bf16": 10.0, "ours": 5.0}}]
    table = layers_summary.figures({"parts": {"linear": {"rows": rows}, "train": {"problems": ["it failed"]}}})
    assert "| ours | 2.000 ± 0.100 (2.00) | 3.000 ± 0.100 (2.00) | 5.00 (2.00) | 1.0e-02 |" in table
    assert "| a peer | - | 1.000 ± 0.100 (6.00) | - | 1.0e-02 |" in table
    assert "train" not in table


def page_of_part(name, folder):
    assert layers.measure(flags_of(folder, parts=[name])) == 0
    part = json.loads((folder / "layers.json").read_text())["parts"][name]
    assert all("median_ms" in step for row in part["rows"] for step in row["step"].values())
    return (folder / "layers.md").read_text()


def test_the_part_train_has_losses_and_times(tmp_path, monkeypatch):
    class Runs:
        def __init__(self, *arguments):
            pass

        def whole(self, recipe, suffix=""):
            return result_of(2.0, 2.0) | {"parameters": 5e6, "text": "a text", "num_bytes": 7e6, "sha256": "5ha"}

        def killed_and_resumed(self, recipe):
            return result_of(2.0, 2.0, first_step=1)

    monkeypatch.setattr(layers_train, "Runs", Runs)
    page = page_of_part("train", tmp_path)
    assert "5.0 M parameters, 128 tokens a step of 7.0 MB of a text (sha256 5ha)" in page
    assert "| 2.0000 | - | went on at step 1; the losses of the first |" in page


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", ["inference", "models", "lora"])
def test_a_part_of_transformers_models_runs_at_tiny_sizes(name, tmp_path):
    assert "| stoneware " in page_of_part(name, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is here")
def test_without_transformers_a_part_fails_by_its_name(tmp_path):
    assert layers.measure(flags_of(tmp_path, parts=["lora"])) == 1
    (problem,) = json.loads((tmp_path / "layers.json").read_text())["parts"]["lora"]["problems"]
    assert "transformers" in problem


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
