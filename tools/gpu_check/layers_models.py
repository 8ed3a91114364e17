"""The part `models`: models of transformers, compiled and in a CUDA graph, as they are and converted."""

from __future__ import annotations

import logging
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.layers_clock import Budget, Call, Clock, compare
from tools.gpu_check.layers_inference import forward
from tools.gpu_check.layers_sizes import OURS, OURS_BF16, TORCH, Sizes
from tools.gpu_check.layers_values import Check, failures

LIMITS = {TORCH: 0.02, OURS_BF16: 0.02, OURS: 0.2}
"""Relative error of what a block returns against torch's eager block, in the norm; the median over the tokens, since a
router sends a few to another expert for the last bit. The model as a whole has no limit: a random one amplifies what
each block rounds."""

RECIPES = {OURS_BF16: "bf16", OURS: "rowwise"}

_MOST_SECONDS = 3.0
"""For timing both at one number of tokens."""


@torch.no_grad()
def measure(sizes: Sizes, clock: Clock, budget: Budget) -> dict[str, Any]:
    """Rows of each model and number of tokens: {"num_layers", "limits", "kept", "rows", "problems"}.

    Every block is compiled for each number of tokens, and the model captured in a CUDA graph.
    """
    rows, problems, kept = [], [], {}
    num_left = len(sizes.models) * len(sizes.inference_tokens)
    for kind, config in sizes.models.items():
        base = layers_llama.build(kind, config, sizes.models_layers, clock.device)
        models = {TORCH: base} | {name: layers_llama.sharing_copy(base) for name in RECIPES}
        kept[kind] = {
            name: dict(sw.nn.convert(models[name], recipe, frozen=True).kept) for name, recipe in RECIPES.items()
        }
        for tokens in sizes.inference_tokens:
            ids = torch.randint(config["vocab_size"], (1, tokens), device=clock.device)
            row = _row(models, ids, clock, budget.share(num_left, _MOST_SECONDS))
            rows.append({"model": kind, "tokens": tokens} | row)
            problems += [f"{kind} at {tokens} tokens: {name}: {why}" for name, why in failures(row).items()]
            num_left -= 1
            logging.info(
                "models: %s, %d tokens: %s", kind, tokens, {k: v.get("median_ms") for k, v in row["step"].items()}
            )
        del base, models
        clock.release()
    return {"num_layers": sizes.models_layers, "limits": LIMITS, "kept": kept, "rows": rows, "problems": problems}


def _row(models: dict[str, torch.nn.Module], ids: torch.Tensor, clock: Clock, seconds: float) -> dict[str, Any]:
    """Checks and times of the compiled models at these tokens: {"checks", "step"}."""
    torch.compiler.reset()  # or the code of a block would have more versions than dynamo keeps
    given = _given(models[TORCH], ids)
    checks: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name, model in models.items():
        for block in model.model.layers:
            block.compile(dynamic=False)
        check = Check()
        with check.refusals():
            for idx, (block, (arguments, named, want)) in enumerate(zip(model.model.layers, given)):
                off = (block(*arguments, **named).float() - want).norm(dim=-1) / want.norm(dim=-1)
                check.error(f"block {idx}", float(off.median()), LIMITS[name])
            if not check.wrong:
                calls[name] = clock.graphed(forward(model, ids))
        checks[name] = check.to_json()
    return {"checks": checks, "step": compare(calls, clock, rounds=15, seconds=seconds, seed=ids.numel())}


def _given(model: torch.nn.Module, ids: torch.Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]]:
    """What each block is called with, and what it returns by itself, uncompiled, in float32."""
    given: list[Any] = []

    def keep(block: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], y: torch.Tensor) -> None:
        given.append((arguments, named, y.float()))

    hooks = [block.register_forward_hook(keep, with_kwargs=True) for block in model.model.layers]
    try:
        with torch.compiler.set_stance("force_eager"):
            forward(model, ids)()
    finally:
        for hook in hooks:
            hook.remove()
    return given
