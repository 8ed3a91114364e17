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

from tools.gpu_check import layers, layers_clock, layers_linear, layers_peers, layers_summary, layers_train, processes
from tools.gpu_check.experiment import Deadline
from tools.gpu_check.layers_clock import HostClock
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


def part_of(folder, monkeypatch, measure, sizes=TINY):
    """The part `linear` of layers.json, measured so."""
    monkeypatch.setitem(layers.PARTS, "linear", (1.0, measure))
    monkeypatch.setitem(layers.BY_NAME, "tiny", sizes)
    layers.Layers(flags_of(folder, seconds=1.0)).run()
    return json.loads((folder / "layers.json").read_text())["parts"]["linear"]


def test_every_kind_of_linear_is_right_and_timed(tmp_path, monkeypatch):
    part = part_of(tmp_path, monkeypatch, layers_linear.measure, ONE_LAYER)
    (row,) = part["rows"]
    assert "problems" not in row and part["is_complete"]
    assert all(check["is_right"] for check in row["checks"].values()), row["checks"]
    assert len(row["step"]) == 10
    assert all(step["median_ms"] > 0 and step["count"] == 2 for step in row["step"].values())


def test_a_wrong_gradient_has_no_figure_and_fails_the_part(tmp_path, monkeypatch):
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
    part = part_of(tmp_path, monkeypatch, layers_linear.measure, ONE_LAYER)
    (row,) = part["rows"]
    assert set(row["step"]) == {TORCH}
    (problem,) = row["problems"]
    assert (
        problem.startswith("layer down, tokens 48, in 512, out 256: ours: dx: relative error ")
        and not part["is_complete"]
    )


def test_a_call_that_raises_leaves_the_others_their_figures():
    counter = itertools.count()
    calls = {"good": lambda: next(counter), "bad": lambda: 1 / 0}
    found = layers_clock.compare(calls, HostClock(), rounds=4, seconds=10.0)
    assert found["bad"] == {"failure": "ZeroDivisionError: division by zero"}
    assert found["good"]["count"] == 4
    assert next(counter) == 3 + 3 + 4 * found["good"]["steps_in_block"]


def test_rows_are_quantized_as_the_triton_kernel_does():
    x = torch.randn(5, 96).bfloat16() * torch.tensor([1.0, 1e-3, 0.0, 300.0, 1.0])[:, None].bfloat16()
    values, scale = layers_peers.quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 1)
    torch.testing.assert_close(values.float() * scale, x.float(), rtol=2**-4, atol=float(scale.max()) * 2**-9)


FOUR_STEPS = dataclasses.replace(TINY, train_steps=4)


def test_a_run_that_is_killed_and_resumed_has_the_losses_of_the_whole_run(tmp_path):
    runs = layers_train.Runs(tmp_path / "runs", FOUR_STEPS, torch.device("cpu"), Deadline(300.0))
    results = {"rowwise": runs.whole("rowwise"), layers_train.KILLED: runs.killed_and_resumed("rowwise")}
    losses, wrong = layers_train.judged(results, 2)
    assert wrong == []
    assert losses[layers_train.KILLED]["first_step"] == 2
    assert losses[layers_train.KILLED]["first_difference"] is None
    assert results["rowwise"]["num_bytes"] > 1e6
    # Results that are there are read.
    (tmp_path / "runs" / "rowwise.json").write_text("{}")
    late = layers_train.Runs(tmp_path / "runs", FOUR_STEPS, torch.device("cpu"), Deadline(0.0))
    assert late.whole("rowwise") == {}
    with pytest.raises(processes.ProcessFailed, match="must end within 0 s and did not; give it more time"):
        late.whole("torch")


def test_a_run_that_fails_says_why(tmp_path):
    sizes = dataclasses.replace(FOUR_STEPS, name="huge")
    runs = layers_train.Runs(tmp_path / "runs", sizes, torch.device("cpu"), Deadline(300.0))
    with pytest.raises(
        processes.ProcessFailed, match="(?s)must end with exit code 0 and ended with 2:.*invalid choice: 'huge'"
    ):
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


