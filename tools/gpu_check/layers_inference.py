"""The part `inference`: forward passes of Llama 3 8B, eager and in CUDA graphs."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.document import text_of
from tools.gpu_check.layers_clock import Budget, Call, Clock, compare
from tools.gpu_check.layers_peers import ScaledMmLinear
from tools.gpu_check.layers_sizes import MODES, OURS, OURS_BF16, TORCH, Sizes
from tools.gpu_check.layers_values import BF16_LIMIT, E4M3_LIMIT, Check, failures

PEER = "torch._scaled_mm, Triton quantizer"

CHECKED = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp")
"""Modules of the first and the last block that are compared with float64; a feed-forward as a whole, since
it may be one call."""

MLP_BF16_LIMIT = 0.012
"""Five roundings to bf16, one after another or side by side."""

MLP_E4M3_LIMIT = 0.12
"""Five fp8 operands make 0.07 together."""

BF16_LOGITS_LIMIT = 0.25
"""Relative error in the Frobenius norm against torch's bf16 model."""

LOGITS_RATIO = 1.2
"""Of the error of fp8 logits over the peer's, which has the same weights. A random model amplifies what each
product rounds, and 32 blocks leave no limit that holds for itself."""

_MOST_SECONDS = 12.0
"""For timing all models at one number of tokens."""


def models(sizes: Sizes, device: torch.device) -> dict[str, torch.nn.Module]:
    """The same model by each kind of linear; the fp8 ones share their weights."""
    base = layers_llama.build("LlamaForCausalLM", sizes.llama, sizes.inference_layers, device)
    ours_bf16, ours = layers_llama.sharing_copy(base), layers_llama.sharing_copy(base)
    sw.nn.convert(ours_bf16, recipe="bf16", frozen=True)
    logging.info("inference: %s", sw.nn.convert(ours, recipe="rowwise", frozen=True))
    peer = layers_llama.sharing_copy(base)
    frozen = ours.state_dict()  # names the layers as the model had them, whatever they were fused to
    layers_llama.replace(
        peer, lambda name, _: ScaledMmLinear(frozen[f"{name}.weight"], frozen[f"{name}.weight_scale_inv"])
    )
    return {TORCH: base, OURS_BF16: ours_bf16, OURS: ours, PEER: peer}


@torch.no_grad()
def measure(sizes: Sizes, clock: Clock, budget: Budget) -> dict[str, Any]:
    """Rows of each number of tokens, and what was wrong: {"num_layers", "limits", "rows", "problems"}."""
    by_name = models(sizes, clock.device)
    clock.release()
    rows, problems = [], []
    for idx, tokens in enumerate(sizes.inference_tokens):
        ids = torch.randint(sizes.llama["vocab_size"], (1, tokens), device=clock.device)
        row: dict[str, Any] = {"tokens": tokens, "checks": _checks(by_name, ids)}
        calls: dict[str, Call] = {}
        uncaptured: dict[str, Any] = {}
        for name, check in row["checks"].items():
            if check["is_right"]:
                call = forward(by_name[name], ids)
                calls[f"{name}, {MODES[0]}"] = call
                try:
                    calls[f"{name}, {MODES[1]}"] = clock.graphed(call)
                except Exception as error:  # a peer may launch what cannot be captured
                    uncaptured[f"{name}, {MODES[1]}"] = {"failure": text_of(error)}
        seconds = budget.share(len(sizes.inference_tokens) - idx, _MOST_SECONDS)
        row["step"] = compare(calls, clock, rounds=sizes.rounds, seconds=seconds, seed=idx) | uncaptured
        rows.append(row)
        problems += [
            f"{name}: at {tokens} tokens: {why}" for name, why in failures(row).items() if not name.startswith(PEER)
        ]
        logging.info("inference: %d tokens: %s ms", tokens, {k: v.get("median_ms") for k, v in row["step"].items()})
        del calls
        clock.release()
    limits = {
        "linears": {"bf16": BF16_LIMIT, "fp8": E4M3_LIMIT},
        "feed-forwards": {"bf16": MLP_BF16_LIMIT, "fp8": MLP_E4M3_LIMIT},
        "logits": {"bf16": BF16_LOGITS_LIMIT, "fp8, over the peer's": LOGITS_RATIO},
    }
    return {
        "num_layers": sizes.inference_layers,
        "limits": limits,
        "weight_bytes": {name: layers_llama.weight_bytes(by_name[name]) for name in (TORCH, OURS)},
        "rows": rows,
        "problems": problems,
    }


def forward(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    return forward


def _checks(by_name: dict[str, torch.nn.Module], ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Of each model: the layers of its first and last blocks against float64, and its logits against the
    bf16 model's: {"is_right", "errors", "detail"}."""
    inputs, logits = _inputs_and_logits(by_name[TORCH], ids)
    checks: dict[str, dict[str, Any]] = {TORCH: {"is_right": True, "errors": {}, "detail": "the reference"}}
    most_off = {OURS_BF16: BF16_LOGITS_LIMIT}
    for name in (OURS_BF16, PEER, OURS):
        model, check = by_name[name], Check()
        with check.refusals():
            for module_name, x in inputs.items():
                want = copy.deepcopy(by_name[TORCH].get_submodule(module_name)).double()(x.double())
                check.product(module_name, model.get_submodule(module_name)(x), want, _limit(name, module_name))
            error = float((forward(model, ids)().float() - logits).norm() / logits.norm())
            check.error("logits", error, most_off.get(name, math.inf))
            if name == PEER:
                most_off[OURS] = LOGITS_RATIO * error
        checks[name] = check.to_json()
    return checks


def _limit(model_name: str, module_name: str) -> float:
    if module_name.endswith("mlp"):
        return MLP_BF16_LIMIT if model_name == OURS_BF16 else MLP_E4M3_LIMIT
    return BF16_LIMIT if model_name == OURS_BF16 else E4M3_LIMIT


def _inputs_and_logits(model: torch.nn.Module, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the modules of CHECKED are given, [rows, k], and the logits."""
    found = [name for name, _ in model.named_modules() if name.endswith(CHECKED)]
    blocks = [name.partition(".layers.")[2].partition(".")[0] for name in found]
    chosen = [name for name, block in zip(found, blocks) if block in (blocks[0], blocks[-1])]
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            inputs[name] = arguments[0].flatten(0, -2)

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in chosen]
    try:
        logits = forward(model, ids)().float()
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, logits
