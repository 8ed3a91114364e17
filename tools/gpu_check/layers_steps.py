"""The part `steps`: whole training steps of a Llama of transformers, as it is and converted, in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

import stoneware as sw
from tools.gpu_check import layers_llama
from tools.gpu_check.checks import Check, failures
from tools.gpu_check.experiment import Part, Prepared, Row
from tools.gpu_check.layers_clock import Clock, timing
from tools.gpu_check.layers_sizes import TORCH, Sizes

RECIPES = ("bf16", "rowwise", "tensorwise", "blockwise")

LIMITS = {"loss": 0.01, "gradients": 0.5}
"""Relative errors of a first loss, and of all gradients together, against the model as it is. An fp8 product is off by
0.04, and a gradient in the first of 12 blocks has 170 on its way, whose errors add up to 0.5 if they are independent.
Gradients of another input differ by 1 or more."""

_MOST_SECONDS = 25.0


def measure(part: Part, sizes: Sizes, clock: Clock) -> None:
    """A row of each model and batch: forward, backward and AdamW."""
    cases = [
        {"model": name, "batch": batch, "length": length}
        for name, (_, _, shapes) in sizes.step_models.items()
        for batch, length in shapes
    ]

    def prepare(case: Row) -> Prepared:
        config, num_layers, _ = sizes.step_models[case["model"]]
        base = layers_llama.build("LlamaForCausalLM", config, num_layers, clock.device).train().requires_grad_(True)
        tokens = torch.randint(config["vocab_size"], (case["batch"], case["length"]), device=clock.device)
        models = {TORCH: base}
        for recipe in RECIPES:
            models[f"stoneware {recipe}"] = copy.deepcopy(base)
            sw.nn.convert(models[f"stoneware {recipe}"], recipe)
        checks, steps = {}, {}
        expected = _loss(base, tokens)
        expected.backward()
        gradients = [parameter.grad for parameter in base.parameters()]
        for name, model in models.items():
            check = Check()
            with check.refusals():
                model.zero_grad()
                loss = _loss(model, tokens)
                loss.backward()
                check.error("loss", abs(loss.item() / expected.item() - 1), LIMITS["loss"])
                check.error("gradients", _error(model, gradients), LIMITS["gradients"])
            model.zero_grad()
            checks[name] = check.to_json()
            if not check.wrong:
                steps[name] = _step(model, tokens)
        return {"checks": checks}, steps

    part.report["limits"] = LIMITS
    part.measure(cases, prepare, timing(clock, sizes.rounds), judge=failures, most_s=_MOST_SECONDS)


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _error(model: torch.nn.Module, expected: Sequence[torch.Tensor | None]) -> float:
    """The relative error of the gradients of all parameters together."""
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter, want in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and want is not None  # each has a gradient
        squares[0] += (parameter.grad - want).float().square().sum().item()
        squares[1] += want.float().square().sum().item()
    return float((squares[0] / squares[1]).sqrt())


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        _loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
