"""The part `lora`: a training step of adapters over frozen weights, in fp8 and in bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.checks import Check, failures
from tools.gpu_check.experiment import Call, Part, Prepared, Row
from tools.gpu_check.layers_clock import Clock, compare
from tools.gpu_check.layers_peers import TorchLora
from tools.gpu_check.layers_sizes import OURS, TORCH, Sizes

GRADIENT_LIMIT = 0.25
"""Relative error of all adapters' gradients together, against the bf16 model's: fp8 products one after
another in both directions. Gradients of another input differ by 1 or more."""

_MOST_SECONDS = 10.0


def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """One row: a step of each kind of model."""
    base = layers_llama.build("LlamaModel", sizes.llama, sizes.lora_layers, clock.device)
    ours = layers_llama.sharing_copy(base)
    models = {TORCH: base, OURS: ours}
    layers_llama.replace(base, lambda name, layer: TorchLora(layer, sizes.lora_rank))
    sw.nn.convert(ours, "rowwise", frozen=True)
    layers_llama.replace(ours, lambda name, layer: sw.nn.Lora(layer, sizes.lora_rank))
    _draw_adapters(base, ours)
    shape = (1, sizes.lora_tokens, sizes.llama["hidden_size"])
    x, target = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))

    def prepare(case: Row) -> Prepared:
        gradients = {}
        for name, model in models.items():
            _loss(model, x, target).backward()
            gradients[name] = torch.cat([one.grad.flatten().float() for one in _adapters(model)])
            model.zero_grad()
        error = float((gradients[OURS] - gradients[TORCH]).norm() / gradients[TORCH].norm())
        check = Check()
        check.error("gradients", error, GRADIENT_LIMIT)
        steps = {name: _step(model, x, target) for name, model in models.items() if name == TORCH or not check.wrong}
        weight_bytes = {name: layers_llama.weight_bytes(model, ".base") for name, model in models.items()}
        return {"checks": {OURS: check.to_json()}, "weight_bytes": weight_bytes}, steps

    def time_steps(steps: Mapping[str, Call], seconds: float, row: Row) -> Row:
        times = compare(steps, clock, rounds=sizes.rounds, seconds=seconds)
        row["peak_bytes"] = {
            name: clock.peak_bytes(step) for name, step in steps.items() if "failure" not in times[name]
        }
        return times

    part.report |= {"num_layers": sizes.lora_layers, "rank": sizes.lora_rank, "limits": {"gradients": GRADIENT_LIMIT}}
    part.measure([{"tokens": sizes.lora_tokens}], prepare, time_steps, judge=failures, most_s=_MOST_SECONDS)


def _adapters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def _draw_adapters(base: torch.nn.Module, ours: torch.nn.Module) -> None:
    """The same values in both, and none of them zero, so that every gradient says something."""
    with torch.no_grad():
        for one, other in zip(_adapters(base), _adapters(ours)):
            one.normal_(std=one.shape[1] ** -0.5 / 4)
            other.copy_(one)


def _loss(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Without the head, which would be a large part of so few blocks."""
    return functional.mse_loss(model(inputs_embeds=x, use_cache=False).last_hidden_state.float(), target.float())


def _step(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(_adapters(model), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, x, target).backward()
        optimizer.step()

    return step
