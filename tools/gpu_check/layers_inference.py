"""The parts `inference` and `models`: forward passes of Llama 3 8B, eager and in CUDA graphs; and of several models of
transformers, compiled and in a CUDA graph, as they are and converted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.checks import BF16_LIMIT, E4M3_LIMIT, Check, failures
from tools.gpu_check.experiment import Call, Part, Prepared, Row
from tools.gpu_check.layers_clock import Clock, timing
from tools.gpu_check.layers_peers import ScaledMmLinear
from tools.gpu_check.layers_sizes import MODES, OURS, OURS_BF16, OURS_BLOCKWISE, TORCH, Sizes

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
"""Limit of the error of fp8 logits over the peer's, whose weights have a scale for each row. A random model amplifies
what each product rounds, and 32 blocks leave no limit that holds for itself."""

INFERENCE_RECIPES = {OURS_BF16: "bf16", OURS: "rowwise", OURS_BLOCKWISE: "blockwise"}

_MOST_SECONDS = 12.0
"""For timing all models at one number of tokens."""


def models(sizes: Sizes, device: torch.device) -> dict[str, torch.nn.Module]:
    """The same model by each kind of linear; the peer has the weights of OURS."""
    base = layers_llama.build("LlamaForCausalLM", sizes.llama, sizes.inference_layers, device)
    ours = {name: layers_llama.sharing_copy(base) for name in INFERENCE_RECIPES}
    for name, recipe in INFERENCE_RECIPES.items():
        print(f"inference, {recipe}: {sw.nn.convert(ours[name], recipe, frozen=True)}", flush=True)
    peer = layers_llama.sharing_copy(base)
    frozen = ours[OURS].state_dict()  # names the layers as the model had them, whatever they were fused to
    layers_llama.replace(
        peer, lambda name, _: ScaledMmLinear(frozen[f"{name}.weight"], frozen[f"{name}.weight_scale_inv"])
    )
    return {TORCH: base, **ours, PEER: peer}


@torch.no_grad()
def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """A row of each number of tokens."""
    by_name = models(sizes, clock.device)
    part.report |= {
        "num_layers": sizes.inference_layers,
        "limits": {
            "linears": {"bf16": BF16_LIMIT, "fp8": E4M3_LIMIT},
            "feed-forwards": {"bf16": MLP_BF16_LIMIT, "fp8": MLP_E4M3_LIMIT},
            "logits": {"bf16": BF16_LOGITS_LIMIT, "fp8, over the peer's": LOGITS_RATIO},
        },
        "weight_bytes": {name: layers_llama.weight_bytes(by_name[name]) for name in (TORCH, OURS, OURS_BLOCKWISE)},
    }

    def prepare(case: Row) -> Prepared:
        ids = torch.randint(sizes.llama["vocab_size"], (1, case["tokens"]), device=clock.device)
        checks = _checks(by_name, ids)
        calls: dict[str, Call] = {}
        for name, check in checks.items():
            if check["is_right"]:
                call = forward(by_name[name], ids)
                calls |= {f"{name}, {MODES[0]}": call, f"{name}, {MODES[1]}": _graphed(call, clock)}
        return {"checks": checks}, calls

    part.measure(
        [{"tokens": tokens} for tokens in sizes.inference_tokens],
        prepare,
        timing(clock, sizes.rounds),
        judge=lambda row: [why for why in failures(row) if not why.startswith(PEER)],
        most_s=_MOST_SECONDS,
    )


def _graphed(call: Call, clock: Clock) -> Call:
    """The call in a graph; a peer may launch what cannot be captured, and then each call raises the reason."""
    try:
        return clock.graphed(call)
    except Exception as error:
        reason = error

    def refuse() -> None:
        raise reason

    return refuse


def forward(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    return forward


def _checks(by_name: dict[str, torch.nn.Module], ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """For each model: the layers of its first and last blocks against float64, and its logits against the
    bf16 model's: {"is_right", "errors", "detail"}."""
    inputs, logits = _inputs_and_logits(by_name[TORCH], ids)
    checks: dict[str, dict[str, Any]] = {TORCH: {"is_right": True, "errors": {}, "detail": "the reference"}}
    most_off = {OURS_BF16: BF16_LOGITS_LIMIT}
    for name in (OURS_BF16, PEER, OURS, OURS_BLOCKWISE):
        model, check = by_name[name], Check()
        with check.refusals():
            for module_name, x in inputs.items():
                want = copy.deepcopy(by_name[TORCH].get_submodule(module_name)).double()(x.double())
                check.product(module_name, model.get_submodule(module_name)(x), want, _limit(name, module_name))
            error = float((forward(model, ids)().float() - logits).norm() / logits.norm())
            check.error("logits", error, most_off.get(name, math.inf))
            if name == PEER:
                most_off |= dict.fromkeys((OURS, OURS_BLOCKWISE), LOGITS_RATIO * error)
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


