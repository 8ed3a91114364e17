"""The examples run, at small sizes, and do what their texts say."""

from __future__ import annotations

import importlib
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import stoneware as sw

SMALL = ["--layers=1", "--width=64", "--batch=2", "--length=64"]


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path("examples").resolve()))


def test_training_in_fp8_goes_on_after_a_stop_with_the_same_losses(tmp_path, capsys):
    train = importlib.import_module("train_llama").main
    whole = train([*SMALL, "--steps=12", "--lr=3e-3"])
    folder = [f"--folder={tmp_path}", "--save=4", "--lr=3e-3"]
    train([*SMALL, "--steps=6", *folder])
    again = train([*SMALL, "--steps=12", *folder])
    assert again == whole
    assert "rowwise: goes on after step 4" in capsys.readouterr().out
    for losses in whole.values():
        assert losses[-1] < 0.85 * losses[0]
    assert abs(whole["rowwise"][-1] - whole["torch"][-1]) < 0.05 * whole["torch"][-1]


def on_two_ranks(*arguments: str) -> str:
    """What examples/train_llama.py prints under torchrun, on the CPU, of which there is enough for two."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, "examples/train_llama.py", "--fsdp", *SMALL, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_that_share_the_parameters_go_on_after_a_stop_with_the_same_losses(tmp_path):
    command = ["--steps=9", "--save=5", "--lr=3e-3", f"--folder={tmp_path}"]
    whole, again = on_two_ranks(*command), on_two_ranks(*command)
    assert "rowwise: goes on after step 5" in again
    losses = re.findall(r"(torch|rowwise): loss ([\d.]+)", whole)
    assert losses == re.findall(r"(torch|rowwise): loss ([\d.]+)", again)
    in_16_bits, in_8_bits = (float(loss) for _, loss in losses)
    assert in_16_bits < math.log(256)  # of guesses
    assert abs(in_8_bits - in_16_bits) < 0.05 * in_16_bits


def test_adapters_train_over_weights_of_half_the_size(capsys):
    found = importlib.import_module("lora_fp8").main([*SMALL, "--rank=4", "--steps=8", "--lr=1e-2"])
    (bytes_16, losses_16), (bytes_8, losses_8) = found["bf16"], found["rowwise"]
    assert bytes_8 < 0.55 * bytes_16
    assert losses_8[-1] < losses_8[0]
    assert abs(losses_8[-1] - losses_16[-1]) < 0.05 * losses_16[-1]
    assert "tokens/s" in capsys.readouterr().out


def test_serving_with_a_static_cache_gives_the_tokens_of_the_whole_sequence(capsys):
    serve = importlib.import_module("serve_llama")
    small = ["--layers=2", "--width=256", "--inner=512", "--heads=4", "--kv_heads=2", "--vocabulary=512"]
    small += ["--batch=2", "--length=5", "--tokens=6"]
    model = serve.build(serve.parse(small))
    prompt = torch.randint(512, (2, 5))
    for recipe in (None, "rowwise"):
        if recipe:
            assert len(sw.nn.convert(model, recipe, frozen=True).swapped) == 14
        tokens, _ = serve.generate(model, prompt, 6, in_graph=False)
        with torch.no_grad():
            logits = model(torch.cat([prompt, tokens], 1)).logits[:, 4:-1].float()
        behind = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
        assert float(behind.max()) < 0.05 * float(logits.std())  # 0 except for ties and rounding
    rates = serve.main(small)
    assert set(rates) == {"torch, eager", "rowwise, eager"}
    assert "rowwise, eager" in capsys.readouterr().out


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used")
def test_without_a_gpu_the_batch_invariant_model_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["batch_invariant_llama.py"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("batch_invariant_llama").main()
    assert "needs a GPU of compute capability 9.0" in capsys.readouterr().err
