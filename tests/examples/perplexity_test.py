"""examples/perplexity.py predicts each token once, and compares fp8 with bf16 on the same tokens."""

from __future__ import annotations

import math
import pathlib
import sys

import pytest
import tokenizers
import torch
import transformers

sys.path.insert(0, str(pathlib.Path("examples").resolve()))
import perplexity


def saved_model(folder: pathlib.Path) -> pathlib.Path:
    """A tiny Llama with random weights, and a tokenizer of bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: idx for idx, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("num_tokens, length, stride", [(2, 8, 4), (8, 8, 4), (9, 8, 7), (23, 8, 1), (100, 8, 3)])
def test_windows_predict_each_token_once_from_enough_others(num_tokens, length, stride):
    windows = list(perplexity.windows(num_tokens, length, stride))
    assert [token for _, first, end in windows for token in range(first, end)] == list(range(1, num_tokens))
    assert {end - begin for begin, _, end in windows} == {min(length, num_tokens)}
    for begin, first, _ in windows:
        assert first - begin >= (length - stride if begin else 1)


def test_losses_of_windows_are_those_of_the_tokens_that_they_read(tmp_path):
    model = perplexity.load(str(saved_model(tmp_path))).float()
    tokens = torch.randint(256, (50,))
    losses = perplexity.evaluate(model, tokens, length=16, stride=6, batch=3).losses
    for begin, first, end in perplexity.windows(50, 16, 6):
        with torch.no_grad():
            log_probabilities = model(tokens[None, begin:end]).logits[0].log_softmax(-1)
        for token in range(first, end):
            expected = -log_probabilities[token - 1 - begin, tokens[token]]
            torch.testing.assert_close(losses[token - 1], expected, atol=1e-5, rtol=1e-5)


def test_the_interval_of_a_ratio_has_the_true_one_although_tokens_of_a_group_agree():
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(60).repeat_interleave(torch.randint(5, 40, (60,), generator=generator))
    num_inside = 0
    for _ in range(300):
        reference = torch.rand(len(groups), generator=generator)
        shared = 0.01 * torch.randn(60, generator=generator)[groups]
        _, (low, high) = perplexity.ratio(reference + 0.02 + shared, reference, groups)
        num_inside += low < math.exp(0.02) < high
    assert 0.9 < num_inside / 300 < 0.99
    assert perplexity.ratio(torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64)) == (1.0, None)


def test_perplexity_of_a_checkpoint_in_bf16_and_fp8(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("All examples run, at small sizes. " * 8)
    results = perplexity.main([str(saved_model(tmp_path / "model")), str(text), "--length=32"])
    assert list(results) == ["bf16", "rowwise", "blockwise"]
    for result in results.values():
        assert len(result.losses) == len(text.read_bytes()) - 1
        assert abs(result.perplexity / results["bf16"].perplexity - 1) < 0.02
    assert not torch.equal(results["rowwise"].losses, results["bf16"].losses)
    shown = capsys.readouterr().out
    assert "rowwise: swapped 14 of 15 linear layers" in shown
    assert "271 predictions, in windows of 32 tokens that move by 16" in shown


def test_perplexity_says_what_is_wrong_with_its_arguments(tmp_path):
    main = perplexity.main
    model, text = str(saved_model(tmp_path / "model")), tmp_path / "text.txt"
    text.write_bytes(b"\xff\xff")
    for arguments, message in (
        ([str(tmp_path / "missing")], "missing'.* must have a tokenizer"),
        ([model, str(text)], "text.txt' must be a file of UTF-8 text"),
        ([model, "--length=65"], "--length=65 must be at most 64, the positions of the model"),
        ([model, "--length=8", "--stride=8"], "stride=8 must be from 1 to length - 1 = 7"),
        ([model, "--tokens=1"], "at least 2 tokens"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="MODEL=.* must be a folder with config.json and weights"):
        main([model])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
