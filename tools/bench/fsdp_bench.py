"""What FSDP2 costs with weights gathered in 16 bits and in fp8: training steps of a Llama on several GPUs.

    torchrun --nproc-per-node 2 tools/bench/fsdp_bench.py [--rounds=25] [--commit=COMMIT --json_out=FILE]

with Stoneware, torch and transformers on PYTHONPATH. The model has blocks of Llama 3 8B's size and parameters in 32
bits; each block is sharded, gathered in bfloat16 or fp8, and its gradients are reduced in 32 bits. A step is forward,
backward and AdamW. The models differ in their layers alone: torch's, and those of each recipe with and without
`sw.nn.gather_in_fp8`. A first loss that is off by more than 1 % stops the run. Rounds time all models, in random order.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from absl import app, flags
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import stoneware as sw
from stoneware.measuring import machine
from stoneware.measuring.device_timer import spread

_BLOCKS = flags.DEFINE_integer("blocks", 4, "Blocks of the model.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 4096, "Width of the model; 128 for a trial on CPUs.", lower_bound=128)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a rank in a step.", lower_bound=16)
_RECIPES = flags.DEFINE_list("recipes", ["rowwise", "tensorwise"], "Those that are measured.")
_ROUNDS = flags.DEFINE_integer("rounds", 25, "Rounds, each of which times every model.", lower_bound=2)
_COMMIT = flags.DEFINE_string("commit", "unknown", "The commit that the wheel was built from.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "Where the figures go.")

_TORCH, _GATHERED = "torch bf16", ", gathered in fp8"

_STEPS = 3
"""Steps that are timed together, behind one that is not."""

_MOST_LOSS_ERROR = 0.01
"""Relative, of the first loss against torch's."""


class Trainer:
    """A model, and its steps.

    Args:
      base: the model, neither converted nor sharded.
      name: _TORCH, or a recipe with or without _GATHERED.
    """

    def __init__(self, base: LlamaForCausalLM, name: str, device: torch.device) -> None:
        self.model = copy.deepcopy(base)
        if name != _TORCH:
            sw.nn.convert(self.model, name.removesuffix(_GATHERED))
        if name.endswith(_GATHERED):
            sw.nn.gather_in_fp8(self.model)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*self.model.model.layers, self.model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        vocabulary = base.config.vocab_size
        self.tokens = torch.randint(vocabulary, (1, _TOKENS.value), device=device, generator=_seeded(device))

    def step(self) -> torch.Tensor:
        """The loss before it."""
        loss: torch.Tensor = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _seeded(device: torch.device) -> torch.Generator:
    """Every rank has other tokens, and every model the same."""
    return torch.Generator(device).manual_seed(1 + distributed.get_rank())


def _timed_ms(trainer: Trainer, device: torch.device) -> float:
    """The milliseconds of a step, between points at which all ranks have finished."""
    trainer.step()
    _finish(device)
    begin = time.perf_counter()
    for _ in range(_STEPS):
        trainer.step()
    _finish(device)
    return (time.perf_counter() - begin) * 1e3 / _STEPS


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()


def _trainers(device: torch.device) -> dict[str, Trainer]:
    torch.manual_seed(0)  # all ranks begin with the same weights
    heads = _HIDDEN.value // 128
    config = LlamaConfig(
        hidden_size=_HIDDEN.value, intermediate_size=_HIDDEN.value * 7 // 2, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), num_hidden_layers=_BLOCKS.value, vocab_size=32000,
    )  # fmt: skip
    with device:
        base = LlamaForCausalLM(config).train()
    names = [_TORCH, *(recipe + suffix for recipe in _RECIPES.value for suffix in ("", _GATHERED))]
    trainers = {name: Trainer(base, name, device) for name in names}
    losses = {name: trainer.step().item() for name, trainer in trainers.items()}
    for name, loss in losses.items():
        error = abs(loss / losses[_TORCH] - 1)
        assert error < _MOST_LOSS_ERROR, f"the first loss with {name} is {loss}, and torch's {losses[_TORCH]}"
    return trainers


def _command() -> str:
    """What was typed, as a document shows it."""
    arguments = ("--json_out=FILE" if one.startswith("--json_out=") else one for one in sys.argv[1:])
    ranks = distributed.get_world_size()
    return " ".join([f"torchrun --nproc-per-node {ranks} tools/bench/fsdp_bench.py", *arguments])


def main(argv: Sequence[str]) -> None:
    del argv
    distributed.init_process_group()
    rank = distributed.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    run = machine.new_run(0, _command(), _COMMIT.value) if rank == 0 and _JSON_OUT.value else None
    trainers = _trainers(device)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    order, generator = [*trainers], random.Random(0)  # the same order on all ranks
    for _ in range(_ROUNDS.value):
        generator.shuffle(order)
        for name in order:
            times[name].append(_timed_ms(trainers[name], device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {
            "model": name,
            "ms": round(medians[name], 2),
            "spread_ms": round(spread(values), 2),
            "speedup": round(medians[_TORCH] / medians[name], 3),
        }
        for name, values in times.items()
    ]
    if rank == 0:
        for row in rows:
            print(f"{row['model']}: {row['ms']} ms ± {row['spread_ms']}, torch's time is {row['speedup']} of it")
    if run is not None:
        document = {"run": dataclasses.asdict(machine.end_run(run, 0)), "rows": rows}
        Path(_JSON_OUT.value).write_text(json.dumps(document, indent=1, default=str) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    app.run(main)
