"""How much perplexity a trained model loses in fp8: bf16, rowwise and blockwise, next to torchao's rowwise recipe.

    PYTHONPATH=. python tools/bench/perplexity_bench.py --folder=DIR [--minutes=6] [--json_out=FILE]

with Stoneware, torch, transformers and absl installed. Without torchao or a GPU for it, its row has the reason instead.
Nothing is downloaded: the text is that of the files of Python's standard library and of the installed packages, without
duplicates (or of --text). 1 in 20 files is held out.

A Llama of transformers is trained for --minutes, from random weights, in float32 under autocast to bf16. DIR gets the
tokens, a checkpoint every minute, and the trained model in the format of transformers. The same command resumes what
was interrupted, and only evaluates if the training is complete. Then each recipe converts the linear layers of the
model except lm_head, in eager mode, and predicts the held-out tokens in the same windows (examples/perplexity.py).

A ratio of perplexities has a 95 % interval, from the differences between documents. The exit code is 1 if a ratio of
Stoneware's frozen weights is more than 0.5 % from 1. Next to FILE is written a page in Markdown.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from absl import app, flags

import stoneware as sw
from stoneware.measuring.machine import version_of
from tools.bench import perplexity_text
from tools.gpu_check import document, machine

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import perplexity

_FOLDER = flags.DEFINE_string("folder", None, "Where tokens, checkpoint and model are kept.", required=True)
_MINUTES = flags.DEFINE_float("minutes", 6, "Of training, those of earlier runs and of compiling included.")
_HIDDEN = flags.DEFINE_integer("hidden", 1024, "Width of the model; a multiple of 128.", lower_bound=128)
_LAYERS = flags.DEFINE_integer("layers", 12, "Blocks of the model.", lower_bound=1)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 16384, "Tokens of the tokenizer.", lower_bound=512)
_LENGTH = flags.DEFINE_integer("length", 1024, "Tokens of a sequence, and of a window.", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch", 32, "Sequences of a step.", lower_bound=1)
_COMPILE = flags.DEFINE_bool("compile", None, "Train under torch.compile; by default only on a GPU.")
_TEXT = flags.DEFINE_list("text", [], "Folders of text files, instead of Python's and its packages'.")
_HELD_OUT_TOKENS = flags.DEFINE_integer("held_out_tokens", 1_200_000, "Evaluated at most.", lower_bound=2)
_COMMIT = flags.DEFINE_string("commit", "unknown", "That the wheel was built from.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "Where the figures go.")

LIMIT = 0.005
"""Difference from 1 of the ratio of a perplexity to bf16's."""

_HELD_OUT_SHARE = 0.05
_LEARNING_RATE, _WARM_UP_STEPS, _DECAY_SHARE = 1e-3, 100, 0.4
"""The rate rises in the first steps, and falls to 0 in the last part of the time."""

_SAVED_EVERY_S, _SHOWN_EVERY_S = 60.0, 10.0
_STEPS_AHEAD = 20
"""Steps after which the host waits for the GPU, so that the time is that of the training."""


def sizes() -> dict[str, int]:
    """The flags on which tokens, model and checkpoint depend."""
    return {flag.name: flag.value for flag in (_HIDDEN, _LAYERS, _VOCABULARY, _LENGTH, _BATCH)}


def model_config() -> transformers.LlamaConfig:
    """Heads of 64 and a feed-forward of 2.75 times the width, rounded up to a multiple of 128."""
    hidden = _HIDDEN.value
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=math.ceil(hidden * 2.75 / 128) * 128,
        num_hidden_layers=_LAYERS.value,
        num_attention_heads=hidden // 64,
        vocab_size=_VOCABULARY.value,
        max_position_embeddings=_LENGTH.value,
        use_cache=False,
    )


