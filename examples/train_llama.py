"""Trains a small Llama in fp8 and in bf16, with the same data and seed, and compares them.

    python examples/train_llama.py [--recipe rowwise] [--layers 12] [--width 768] [--steps 1000] [--folder DIR]

Prints the loss and the tokens/s of both. With --folder each run saves its state every --save steps, and a
run that was stopped goes on from there, with the losses that it would have had. Runs anywhere; on a CPU
fp8 is emulated, and slow.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import torch
from llama_model import Llama, loss_of, text

import stoneware as sw


def train(recipe: str, options: argparse.Namespace) -> list[float]:
    """The loss of each step; recipe "torch" leaves the linears as they are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Llama(options.layers, options.width, options.length).to(device, torch.bfloat16)
    if recipe != "torch":
        print(sw.nn.convert(model, recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    path = options.folder and options.folder / f"{recipe}.pt"
    if path and path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
        print(f"{recipe}: goes on after step {len(losses)}")
    data = text()
    begin, first = time.perf_counter(), len(losses)
    for step in range(first, options.steps):
        loss = loss_of(model, data, step, options.batch, options.length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if path and (step + 1) % options.save == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    tokens = (len(losses) - first) * options.batch * options.length
    last = losses[-min(20, len(losses)) :]
    rate = tokens / (time.perf_counter() - begin)
    print(f"{recipe}: loss {sum(last) / len(last):.4f}, the mean of the last {len(last)} steps; {rate:.0f} tokens/s")
    return losses


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise", help="of sw.nn.convert")
    parser.add_argument("--folder", type=pathlib.Path, help="where runs are saved")
    for name, default in {"layers": 12, "width": 768, "steps": 1000, "batch": 16, "length": 512, "save": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args(arguments)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    return {recipe: train(recipe, options) for recipe in ("torch", options.recipe)}


if __name__ == "__main__":
    main()
