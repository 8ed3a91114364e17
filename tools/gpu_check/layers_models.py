"""The part `models`: models of transformers, compiled and in a CUDA graph, as they are and converted."""

from __future__ import annotations

import logging
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.document import text_of
from tools.gpu_check.layers_clock import Budget, Call, Clock, compare
from tools.gpu_check.layers_inference import OURS, OURS_BF16, forward
from tools.gpu_check.layers_linear import TORCH
from tools.gpu_check.layers_sizes import Sizes

LIMITS = {TORCH: 0.02, OURS_BF16: 0.02, OURS: 0.2}
"""Relative error of the last hidden state against torch's eager model, in the norm; the median over the tokens,
since a router of random weights sends a few to another expert for the last bit."""

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
        kept[kind] = {name: dict(sw.nn.convert(models[name], recipe).kept) for name, recipe in RECIPES.items()}
        for tokens in sizes.inference_tokens:
            ids = torch.randint(config["vocab_size"], (1, tokens), device=clock.device)
            row = _row(models, ids, clock, budget.share(num_left, _MOST_SECONDS))
            rows.append({"model": kind, "tokens": tokens} | row)
            failures = [f"{name}: {check['detail']}" for name, check in row["checks"].items() if check["detail"]]
            failures += [f"{name}: {one['failure']}" for name, one in row["step"].items() if "failure" in one]
            problems += [f"{kind} at {tokens} tokens: {failure}" for failure in failures]
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
    want = _hidden(models[TORCH], ids)
    checks: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name, model in models.items():
        for block in model.model.layers:
            block.compile(dynamic=False)
        checks[name] = {"is_right": False, "errors": {}, "detail": ""}
        try:
            off = (_hidden(model, ids) - want).norm(dim=-1) / want.norm(dim=-1)
            error = float(off.median())
            checks[name]["errors"]["hidden"] = float(f"{error:.3g}")
            if error < LIMITS[name]:
                checks[name]["is_right"] = True
                calls[name] = clock.graphed(forward(model, ids))
            else:
                checks[name]["detail"] = f"last hidden state: relative error {error:.3g} must be below {LIMITS[name]}"
        except Exception as error:  # it is reported; the others keep their figures
            checks[name]["detail"] = text_of(error)
    return {"checks": checks, "step": compare(calls, clock, rounds=15, seconds=seconds, seed=ids.numel())}


def _hidden(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[1, tokens, hidden_size] float32."""
    return model.model(ids, use_cache=False).last_hidden_state.float()
