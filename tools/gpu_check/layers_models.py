"""The part `models`: models of transformers in bf16, compiled and in a CUDA graph, with the linears of
torch.nn and of stoneware.nn."""

from __future__ import annotations

import logging
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.layers_clock import Budget, Call, Clock, compare, text_of
from tools.gpu_check.layers_inference import OURS_BF16, forward
from tools.gpu_check.layers_linear import TORCH
from tools.gpu_check.layers_sizes import Sizes

LOGITS_LIMIT = 0.05
"""Relative error in the Frobenius norm against torch's eager model: a few blocks of bf16."""

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
        ours = layers_llama.sharing_copy(base)
        kept[kind] = dict(sw.nn.convert(ours, recipe="bf16").kept)
        for tokens in sizes.inference_tokens:
            ids = torch.randint(config["vocab_size"], (1, tokens), device=clock.device)
            row = _row({TORCH: base, OURS_BF16: ours}, ids, clock, budget.share(num_left, _MOST_SECONDS))
            rows.append({"model": kind, "tokens": tokens} | row)
            failures = [f"{name}: {check['detail']}" for name, check in row["checks"].items() if check["detail"]]
            failures += [f"{name}: {one['failure']}" for name, one in row["step"].items() if "failure" in one]
            problems += [f"{kind} at {tokens} tokens: {failure}" for failure in failures]
            num_left -= 1
            logging.info(
                "models: %s, %d tokens: %s", kind, tokens, {k: v.get("median_ms") for k, v in row["step"].items()}
            )
        del base, ours
        clock.release()
    return {
        "num_layers": sizes.models_layers,
        "limits": {"logits": LOGITS_LIMIT},
        "kept": kept,
        "rows": rows,
        "problems": problems,
    }


def _row(models: dict[str, torch.nn.Module], ids: torch.Tensor, clock: Clock, seconds: float) -> dict[str, Any]:
    """Checks and times of the compiled models at these tokens: {"checks", "step"}."""
    torch.compiler.reset()  # or the code of a block would have more versions than dynamo keeps
    want = forward(models[TORCH], ids)().float()
    checks, calls = {}, {}
    for name, model in models.items():
        checks[name] = {"is_right": False, "errors": {}, "detail": ""}
        try:
            call = _compiled(model, ids)
            error = float((call().float() - want).norm() / want.norm())
            checks[name]["errors"]["logits"] = float(f"{error:.3g}")
            if error < LOGITS_LIMIT:
                checks[name]["is_right"] = True
                calls[name] = clock.graphed(call)
            else:
                checks[name]["detail"] = f"logits: relative error {error:.3g} must be below {LOGITS_LIMIT}"
        except Exception as error:  # it is reported; the other keeps its figure
            checks[name]["detail"] = text_of(error)
    return {"checks": checks, "step": compare(calls, clock, rounds=15, seconds=seconds, seed=ids.numel())}


def _compiled(model: torch.nn.Module, ids: torch.Tensor) -> Call:
    for block in model.model.layers:
        block.compile(dynamic=False)
    return forward(model, ids)
