"""Regret: what the look-up loses at a problem that was not measured, told from those that were.

Leave one out: take a measured problem away, ask what the look-up would choose for it from the rest,
and compare that choice's measured time with the best one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.report import measures
from stoneware.report.measures import Problem
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import lookup
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Block, DeviceTable, Table
from stoneware.tuning.table_entry import Entry
from stoneware.tuning.time_model import TimeModel

Models = Mapping[AnyKey, Mapping[AnyConfig, TimeModel]]
"""Family -> config -> model, as `time_fit.models` gives them."""

LEFT_OUT = ("m", "weight")
"""What is left out: one problem, so that the nearest m answers; or all problems of its sizes but m,
so that the nearest shape answers."""

BIN_EDGES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Edges of the histogram, as ratios; below the first is nothing, above the last all the rest."""


@dataclass(frozen=True, kw_only=True)
class Regret:
    """One problem that was left out.

    Attributes:
      key: the problem.
      answered_by: the problem that answered in its place, or the nearest of those that did.
      layer: by which layer of the look-up, "nearest m" or "nearest shape".
      chosen, chosen_us: what the look-up would run, and its median as measured at `key`.
      best, best_us: what was fastest at `key`, and its median.
    """

    key: AnyKey
    answered_by: AnyKey
    layer: str
    chosen: AnyConfig
    chosen_us: float
    best: AnyConfig
    best_us: float

    @property
    def ratio(self) -> float:
        """chosen_us / best_us: 1.0 where nothing is lost, 1.1 where 10 % is."""
        return self.chosen_us / self.best_us


def of_problems(found: Iterable[Problem], left_out: str = "m", models: Models | None = None) -> list[Regret]:
    """The regret of the look-up at every measured problem that something else can answer for.

    The problems answer that the look-up takes (`tuning.lookup`): where there are models those
    around it, else the nearest m of the same sizes, else the nearest shape of the family. Their
    choices are asked in their order, as the look-up does, and the first that was timed at the
    left-out problem counts. A problem that is alone in its family, or shares no timed candidate
    with those that answer, is left out of the result.

    Args:
      found: of one device.
      left_out: one of LEFT_OUT.
      models: of the families. They were fitted to the left-out problem too: some six numbers to
        hundreds of measurements.

    Returns:
      Sorted by key; times in microseconds.

    Raises:
      ValueError: `left_out` is unknown.
    """
    if left_out not in LEFT_OUT:
        raise ValueError(f"left_out={left_out!r} must be one of {', '.join(LEFT_OUT)}")
    regrets = []
    for members in measures.families(found).values():
        entries = {
            problem.key.sizes: [
                Entry(
                    key=problem.key,
                    choices=problem.choices,
                    rule=problem.rule,
                    measured_out_dtype=getattr(problem.key, "out_dtype", ""),
                )
            ]
            for problem in members
        }
        for problem in members:
            sizes = problem.key.sizes
            rest = Block(
                problem.key.family,
                {
                    other: entry
                    for other, entry in entries.items()
                    if other != sizes and (left_out == "m" or other[:-1] != sizes[:-1])
                },
                (models or {}).get(problem.key.family),
            )
            regret = _regret(problem, rest)
            if regret is not None:
                regrets.append(regret)
    return regrets


def _regret(problem: Problem, rest: Block) -> Regret | None:
    measured = {choice.config: choice.median_us for choice in problem.choices}
    blocks = {rest.family: rest} if rest.num_entries else {}
    device = DeviceTable(_ANY_DEVICE, (), blocks)
    only = Table(op=problem.key.op, digest="", devices=[device], runs={})
    for found in lookup.answers(problem.key, _ANY_DEVICE, [Source("the rest", only)]):
        for choice in found.entry.choices:
            if choice.config in measured:
                return Regret(
                    key=problem.key,
                    answered_by=found.modelled_from or found.entry.key,
                    layer=found.layer,
                    chosen=choice.config,
                    chosen_us=measured[choice.config],
                    best=problem.fastest.config,
                    best_us=problem.fastest.median_us,
                )
    return None


_ANY_DEVICE = DeviceFingerprint(name="measured", compute_capability=(0, 0), num_sms=0, l2_bytes=0, memory_clock_khz=0)
"""Measurements are of one device, and the look-up is asked for that one."""


def summary(regrets: Sequence[Regret]) -> dict[str, Any]:
    """Regrets in short, as JSON values.

    Returns:
      count: how many.
      geomean, worst: geometric mean of the ratios, and the largest; None of none.
      num_best: how many chose what was fastest.
      histogram: for each bin of BIN_EDGES, how many ratios are from its edge up to the next.
    """
    ratios = [regret.ratio for regret in regrets]
    edges = (*BIN_EDGES[1:], float("inf"))
    return {
        "count": len(ratios),
        "geomean": measures.geometric_mean(ratios),
        "worst": max(ratios, default=None),
        "num_best": sum(regret.chosen == regret.best for regret in regrets),
        "histogram": [sum(low <= ratio < high for ratio in ratios) for low, high in zip(BIN_EDGES, edges)],
    }
