"""How much later a fused call is done than the op alone, by the table: what a saved kernel must outweigh."""

from __future__ import annotations

from typing import Any

from stoneware.kernels import tile_rule
from stoneware.kernels.sm90_kernels import BACKEND as SM90
from stoneware.runtime.device import Device

KERNEL_US = 1.0
"""What a kernel after another one takes in a CUDA graph, apart from its bytes: a cautious estimate, not measured."""


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
    if fused.chosen is None:  # not in the table; one that takes turns is there for large results
        return 0.0 if tile_rule.takes_turns(fused.config.kernel) else None
    return float(fused.chosen.median_us - fastest.chosen.median_us)