def check_flags(path: pathlib.Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError if a file was made with other flags."""
    if earlier != now:
        raise ValueError(
            f"{path} was made with {earlier}, and the flags are {now}; pass the former, or another --folder"
        )


def prepare(folder: pathlib.Path) -> dict[str, Any]:
    """Tokens and documents of both sets and facts of the text: those in the folder, or new ones.

    Raises:
      ValueError: the tokens were made with other flags; or see `perplexity_text.read`.
    """
    path, made_with = folder / "tokens.pt", {flag.name: flag.value for flag in (_VOCABULARY, _TEXT)}
    if path.exists():
        data = torch.load(path)
        check_flags(path, data["flags"], made_with)
        return data
    begin = time.monotonic()
    folders = list(map(pathlib.Path, _TEXT.value)) or perplexity_text.machine_folders()
    documents = perplexity_text.read(folders, _HELD_OUT_SHARE)
    tokenizer = perplexity_text.train_tokenizer(documents.train, _VOCABULARY.value)
    train, _ = perplexity_text.encode(tokenizer, documents.train)
    held_out, held_out_documents = perplexity_text.encode(tokenizer, documents.held_out)
    tokens = {"train": len(train), "held_out": len(held_out)}
    data = {
        "train": train,
        "held_out": held_out,
        "documents": held_out_documents,
        "flags": made_with,
        "facts": {"text": "given folders" if _TEXT.value else "Python's standard library and installed packages"}
        | documents.facts()
        | {"tokens": tokens},
    }
    tokenizer.save_pretrained(folder / "model")
    torch.save(data, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    print(f"text: {data['facts']}, {time.monotonic() - begin:.0f} s", flush=True)
    return data


class Training:
    """A model, its optimizer and what it has learned from so far.

    Args:
      folder: with the checkpoint, if there is one.
      device: where it trains.

    Raises:
      ValueError: the checkpoint was made with other flags.
    """

    def __init__(self, folder: pathlib.Path, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(model_config()).to(device).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._path, self._device = folder / "checkpoint.pt", device
        self.num_steps, self.seconds, self.loss = 0, 0.0, math.nan
        if self._path.exists():
            saved = torch.load(self._path, map_location=device)
            check_flags(self._path, saved["flags"], sizes())
            self.model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.num_steps, self.seconds, self.loss = saved["num_steps"], saved["seconds"], saved["loss"]
            print(f"resumed after {self.num_steps} steps and {self.seconds:.0f} s", flush=True)

    def run(self, tokens: torch.Tensor, seconds: float) -> None:
        """Trains until these seconds are over, those of earlier runs included, and saves the state."""
        if self.seconds >= seconds:
            return
        is_compiled = self._device.type == "cuda" if _COMPILE.value is None else _COMPILE.value
        forward = torch.compile(self.model) if is_compiled else self.model
        tokens = tokens.to(self._device)
        saved = shown = time.monotonic()
        begin = saved - self.seconds
        while self.seconds < seconds:
            loss = self._step(forward, tokens, self.seconds / seconds)
            self.num_steps += 1
            if self.num_steps % _STEPS_AHEAD == 0:
                self.loss = loss.item()
            now = time.monotonic()
            self.seconds = now - begin
            if now - shown > _SHOWN_EVERY_S:
                shown, self.loss = now, loss.item()
                print(
                    f"step {self.num_steps}: loss {self.loss:.4f}, {self.tokens_per_s:,.0f} tokens/s, "
                    f"{max(0.0, seconds - self.seconds):.0f} s left",
                    flush=True,
                )
            if now - saved > _SAVED_EVERY_S:
                saved = now
                self._save()
        self.loss = loss.item()
        self._save()

    @property
    def tokens_per_s(self) -> float:
        return self.num_steps * _BATCH.value * _LENGTH.value / max(self.seconds, 1e-9)

    def _step(self, forward: Callable[..., Any], tokens: torch.Tensor, progress: float) -> torch.Tensor:
        """Trains on the batch of this step, at a share of the time; returns its loss."""
        warm_up, decay = (self.num_steps + 1) / _WARM_UP_STEPS, (1 - progress) / _DECAY_SHARE
        for group in self._optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, warm_up, decay)
        generator = torch.Generator().manual_seed(self.num_steps)
        starts = torch.randint(len(tokens) - _LENGTH.value + 1, (_BATCH.value, 1), generator=generator)
        rows = tokens[(starts + torch.arange(_LENGTH.value)).to(self._device)].long()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = forward(input_ids=rows, labels=rows).loss
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "loss": self.loss,
            "flags": sizes(),
        }
        torch.save(state, self._path.with_suffix(".new"))
        self._path.with_suffix(".new").replace(self._path)


def _frozen(recipe: str) -> Callable[[torch.nn.Module], str]:
    return lambda model: str(sw.nn.convert(model, recipe, frozen=True)).splitlines()[0]


def _trained(recipe: str) -> Callable[[torch.nn.Module], str]:
    def convert(model: torch.nn.Module) -> str:
        return str(sw.nn.convert(model.requires_grad_(True), recipe, frozen=False)).splitlines()[0]

    return convert


def _torchao(model: torch.nn.Module) -> str:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linears.remove("lm_head")
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), lambda _, name: name in linears)
    return f"quantized {len(linears)} linear layers: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())"


LIMITED = ("rowwise", "blockwise")

TORCHAO = "torchao, rowwise"

VARIANTS: dict[str, Callable[[torch.nn.Module], str]] = {
    perplexity.BASELINE: lambda model: "torch.nn.Linear",
    **{recipe: _frozen(recipe) for recipe in LIMITED},
    **{f"{recipe}, layers that train": _trained(recipe) for recipe in LIMITED},
    TORCHAO: _torchao,
}
"""Name -> what changes the model's layers, and says which."""


def why_not(name: str) -> str:
    """Why a variant cannot be measured here; empty if it can."""
    if name != TORCHAO:
        return ""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        return "torchao's recipe needs a GPU of compute capability 8.9 or higher"
    return ""


def evaluate(path: pathlib.Path, tokens: torch.Tensor, documents: torch.Tensor) -> dict[str, Any]:
    """The perplexity of each variant of a saved model, and its ratio to bf16."""
    stride, variants, reference = _LENGTH.value // 2, {}, torch.empty(0)
    for name, convert in VARIANTS.items():
        if reason := why_not(name):
            variants[name] = {"not_measured": reason}
            print(f"{name}: {reason}", flush=True)
            continue
        begin = time.monotonic()
        model = perplexity.load(str(path))
        layers = convert(model)
        losses = perplexity.evaluate(model, tokens, length=_LENGTH.value, stride=stride, batch=_BATCH.value).losses
        del model
        gc.collect()
        torch.cuda.empty_cache()
        variants[name] = {"perplexity": round(math.exp(float(losses.double().mean())), 5), "layers": layers}
        if name == perplexity.BASELINE:
            reference = losses
        else:
            value, interval = perplexity.ratio(losses, reference, documents[1:])
            variants[name] |= {"ratio": round(value, 6), "interval_95": interval and [round(x, 6) for x in interval]}
        print(f"{name}: {variants[name]}, {time.monotonic() - begin:.0f} s", flush=True)
    return {
        "predictions": len(tokens) - 1,
        "documents": int(documents[-1]) + 1,
        "length": _LENGTH.value,
        "stride": stride,
        "variants": variants,
    }


def page(report: dict[str, Any]) -> str:
    """The report for people."""
    text, training, evaluation = report["text"], report["training"], report["evaluation"]
    facts = report["machine"]
    rows = []
    for name, figures in evaluation["variants"].items():
        if "not_measured" in figures:
            rows.append([name, figures["not_measured"], "-", "-"])
            continue
        ratio, interval = figures.get("ratio"), figures.get("interval_95")
        shown = "-" if interval is None else f"{100 * (interval[0] - 1):+.3f} to {100 * (interval[1] - 1):+.3f} %"
        rows.append(
            [name, f"{figures['perplexity']:.4f}", "-" if ratio is None else f"{100 * (ratio - 1):+.3f} %", shown]
        )
    lines = [
        f"# Perplexity on {facts['gpu']}",
        "",
        f"{report['date']}; torch {facts['torch']}, transformers {facts['transformers']}, torchao {report['torchao']}; "
        f"commit {report['commit']}.",
        "",
        f"Command: `{report['command']}`",
        "",
        f"A Llama with {training['parameters'] / 1e6:.0f} M parameters was trained for {training['steps']:,} steps on "
        f"{training['tokens'] / 1e6:.1f} M tokens in {training['seconds']:.0f} s. The text has "
        f"{text['tokens']['train'] / 1e6:.1f} M tokens ({text['text']}). {evaluation['predictions']:,} tokens of "
        f"{evaluation['documents']:,} held-out documents are predicted, in windows of {evaluation['length']} tokens "
        f"that move by {evaluation['stride']}.",
        "",
        *document.table(["weights", "perplexity", "difference from bf16", "95 % interval"], rows),
        "",
    ]
    return "\n".join(lines)


def _typed_command(arguments: Sequence[str]) -> str:
    """The command to run this again, without folders of this machine: it is published."""
    replaced = {"--folder": "DIR", "--json_out": "FILE"}
    words = [word.partition("=") for word in arguments]
    return " ".join(
        ["perplexity_bench.py", *(f"{name}{equals}{replaced.get(name, value)}" for name, equals, value in words)]
    )


def problems(variants: dict[str, Any]) -> list[str]:
    """Which ratios are beyond the limit."""
    return [
        f"{name}: the perplexity is {variants[name]['ratio'] - 1:+.3%} of bf16's and must be within {LIMIT:.1%}"
        for name in LIMITED
        if not abs(variants[name]["ratio"] - 1) <= LIMIT
    ]


def main(argv: Sequence[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    if _HIDDEN.value % 128:
        raise app.UsageError(f"--hidden={_HIDDEN.value} must be a multiple of 128, as block scales require")
    ordinal = 0 if torch.cuda.is_available() else None
    folder = pathlib.Path(_FOLDER.value).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(folder)
    training = Training(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    training.run(data["train"], _MINUTES.value * 60)
    training.model.to(torch.bfloat16).save_pretrained(folder / "model")
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _typed_command(sys.argv[1:]),
        "commit": _COMMIT.value,
        "machine": machine.describe(ordinal),
        "torchao": version_of("torchao"),
        "limit": LIMIT,
        "text": data["facts"],
        "model": sizes(),
        "training": {
            "parameters": training.model.num_parameters(),
            "steps": training.num_steps,
            "tokens": training.num_steps * _BATCH.value * _LENGTH.value,
            "seconds": round(training.seconds, 1),
            "tokens_per_s": round(training.tokens_per_s),
            "last_loss": round(training.loss, 4),
        },
    }
    del training
    held_out = slice(0, _HELD_OUT_TOKENS.value)
    report["evaluation"] = evaluate(folder / "model", data["held_out"][held_out], data["documents"][held_out])
    report["problems"] = problems(report["evaluation"]["variants"])
    text = page(report)
    if _JSON_OUT.value:
        path = pathlib.Path(_JSON_OUT.value)
        document.write(path, document.to_json(report) + "\n")
        document.write(path.with_suffix(".md"), text)
    print(text)
    for problem in report["problems"]:
        print(f"FAILED {problem}")
    return int(bool(report["problems"]))


if __name__ == "__main__":
    app.run(main)
