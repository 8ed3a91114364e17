"""Regret: what the look-up loses at a problem that was not measured, estimated from those that were.

Leave one out: take a measured problem away, ask what the look-up would choose for it from the rest,
and compare that choice's measured time with the best one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.report import measures
from stoneware.report.measures import Problem
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning import lookup
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Block, DeviceTable, Table
from stoneware.tuning.time_model import TimeModel

LEFT_OUT = ("m", "weight")
"""What is left out: one problem, so that the nearest m answers; or all problems of its NK shape, so
that the nearest shape answers."""


@dataclass(frozen=True, kw_only=True)
class Regret:
    """One problem that was left out.

    Attributes:
      key: the problem.
      answered_by: the problem that answered in its place, or the nearest of those that did.
      layer: which layer of the look-up answered, "nearest m" or "nearest shape".
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


def of_problems(
    found: Iterable[Problem], left_out: str = "m", models: Mapping[AnyKey, Mapping[AnyConfig, TimeModel]] | None = None
) -> list[Regret]:
    """The regret of the look-up at every measured problem that something else can answer for.

    The look-up answers as it does for users (`tuning.lookup`). The first of its choices that was
    timed at the left-out problem counts. A problem that is alone in its family, or shares no timed
    candidate with those that answer, is not in the result.

    Args:
      found: problems of one device.
      left_out: one of LEFT_OUT.
      models: family -> config -> time model, as `time_fit.models` gives them. They were fitted to
        the left-out problem too: some six numbers to hundreds of measurements.

    Returns:
      Sorted by key; times in microseconds.
    """
    regrets = []
    for family, members in measures.families(found).items():
        entries = {problem.key.sizes: [problem] for problem in members}
        blocks: dict[tuple[int, ...], Block] = {}
        for problem in members:
            place = problem.key.sizes if left_out == "m" else problem.key.sizes[:-1]
            if place not in blocks:
                rest = {sizes: entry for sizes, entry in entries.items() if sizes[: len(place)] != place}
                blocks[place] = Block(family, rest, (models or {}).get(family))
            if blocks[place].num_entries:
                regrets += _regret(problem, blocks[place])
    return regrets


def _regret(problem: Problem, rest: Block) -> list[Regret]:
    """The regret at a problem for which the rest answers; none if its choices were not timed there."""
    measured = {choice.config: choice.median_us for choice in problem.choices}
    device = DeviceTable(_ANY_DEVICE, (), {rest.family: rest})
    only = Table(op=problem.key.op, digest="", devices=[device], runs={})
    for found in lookup.answers(problem.key, _ANY_DEVICE, [Source("the rest", only)]):
        for choice in found.entry.choices:
            if choice.config in measured:
                return [
                    Regret(
                        key=problem.key,
                        answered_by=found.modelled_from or found.entry.key,
                        layer=found.layer,
                        chosen=choice.config,
                        chosen_us=measured[choice.config],
                        best=problem.fastest.config,
                        best_us=problem.fastest.median_us,
                    )
                ]
    return []


_ANY_DEVICE = DeviceFingerprint(name="measured", compute_capability=(0, 0), num_sms=0, l2_bytes=0, memory_clock_khz=0)
"""Measurements are of one device, and the look-up is asked for that one."""


def summary(regrets: Sequence[Regret]) -> dict[str, Any]:
    """Regrets in short, as JSON values.

    Returns:
      count: how many.
      geomean, worst: geometric mean of the ratios, and the largest; None if there are none.
      num_best: how many chose what was fastest.
    """
    ratios = [regret.ratio for regret in regrets]
    return {
        "count": len(ratios),
        "geomean": measures.geometric_mean(ratios),
        "worst": max(ratios, default=None),
        "num_best": sum(regret.chosen == regret.best for regret in regrets),
    }
