"""How much later a fused call is done than the op alone, by the table: what a saved kernel must outweigh."""

from __future__ import annotations

from typing import Any

from stoneware.kernels import tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.sm90_kernels import BACKEND as SM90
from stoneware.runtime.device import Device

KERNEL_US = 1.0
"""What a kernel after another one takes in a CUDA graph, apart from its bytes: a cautious estimate, not measured."""

_MOST_CHOICES = 40
"""Of a modelled entry, among which the time of a kernel is looked up that was chosen without the table."""


def lead_us(operation: Any, problem: Any, device: Device) -> float | None:
    """How much sooner the fastest kernel is done than the one that a call with an epilogue runs, by the table; None if
    nothing is predicted.

    Raises:
      UnsupportedError: nothing can run the problem.
    """
    fastest = operation.decide(problem, device, lists_refusals=False)
    fused = operation.decide(problem, device, backend=SM90, lists_refusals=False, only_open=True)
    if fastest.chosen is None:
        return None
    if fused.chosen is not None:
        return float(fused.chosen.median_us - fastest.chosen.median_us)
    return _lead_without_choice_us(operation, problem, device, fused.config, fastest.chosen.median_us)


def _lead_without_choice_us(
    operation: Any, problem: Any, device: Device, config: Config, fastest_us: float
) -> float | None:
    """The same for a config that was chosen without the table."""
    answers = operation.answers(problem.key, device, _MOST_CHOICES)
    choices = (choice for answer in answers for choice in answer.entry.choices)
    own_us = next((choice.median_us for choice in choices if choice.config == config), None)
    if own_us is not None:
        return float(own_us - fastest_us)
    return 0.0 if tile_rule.takes_turns(config.kernel) else None