def test_parts_have_their_share_of_the_time_and_begin_anew_with_other_layers_or_steps(tmp_path, monkeypatch):
    measured = []
    for name, (share, _) in layers.PARTS.items():

        def measure(part, sizes, clock):
            measured.append((part.name, round(part.deadline.left), sizes.train_steps, sizes.inference_layers))

        monkeypatch.setitem(layers.PARTS, name, (share, measure))
    assert layers.Layers(flags_of(tmp_path, parts=list(layers.PARTS))).run() == 0
    assert measured == [(name, round(100 * share), 4, 1) for name, (share, _) in layers.PARTS.items()]
    measured.clear()
    assert layers.Layers(flags_of(tmp_path, parts=list(layers.PARTS), steps=5, layers=2)).run() == 0
    assert [(name, *sizes) for name, _, *sizes in measured] == [("inference", 5, 2), ("train", 5, 2)]
    page = (tmp_path / "layers.md").read_text()
    assert "commit c0ffee, wheel sha256 5ha.\n\nCommand: `python3 gpu_check.pyz layers --out DIR`\n" in page
    assert "## models" in page and "PROBLEM" not in page


def test_a_part_that_was_killed_and_one_that_was_not_begun_are_not_on_the_page(tmp_path, monkeypatch):
    def kill(part, sizes, clock):
        raise KeyboardInterrupt

    monkeypatch.setitem(layers.PARTS, "linear", (1.0, kill))
    with pytest.raises(KeyboardInterrupt):
        layers.Layers(flags_of(tmp_path)).run()
    assert layers.Layers(flags_of(tmp_path, parts=["train", "lora"], seconds=0.0)).run() == 1
    page = (tmp_path / "layers.md").read_text()
    assert "## linear" not in page and "- PROBLEM: lora: time was over before it began" in page


def test_the_page_has_the_sum_of_the_layers_where_all_have_a_figure():
    def row(layer, **ms):
        step = {name: {"median_ms": one, "spread_ms": 0.1} for name, one in ms.items()}
        checks = {name: {"errors": {"y": 0.01}} for name in ("torch bf16", "ours", "a peer")}
        return {"layer": layer, "tokens": 64, "in": 2, "out": 3, "step": step, "checks": checks}

    rows = [row("o", **{"torch bf16": 4.0, "ours": 2.0}), row("qkv", **{"torch bf16": 6.0, "ours": 3.0, "a peer": 1.0})]
    assert layers_summary.linear_sums(rows) == [{"tokens": 64, "sum_ms": {"torch bf16": 10.0, "ours": 5.0}}]
    failed = {"rows": [{"tokens": 64, "problems": ["it failed"]}]}
    table = layers_summary.figures({"parts": {"linear": {"rows": rows}, "train": failed}})
    assert "| ours | 2.000 ± 0.100 (2.00) | 3.000 ± 0.100 (2.00) | 5.00 (2.00) | 1.0e-02 |" in table
    assert "| a peer | - | 1.000 ± 0.100 (6.00) | - | 1.0e-02 |" in table
    assert "train" not in table


def page_of_part(name, folder):
    assert layers.Layers(flags_of(folder, parts=[name])).run() == 0
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


def test_the_part_host_compares_calls_and_layers(tmp_path):
    page = page_of_part("host", tmp_path)
    assert "| matmul | stoneware |" in page and "| row scales and block scales | block scales, stoneware |" in page
    assert "| layer with a bias | stoneware blockwise |" in page


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("name", ["inference", "models", "lora", "steps"])
def test_a_part_of_transformers_models_runs_at_tiny_sizes(name, tmp_path):
    assert "| stoneware " in page_of_part(name, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is here")
def test_without_transformers_a_part_fails_by_its_name(tmp_path):
    assert layers.Layers(flags_of(tmp_path, parts=["lora"])).run() == 1
    (problem,) = json.loads((tmp_path / "layers.json").read_text())["parts"]["lora"]["wrong"]
    assert "transformers" in problem


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