BLOCK_LIMITS = {TORCH: 0.02, OURS_BF16: 0.02, OURS: 0.2}
"""Relative error of what a block returns against torch's eager block, in the norm; the median over the tokens, since a
router sends a few to another expert for the last bit. The model as a whole has no limit: a random one amplifies what
each block rounds."""

_CHECKED_TOKENS = 16
"""The least tokens whose errors the median is of; with fewer in a call, it is of several calls."""

MODEL_RECIPES = {OURS_BF16: "bf16", OURS: "rowwise"}

_MOST_MODEL_SECONDS = 3.0
"""For timing both at one number of tokens."""


@torch.no_grad()
def measure_models(part: Part, sizes: Sizes, clock: Clock) -> None:
    """A row of each model and number of tokens.

    Every block is compiled for each number of tokens, and the model captured in a CUDA graph.
    """
    part.report |= {"num_layers": sizes.models_layers, "limits": BLOCK_LIMITS}
    kept = part.report.setdefault("kept", {})
    models: dict[str, dict[str, torch.nn.Module]] = {}

    def prepare(case: Row) -> Prepared:
        kind = case["model"]
        if kind not in models:
            models.clear()  # before there are others
            base = layers_llama.build(kind, sizes.models[kind], sizes.models_layers, clock.device)
            models[kind] = {TORCH: base} | {name: layers_llama.sharing_copy(base) for name in MODEL_RECIPES}
            kept[kind] = {
                name: dict(sw.nn.convert(models[kind][name], recipe, frozen=True).kept)
                for name, recipe in MODEL_RECIPES.items()
            }
        num_calls = -(-_CHECKED_TOKENS // case["tokens"])
        shape = (num_calls, 1, case["tokens"])
        ids = torch.randint(sizes.models[kind]["vocab_size"], shape, device=clock.device)
        return _prepare_models(models[kind], [*ids], clock)

    part.measure(
        [{"model": kind, "tokens": tokens} for kind in sizes.models for tokens in sizes.models_tokens],
        prepare,
        timing(clock, 15),
        judge=failures,
        most_s=_MOST_MODEL_SECONDS,
    )


def _prepare_models(models: Mapping[str, torch.nn.Module], ids: Sequence[torch.Tensor], clock: Clock) -> Prepared:
    """Compiled models, each captured with the first of these tokens and checked with all."""
    torch.compiler.reset()  # or the code of a block would have more versions than dynamo keeps
    given = [*zip(*(_given(models[TORCH], one) for one in ids))]  # for each block, its calls
    checks: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name, model in models.items():
        for block in model.model.layers:
            block.compile(dynamic=False)
        check = Check()
        with check.refusals():
            for idx, (block, block_calls) in enumerate(zip(model.model.layers, given)):
                off = [
                    (block(*arguments, **named).float() - want).norm(dim=-1) / want.norm(dim=-1)
                    for arguments, named, want in block_calls
                ]
                check.error(f"block {idx}", float(torch.cat(off, -1).median()), BLOCK_LIMITS[name])
            if not check.wrong:
                calls[name] = clock.graphed(forward(model, ids[0]))
        checks[name] = check.to_json()
    return {"checks": checks}, calls


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
