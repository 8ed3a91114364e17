"""The benchmark of perplexity without a GPU: it trains, resumes, and compares fp8 with bf16 on held-out text."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

from tools.bench import perplexity_text

SMALL = ["--hidden=128", "--layers=1", "--vocabulary=512", "--length=32", "--batch=2", "--held_out_tokens=400"]


@pytest.fixture
def text_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """200 files of random words."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(100)]
    folder = tmp_path / "text"
    folder.mkdir()
    for idx in range(200):
        (folder / f"{idx}.txt").write_text(" ".join(generator.choices(words, k=60)))
    return folder


def run(tmp_path: pathlib.Path, minutes: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [f"--folder={tmp_path}/run", f"--text={tmp_path}/text", f"--json_out={tmp_path}/perplexity.json"]
    command = [sys.executable, "-m", "tools.bench.perplexity_bench", f"--minutes={minutes}", *paths, *SMALL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=200)


def test_a_run_trains_and_compares_and_the_same_command_goes_on_where_it_stopped(tmp_path, text_folder):
    first = run(tmp_path, 0.06)  # a few steps leave no difference to measure
    assert first.returncode == 0, first.stdout + first.stderr
    report = json.loads((tmp_path / "perplexity.json").read_text())
    assert report["training"]["steps"] > 0
    evaluation = report["evaluation"]
    assert evaluation["predictions"] == 399
    assert evaluation["documents"] > 2
    variants = evaluation["variants"]
    for name in ("rowwise", "blockwise"):
        low, high = variants[name]["interval_95"]
        assert low <= variants[name]["ratio"] <= high
        assert 0 < abs(variants[name]["ratio"] - 1) < 0.005
        assert variants[name]["layers"] == "swapped 7 of 8 linear layers"
    assert "torchao" in variants["torchao, rowwise"]["not_measured"]
    page = (tmp_path / "perplexity.md").read_text()
    assert f"| rowwise | {variants['rowwise']['perplexity']:.4f} | " in page
    state = torch.load(tmp_path / "run" / "checkpoint.pt")
    again = run(tmp_path, 0.07, "--held_out_tokens=50")
    assert f"resumed after {state['num_steps']} steps" in again.stdout, again.stdout + again.stderr
    assert json.loads((tmp_path / "perplexity.json").read_text())["training"]["steps"] > state["num_steps"]
    refused = run(tmp_path, 0.07, "--layers=2")
    assert refused.returncode
    assert "checkpoint.pt was made with {'hidden': 128, 'layers': 1," in refused.stderr


def test_no_file_is_in_both_sets_or_twice_in_one(text_folder):
    (text_folder / "copy.txt").write_bytes((text_folder / "0.txt").read_bytes())
    (text_folder / "short.txt").write_text("short")
    (text_folder / "latin.txt").write_bytes(b"\xff" * 1000)
    documents = perplexity_text.read([text_folder, text_folder], 0.1)
    assert len({*documents.train, *documents.held_out}) == len(documents.train) + len(documents.held_out) == 200
    assert 8 < len(documents.held_out) < 35


def test_encoded_documents_are_their_text_and_an_end(text_folder):
    documents = perplexity_text.read([text_folder], 0.1)
    tokenizer = perplexity_text.train_tokenizer(documents.train, 512)
    tokens, numbers = perplexity_text.encode(tokenizer, documents.held_out)
    assert tokens.dtype == numbers.dtype == torch.int32
    for idx, text in enumerate(documents.held_out):
        ids = tokens[numbers == idx].tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[:-1]) == text


def test_folders_without_enough_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must have text files for training and for evaluation, and have 0 and 0"):
        perplexity_text.read([tmp_path], 0.1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
