"""Tokens per second of generation by a Llama of transformers, before and after `sw.nn.convert`.

    PYTHONPATH=. python3 tools/bench/generate.py [--batches=1,16] [--rounds=5] [--json_out=FILE] [-- --layers=32]

in a clone, with Stoneware, transformers and torch with CUDA installed. It runs examples/serve_llama.py, whose flags may
follow `--`: random weights of Llama 3 8B's sizes unless --checkpoint is passed, a static cache, eager and in a CUDA
graph. Each round runs every batch once, in bf16 and in fp8. The figures are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

from examples import serve_llama
from tools.gpu_check import machine

_BATCHES = flags.DEFINE_list("batches", ["1", "16"], "How many sequences are generated at once; several are compared.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often each batch runs.", lower_bound=1)
_JSON_OUT = flags.DEFINE_string("json_out", None, "Where the figures go.")
_COMMIT = flags.DEFINE_string("commit", "unknown", "The commit of the wheel, for the figures.")


def measure(batches: Sequence[int], rounds: int, options: Sequence[str]) -> list[dict[str, Any]]:
    """A row of each batch: tokens per second by kind of linear and mode, over all sequences."""
    rates: dict[int, dict[str, list[float]]] = {batch: {} for batch in batches}
    for _ in range(rounds):
        for batch in batches:
            for mode, rate in serve_llama.main([*options, f"--batch={batch}"]).items():
                rates[batch].setdefault(mode, []).append(rate)
    return [
        {
            "batch": batch,
            "tokens_per_second": {
                mode: {"median": round(statistics.median(values), 1), "least": round(min(values), 1)}
                for mode, values in of_batch.items()
            },
        }
        for batch, of_batch in rates.items()
    ]


def main(argv: Sequence[str]) -> None:
    options = list(argv[1:])
    rows = measure([int(batch) for batch in _BATCHES.value], _ROUNDS.value, options)
    document = {
        "command": " ".join(["python3 tools/bench/generate.py", *map(_shown, sys.argv[1:])]),
        "commit": _COMMIT.value,
        "machine": machine.describe(0 if torch.cuda.is_available() else None),
        "settings": vars(serve_llama.parse(options)),
        "rounds": _ROUNDS.value,
        "rows": rows,
    }
    if _JSON_OUT.value:
        Path(_JSON_OUT.value).write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        for mode, rate in row["tokens_per_second"].items():
            print(f"batch {row['batch']}, {mode}: {rate['median']:,.1f} tokens/s")


def _shown(argument: str) -> str:
    """An argument of the command as the document shows it."""
    return "--json_out=FILE" if argument.startswith("--json_out=") else argument


if __name__ == "__main__":
    app.run(main)
