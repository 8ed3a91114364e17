"""Trains a small Llama in fp8 and in bf16, with the same data and seed, and compares them.

    python examples/train_llama.py [--recipe rowwise] [--layers 12] [--width 768] [--steps 1000] [--folder DIR]
    torchrun --nproc-per-node 2 examples/train_llama.py --fsdp ...

Prints the loss and the tokens/s of both. With --folder each run saves its state every --save steps, and a
run that was stopped goes on from there, with the losses that it would have had. With --fsdp the parameters,
in 32 bits, are shared out among the ranks (torch.distributed.fsdp) and gathered in fp8; each rank has a
batch of its own.
Runs anywhere; on a CPU fp8 is emulated, and slow: --layers 1 --width 64 --batch 2 --length 64 --steps 20 takes seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import time

import torch
from llama_model import Llama, loss_of, text
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import stoneware as sw

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""A state is saved as one process has it, whatever the number of ranks."""


def train(recipe: str, options: argparse.Namespace) -> list[float]:
    """The mean loss of all ranks at each step; recipe "torch" leaves the linears as they are."""
    rank, num_ranks = (distributed.get_rank(), distributed.get_world_size()) if options.fsdp else (0, 1)
    model = model_of(recipe, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    path = options.folder and options.folder / f"{recipe}.pt"
    if path and path.exists():
        losses = load(path, model, optimizer)
        show(f"{recipe}: goes on after step {len(losses)}")
    data = text()
    begin, first = time.perf_counter(), len(losses)
    device = next(model.parameters()).device.type
    show(f"{recipe}: {options.steps - first} steps of {options.batch} x {options.length} tokens on the {device}")
    for step in range(first, options.steps):
        loss = loss_of(model, data, step * num_ranks + rank, options.batch, options.length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / num_ranks
        if options.fsdp:
            distributed.all_reduce(mean)
        losses.append(mean.item())
        if step == first:
            show(f"{recipe}: the first step took {time.perf_counter() - begin:.1f} s, loss {losses[-1]:.4f}")
        if path and (step + 1) % options.save == 0:
            save(path, model, optimizer, losses)
    tokens = (len(losses) - first) * options.batch * options.length * num_ranks
    last = losses[-min(20, len(losses)) :]
    rate = tokens / (time.perf_counter() - begin)
    show(f"{recipe}: loss {sum(last) / len(last):.4f}, the mean of the last {len(last)} steps; {rate:.0f} tokens/s")
    return losses


def model_of(recipe: str, options: argparse.Namespace) -> Llama:
    """The same model on every rank, converted and then sharded."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Llama(options.layers, options.width, options.length)
    model.to(device, torch.float32 if options.fsdp else torch.bfloat16)
    if recipe != "torch":
        show(sw.nn.convert(model, recipe))
    if options.fsdp:
        sw.nn.gather_in_fp8(model)
        for block in model.blocks:
            fully_shard(block, mp_policy=MIXED)
        fully_shard(model, mp_policy=MIXED)
    return model


def save(path: pathlib.Path, model: Llama, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Rank 0 writes what all ranks have."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=WHOLE)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        torch.save({"model": of_model, "optimizer": of_optimizer, "losses": losses}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def load(path: pathlib.Path, model: Llama, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses until then."""
    saved = torch.load(path, map_location="cpu")
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=WHOLE
    )
    return saved["losses"]


def show(what: object) -> None:
    """Prints it once."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(what, flush=True)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", help="of sw.nn.convert")
    parser.add_argument("--folder", type=pathlib.Path, help="where runs are saved")
    parser.add_argument("--fsdp", action="store_true", help="share the parameters out; for torchrun")
    for name, default in {"layers": 12, "width": 768, "steps": 1000, "batch": 16, "length": 512, "save": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args(arguments)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.fsdp:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group()
    try:
        return {recipe: train(recipe, options) for recipe in ("torch", options.recipe)}
    finally:
        if options.fsdp:
            gc.collect()  # FSDP's states hold one another and the group, whose threads end before the interpreter
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
