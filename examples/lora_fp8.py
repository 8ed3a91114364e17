"""Trains adapters over a model whose linears are frozen, in fp8 and in bf16, and compares them.

    python examples/lora_fp8.py [--layers 12] [--width 2048] [--rank 16] [--steps 50]

Prints the bytes of the linears' weights, the loss and the tokens/s of both.
"""

from __future__ import annotations

import argparse
import time

import torch
from llama_model import Llama, loss_of, text

import stoneware as sw

FROZEN = ("qkv", "o", "gate_up", "down")


def train(recipe: str | None, options: argparse.Namespace) -> tuple[int, list[float]]:
    """(bytes of the frozen weights, loss of each step); without a recipe they stay in bf16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Llama(options.layers, options.width, options.length).to(device, torch.bfloat16).requires_grad_(False)
    if recipe is not None:
        sw.nn.convert(model, recipe, frozen=True)
    num_bytes = 0
    for block in model.blocks:
        for name in FROZEN:
            layer = getattr(block, name)
            num_bytes += sum(one.numel() * one.element_size() for one in layer.parameters())
            setattr(block, name, sw.nn.Lora(layer, options.rank))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=options.lr)
    data, losses, begin = text(), [], time.perf_counter()
    for step in range(options.steps):
        loss = loss_of(model, data, step, options.batch, options.length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rate = options.steps * options.batch * options.length / (time.perf_counter() - begin)
    print(f"{recipe or 'bf16'}: frozen weights {num_bytes / 1e6:.1f} MB, loss {losses[-1]:.4f}, {rate:.0f} tokens/s")
    return num_bytes, losses


def main(arguments: list[str] | None = None) -> dict[str, tuple[int, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "width": 2048, "rank": 16, "steps": 50, "batch": 8, "length": 512}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    return {recipe or "bf16": train(recipe, options) for recipe in (None, "rowwise")}


if __name__ == "__main__":
    main()
