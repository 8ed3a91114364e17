"""Measures the layers of stoneware.nn beside torch's, in five parts:

    python -m tools.gpu_check.layers --out DIR [--parts linear,inference,models,train,lora]

    linear     forward and backward of Llama 8B's linear layers, beside torch's bf16 and torchao's recipes
    inference  Llama 3 8B of transformers, eager and in CUDA graphs, beside torch's bf16 and _scaled_mm
    models     Llama, Qwen and Mixtral, compiled, as they are and converted
    train      a transformer of 100 M parameters: losses, steps/s, and a run that is killed and resumed
    lora       a step over frozen fp8 weights, beside bf16 LoRA

Values are checked before anything is timed; what is wrong has no figure. All that is compared is timed
interleaved, in random order, several steps between two events (layers_clock.py). `inference`, `models`
and `lora` need transformers; where it is missing they fail by name and the others are measured.

Writes layers.json after each part, and layers.md. The same command goes on with the parts that are not
there yet or failed. Other sizes, another wheel or GPU begin anew; --layers and --steps do so for their
part. The exit code is 1 if a value was wrong, or a part that was asked for failed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import pathlib
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from absl import app, flags

from stoneware.measuring.machine import version_of
from tools.gpu_check import (
    document,
    layers_inference,
    layers_linear,
    layers_lora,
    layers_models,
    layers_summary,
    layers_train,
    machine,
)
from tools.gpu_check.document import text_of
from tools.gpu_check.layers_clock import Budget, Clock, HostClock
from tools.gpu_check.layers_sizes import BY_NAME, Sizes

SCHEMA = 1

SHARES = {"linear": 0.22, "inference": 0.18, "models": 0.3, "train": 0.26, "lora": 0.04}
"""Each part's share of --seconds."""


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    return measure(flags.FLAGS)


def measure(values: Any) -> int:
    """Measures the parts that are not there yet; the exit code.

    Args:
      values: has the flags' values as attributes.
    """
    folder = pathlib.Path(values.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock() if values.device == "cuda" else HostClock()
    sizes = BY_NAME[values.sizes]
    sizes = dataclasses.replace(
        sizes, inference_layers=values.layers or sizes.inference_layers, train_steps=values.steps or sizes.train_steps
    )
    key = {
        "schema": SCHEMA,
        "sizes": values.sizes,
        "wheel_sha256": values.wheel_sha256,
        "gpu": _machine(values.device)["gpu"],
    }
    keys = dict.fromkeys(SHARES, key)
    keys["inference"] = key | {"layers": sizes.inference_layers}
    keys["train"] = key | {"steps": sizes.train_steps}
    report = _started(folder / "layers.json", key)
    report["command"] = document.origin("layers", values)["command"]
    torch.manual_seed(time.time_ns())  # fresh inputs in each run
    for name in values.parts:
        if _is_done(report, name, keys[name]):
            logging.info("%s: layers.json has it already", name)
            continue
        seconds, begin = SHARES[name] * values.seconds, time.monotonic()
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": _machine(values.device),
            "budget_s": round(seconds, 1),
        }
        try:
            result = _measure(name, keys[name], sizes, clock, Budget(seconds), folder)
        except Exception as error:  # the other parts are still measured; this one is reported as failed
            logging.error("%s", traceback.format_exc())
            result = {"problems": [text_of(error)]}
        record |= {"machine_after": _machine(values.device), "seconds": round(time.monotonic() - begin, 1)} | result
        report["parts"][name] = {"key": keys[name], "command": report["command"], "commit": values.commit} | record
        _write(folder, report)
        clock.release()
    print(_write(folder, report), end="")
    bad = [name for name in values.parts if not _is_done(report, name, keys[name])]
    for name in bad:
        for problem in report["parts"][name]["problems"]:
            print(f"layers: {name}: FAILED {problem}")
    return int(bool(bad))


def _measure(
    name: str, key: Mapping[str, Any], sizes: Sizes, clock: Clock, budget: Budget, folder: pathlib.Path
) -> dict[str, Any]:
    """The part's result."""
    if name == "train":
        arguments = [f"--sizes={key['sizes']}", f"--device={clock.device.type}"]
        runs = layers_train.Runs(folder / "layers_train", key, arguments, sizes.train_steps, budget)
        return layers_train.measure(sizes, clock, budget, runs)
    parts = {
        "linear": layers_linear, "inference": layers_inference, "models": layers_models, "lora": layers_lora
    }  # fmt: skip
    return parts[name].measure(sizes, clock, budget)


def _started(path: pathlib.Path, key: Mapping[str, Any]) -> dict[str, Any]:
    """The report of an earlier run with this key, or an empty one."""
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.get("key") == key:
            return known
    return {"key": dict(key), "parts": {}}


def _is_done(report: Mapping[str, Any], name: str, key: Mapping[str, Any]) -> bool:
    part = report["parts"].get(name)
    return part is not None and part["key"] == key and not part["problems"]


def _write(folder: pathlib.Path, report: Mapping[str, Any]) -> str:
    """Writes layers.json and layers.md, and returns the latter's text."""
    (folder / "layers.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = layers_summary.to_markdown(report)
    (folder / "layers.md").write_text(text, encoding="utf-8")
    return text


def _machine(device: str) -> dict[str, Any]:
    return machine.describe(0 if device == "cuda" else None) | {"transformers": version_of("transformers")}


def _parts(text: str) -> bool:
    return set(text) <= set(SHARES)


def _define_flags() -> None:
    document.define_flags()
    flags.DEFINE_list("parts", list(SHARES), "Which of " + ", ".join(SHARES) + ".")
    flags.register_validator("parts", _parts, f"--parts must be of {', '.join(SHARES)}; name some of these")
    flags.DEFINE_float("seconds", 480.0, "For all parts; each has its share.", lower_bound=1.0)
    flags.DEFINE_integer("layers", 0, "Blocks of the Llama of inference; 0: all 32.", lower_bound=0)
    flags.DEFINE_integer("steps", 0, "Of each training run; 0: all 1000.", lower_bound=0)
    flags.DEFINE_enum(
        "sizes", "full", list(BY_NAME), "Llama 8B's, or tiny ones that show nothing but that all of it runs."
    )
    flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Where it runs.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
