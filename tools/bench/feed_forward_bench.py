"""What `sw.nn.convert` saves in feed-forwards for inference, next to their layers one by one with the same weights.

    python tools/bench/feed_forward_bench.py [--tokens=16,4096] [--recipes=blockwise] [--rounds=15] [--json_out=FILE]

with Stoneware and torch on PYTHONPATH, on a GPU of Hopper. Two feed-forwards of Llama 3 8B's sizes, 4096 and 14336:
"swiglu", down(silu(gate(x)) * up(x)), and "gelu", down(gelu(up(x))) with biases. Each is converted and frozen, and
compared with float64 first. Two calls are timed, interleaved, eager and in a CUDA graph: "fused", the converted block,
and "layers", the block's own code over the same converted layers. The weights of one call exceed the L2 cache.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

import stoneware as sw
from stoneware.measuring import machine

_TOKENS = flags.DEFINE_list("tokens", ["16", "4096"], "Rows of x.")
_RECIPES = flags.DEFINE_list("recipes", ["bf16", "rowwise", "blockwise"], "Those that are measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds, each of which times every call.", lower_bound=1)
_JSON_OUT = flags.DEFINE_string("json_out", None, "Where the figures go.")

_HIDDEN, _INTERMEDIATE = 4096, 14336
"""Llama 3 8B's."""

_CALLS = 20
"""Calls of a graph, and of an eager timing."""

_LIMITS = {"bf16": 0.012, "fp8": 0.12}
"""Relative errors in the Frobenius norm: of five roundings to bf16, and of five fp8 operands."""


class SwiGLU(torch.nn.Module):
    """The feed-forward of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(_HIDDEN, _INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(_INTERMEDIATE, _HIDDEN, bias=False), torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class GELU(torch.nn.Sequential):
    """A feed-forward of two layers."""

    def __init__(self) -> None:
        layers = torch.nn.Linear(_HIDDEN, _INTERMEDIATE), torch.nn.GELU(), torch.nn.Linear(_INTERMEDIATE, _HIDDEN)
        super().__init__(*layers)


BLOCKS: dict[str, type[torch.nn.Module]] = {"swiglu": SwiGLU, "gelu": GELU}


def _graph(call: Callable[[], object]) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS):
                call()
    return graph.replay


def _eager(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        for _ in range(_CALLS):
            call()

    return run


def _num_launches(call: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def _times_us(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The µs per call of each, a figure a round, by the host's clock around finished work."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS.value + 2):
        for name, run in runs.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e6 / _CALLS)
    return {name: values[2:] for name, values in times.items()}


@torch.no_grad()
def _measure(kind: str, recipe: str, tokens: int) -> dict[str, Any] | None:
    """The figures of a case; None if the recipe leaves the feed-forward to its layers."""
    own_class = BLOCKS[kind]
    block = own_class().cuda().bfloat16().eval()
    exact = copy.deepcopy(block)
    x = torch.randn(tokens, _HIDDEN, device="cuda", dtype=torch.bfloat16)
    if not sw.nn.convert(block, recipe, frozen=True).blocks:
        return None

    def fused() -> torch.Tensor:
        y: torch.Tensor = block(x)
        return y

    def layers() -> torch.Tensor:
        y: torch.Tensor = own_class.forward(block, x)
        return y

    sw.prepare(block, x)
    wanted, errors = exact.double()(x.double()), {}
    for name, call in (("fused", fused), ("layers", layers)):
        errors[name] = float((call().double() - wanted).norm() / wanted.norm())
        limit = _LIMITS["bf16" if recipe == "bf16" else "fp8"]
        assert errors[name] < limit, f"{kind}, {recipe}, {tokens} tokens: {name} is wrong by {errors[name]:.1e}"
    del exact, wanted
    calls = {"fused": fused, "layers": layers}
    runs = {f"{name}, eager": _eager(call) for name, call in calls.items()}
    runs |= {f"{name}, graph": _graph(call) for name, call in calls.items()}
    times = _times_us(runs)
    medians = {name: statistics.median(values) for name, values in times.items()}
    modes = ("eager", "graph")
    return {
        "block": kind,
        "recipe": recipe,
        "tokens": tokens,
        "us": {name: round(value, 2) for name, value in medians.items()},
        "spread": {name: round((max(v) - min(v)) / medians[name], 3) for name, v in times.items()},
        "launches": {name: _num_launches(call) for name, call in calls.items()},
        "ratio": {mode: round(medians[f"layers, {mode}"] / medians[f"fused, {mode}"], 3) for mode in modes},
        "errors": {name: float(f"{value:.1e}") for name, value in errors.items()},
    }


def _shown(argument: str) -> str:
    """An argument of the command as the document shows it."""
    return "--json_out=FILE" if argument.startswith("--json_out=") else argument


def main(argv: Sequence[str]) -> None:
    del argv
    run = machine.new_run(0, " ".join(["python tools/bench/feed_forward_bench.py", *map(_shown, sys.argv[1:])]))
    cases = []
    for kind in BLOCKS:
        for recipe in _RECIPES.value:
            for tokens in map(int, _TOKENS.value):
                case = _measure(kind, recipe, tokens)
                torch.cuda.empty_cache()
                if case is None:
                    continue
                cases.append(case)
                us = ", ".join(f"{name} {value:.1f} us" for name, value in case["us"].items())
                print(f"{kind}, {recipe}, {tokens} tokens: {us}; ratios {case['ratio']}", flush=True)
    if _JSON_OUT.value:
        document = {"run": dataclasses.asdict(machine.end_run(run, 0)), "cases": cases}
        Path(_JSON_OUT.value).write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    app.run(main)
