"""Compares the perplexity of a causal language model with bf16 weights and with frozen fp8 weights.

    python examples/perplexity.py MODEL [TEXT_FILE] [--recipes rowwise,blockwise] [--length 2048] [--stride 1024]

MODEL is a folder that transformers' save_pretrained wrote, or a name on the Hugging Face hub. TEXT_FILE is UTF-8;
without it the text is Python's own help. A window of --length tokens moves by --stride tokens over the text. Each token
except the first is predicted once, from at least length - stride tokens before it (at the start of the text from those
that exist), so the number of predictions does not depend on the window.

The table has the perplexity of each recipe, its ratio to bf16 with a 95 % interval, and the tokens/s that the model
read. A ratio that differs from 1 by less than its interval is noise of the text: use a longer text. Needs transformers
5.x. Runs anywhere; on a CPU fp8 is emulated, and slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import pathlib
import pydoc_data.topics
import time
from collections.abc import Iterator

import rich
import rich.table
import torch
import transformers
from torch.nn import functional

import stoneware as sw

BASELINE = "bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Attributes:
    losses: of each token except the first, -log of its probability, [num_tokens - 1] in float32 on the CPU.
    tokens_per_s: that the model read, those of the context included.
    """

    losses: torch.Tensor
    tokens_per_s: float

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.double().mean()))


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end) of each window: it reads the tokens from begin to end and predicts those from first to end.

    All windows have the same length unless the text is shorter; the last one ends with the text.

    Raises:
      ValueError: fewer than 2 tokens, or a stride that is not from 1 to length - 1.
    """
    if num_tokens < 2:
        raise ValueError(f"a text must have at least 2 tokens to predict one, and has {num_tokens}; use a longer text")
    if not 1 <= stride < length:
        raise ValueError(
            f"stride={stride} must be from 1 to length - 1 = {length - 1}, so that each token has one before it; "
            f"use half of the length"
        )
    begin, first = 0, 1
    while first < num_tokens:
        end = min(begin + length, num_tokens)
        yield max(0, end - length), first, end
        begin, first = begin + stride, end


@torch.no_grad()
def evaluate(model: torch.nn.Module, tokens: torch.Tensor, *, length: int, stride: int, batch: int) -> Result:
    """The loss of each token [num_tokens] of a text but the first, `batch` windows at a time."""
    device = next(model.parameters()).device
    all_windows = list(windows(len(tokens), length, stride))
    width = all_windows[0][2]

    def read(begins: list[int]) -> torch.Tensor:
        rows = torch.tensor(begins)[:, None] + torch.arange(width)
        return model(tokens[rows].long().to(device), use_cache=False).logits

    read([begin for begin, _, _ in all_windows[:batch]])  # warms up
    losses, start = [], _now()
    for idx in range(0, len(all_windows), batch):
        some = all_windows[idx : idx + batch]
        for (begin, first, end), logits in zip(some, read([begin for begin, _, _ in some])):
            targets = tokens[first:end].long().to(device)
            losses.append(
                functional.cross_entropy(logits[first - 1 - begin : end - 1 - begin].float(), targets, reduction="none")
            )
    seconds = _now() - start
    return Result(losses=torch.cat(losses).cpu(), tokens_per_s=len(all_windows) * width / seconds)


def ratio(
    losses: torch.Tensor, reference: torch.Tensor, groups: torch.Tensor
) -> tuple[float, tuple[float, float] | None]:
    """How much larger a perplexity is, and the 95 % interval; None if there is one group only.

    Both perplexities are of the same tokens, so the error is that of the mean difference. Tokens of a group, such as a
    document, may depend on each other: the standard error is that of a ratio estimator over groups of different sizes.

    Args:
      losses, reference: of the same tokens.
      groups: the group of each token, from 0 on.
    """
    difference = (losses - reference).double()
    sums = torch.bincount(groups, difference)
    counts = torch.bincount(groups)
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean, num_groups = float(difference.mean()), len(counts)
    if num_groups < 2:
        return math.exp(mean), None
    squares = float((sums - mean * counts).square().sum())
    error = 1.96 * math.sqrt(num_groups / (num_groups - 1) * squares) / len(losses)
    return math.exp(mean), (math.exp(mean - error), math.exp(mean + error))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def load(name: str) -> torch.nn.Module:
    """The model in bf16, frozen.

    Raises:
      SystemExit: the name is not that of a causal language model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"MODEL={name!r} must be a folder with config.json and weights, or a name on the hub, of a causal "
            f"language model; transformers: {error}"
        ) from error
    return model.to(device).eval().requires_grad_(False)


def tokens_of(options: argparse.Namespace) -> torch.Tensor:
    """The tokens of the text.

    Raises:
      SystemExit: the text or the tokenizer cannot be read.
    """
    if options.text is None:
        text = "\n".join(pydoc_data.topics.topics.values())
    else:
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SystemExit(f"TEXT_FILE={str(options.text)!r} must be a file of UTF-8 text: {error}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"MODEL={options.model!r} must have a tokenizer; save it there with tokenizer.save_pretrained; "
            f"transformers: {error}"
        ) from error
    # Not verbose: transformers would warn that the text exceeds the model's length, and windows never do.
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return tokens[: options.tokens] if options.tokens else tokens


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT_FILE", nargs="?", type=pathlib.Path)
    parser.add_argument("--recipes", default="rowwise,blockwise", help="of sw.nn.convert")
    parser.add_argument("--length", type=int, help="of a window; at most 2048 and what the model allows by default")
    parser.add_argument("--stride", type=int, help="tokens by which the window moves; half of the length by default")
    parser.add_argument("--batch", type=int, default=4, help="windows that the model reads at once")
    parser.add_argument("--tokens", type=int, help="of the text that are read; all by default")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Result]:
    """The results by recipe."""
    options = parse(arguments)
    tokens = tokens_of(options)
    results: dict[str, Result] = {}
    for recipe in (BASELINE, *options.recipes.split(",")):
        model = load(options.model)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048
        length = options.length or min(2048, longest)
        if length > longest:
            raise SystemExit(f"--length={length} must be at most {longest}, the positions of the model")
        stride = options.stride or length // 2
        try:
            if recipe != BASELINE:
                print(f"{recipe}: {str(sw.nn.convert(model, recipe, frozen=True)).splitlines()[0]}")
            results[recipe] = evaluate(model, tokens, length=length, stride=stride, batch=options.batch)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        del model
        gc.collect()  # before the next one is loaded
        torch.cuda.empty_cache()
    print(f"{len(tokens) - 1:,} predictions, in windows of {length} tokens that move by {stride}:")
    table = rich.table.Table()
    for column in ("weights", "perplexity", "ratio to bf16", "95 % interval", "tokens/s"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    groups = torch.arange(len(tokens) - 1) // stride
    for recipe, result in results.items():
        value, interval = ratio(result.losses, results[BASELINE].losses, groups)
        shown = "-" if interval is None or recipe == BASELINE else f"{interval[0]:.4f} to {interval[1]:.4f}"
        table.add_row(recipe, f"{result.perplexity:.4f}", f"{value:.4f}", shown, f"{result.tokens_per_s:,.0f}")
    rich.print(table)
    return results


if __name__ == "__main__":
    main()
