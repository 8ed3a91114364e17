"""What samples say: speed against the vendor library, rooflines, regions and ties.

Pure functions of samples; nothing is drawn here. Regret is in regret.py. A "measurement" is a
Sample, or anything with the attributes of `Measurement`; times are in microseconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoneware.kernels import tile_rule
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.kernels.registry import spec
from stoneware.report.nominal import NOMINAL
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning.choose import choose, is_slower, is_vendor
from stoneware.tuning.table_entry import Choice


class Measurement(Protocol):
    """What the functions here ask of a sample; `Sample` has it, and so has `TableMeasurement`."""

    key: AnyKey
    config: AnyConfig
    median_us: float
    spread_us: float
    status: str
    run: str
    kernel_sha256: str


Preferred = Callable[[AnyKey], Sequence[AnyConfig]]
"""The heuristic: configs for a problem, best first; it decides among timings that tie."""


def no_preference(key: AnyKey) -> Sequence[AnyConfig]:
    """The heuristic where the kernels are not known: ties go to the first in order."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What was measured at one key, as the table would take it.

    Attributes:
      key: the problem.
      choices: the timed candidates; first the one that the table chooses, then by time.
      rule: why the first was chosen, as a sentence.
    """

    key: AnyKey
    choices: tuple[Choice, ...]
    rule: str

    @property
    def chosen(self) -> Choice:
        return self.choices[0]

    @property
    def fastest(self) -> Choice:
        return min(self.choices, key=lambda choice: choice.median_us)

    @property
    def vendor(self) -> Choice | None:
        """The fastest of the vendor library's; None if it was not measured."""
        vendors = [choice for choice in self.choices if is_vendor(choice.config)]
        return min(vendors, key=lambda choice: choice.median_us, default=None)

    @property
    def speedup(self) -> float | None:
        """The vendor library's time over that of the chosen; above 1 the chosen is faster."""
        return self.vendor.median_us / self.chosen.median_us if self.vendor else None

    @property
    def ties(self) -> tuple[Choice, ...]:
        """The others that are neither slower nor faster than the chosen by more than the noise."""
        return tuple(
            choice
            for choice in self.choices[1:]
            if not is_slower(choice, self.chosen) and not is_slower(self.chosen, choice)
        )


def problems(
    measurements: Iterable[Measurement],
    dates: Mapping[str, str] | None = None,
    preferred: Preferred = no_preference,
    is_current: Callable[[Measurement], bool] | None = None,
) -> list[Problem]:
    """What the table would choose at each key; the rules are those of `tuning.entries`.

    Args:
      measurements: of one device. Of a candidate the newest counts, and only if its status is "ok";
        of a decorated kernel only those with the newest source; keys without any are left out.
      dates: run id -> ISO 8601 date, by which measurements are new or old; without it, by run id.
      preferred: the heuristic.
      is_current: whether the kernel still has the bytes that were measured; such a measurement
        comes before a newer one of other bytes. None where that is not known.

    Returns:
      One problem per key, sorted by key.
    """
    dates = dates or {}

    def age(item: Measurement) -> tuple[bool, str, str]:
        return is_current is None or is_current(item), dates.get(item.run, ""), item.run

    newest: dict[AnyKey, dict[AnyConfig, Measurement]] = {}
    sources: dict[AnyKey, str] = {}
    for item in sorted(measurements, key=age, reverse=True):
        source = item.kernel_sha256 if isinstance(item.key, KernelKey) else ""
        if sources.setdefault(item.key, source) == source:
            newest.setdefault(item.key, {}).setdefault(item.config, item)
    found = []
    for key in sorted(newest, key=lambda key: (key.op, key)):  # an op's keys are of one kind
        candidates = [
            Choice(
                config=item.config,
                median_us=item.median_us,
                spread_us=item.spread_us,
                run=item.run,
                is_stale=is_current is not None and not is_current(item),
                kernel_sha256=item.kernel_sha256,
            )
            for item in newest[key].values()
            if item.status == "ok"
        ]
        if candidates:
            choices, rule = choose(candidates, preferred(key))
            found.append(Problem(key=key, choices=choices, rule=rule))
    return found


def families(found: Iterable[Problem]) -> dict[AnyKey, list[Problem]]:
    """The problems by family, in order: only within a family can they be compared."""
    by_family: dict[AnyKey, list[Problem]] = {}
    for problem in found:
        by_family.setdefault(problem.key.family, []).append(problem)
    return by_family


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """What a device can do at most, for one kind of operands.

    Attributes:
      tflops: dense floating-point operations, in 10^12 per second.
      gbytes_per_s: DRAM bandwidth, in 10^9 bytes per second.
      source: where the two are from, as a sentence.
      is_measured: whether they are only the largest values that the samples reached.
    """

    tflops: float
    gbytes_per_s: float
    source: str
    is_measured: bool

    @property
    def ridge(self) -> float:
        """The arithmetic intensity, in operations per byte, from which arithmetic is the limit."""
        return self.tflops * 1e3 / self.gbytes_per_s

    def at(self, intensity: float) -> float:
        """The roof at an arithmetic intensity, in 10^12 operations per second."""
        return min(self.tflops, intensity * self.gbytes_per_s / 1e3)


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """A problem in the roofline.

    Attributes:
      problem: what was measured.
      intensity: floating-point operations per byte that must be moved.
      tflops: achieved by the chosen candidate, in 10^12 per second.
      num_bytes: of the operands and the result, each once.
    """

    problem: Problem
    intensity: float
    tflops: float
    num_bytes: int


def roofline(found: Iterable[Problem]) -> list[RooflinePoint]:
    """A point for each problem of our ops; decorated kernels have no known operation count."""
    return [
        RooflinePoint(
            problem=problem,
            intensity=num_operations / num_bytes,
            tflops=num_operations / problem.chosen.median_us / 1e6,
            num_bytes=num_bytes,
        )
        for problem in found
        if isinstance(problem.key, Key)
        and {problem.key.a_dtype, problem.key.b_dtype, problem.key.out_dtype} <= tile_rule.ELEMENT_BYTES.keys()
        for op in [spec(problem.key.op)]
        for num_operations, num_bytes in [(op.num_operations(problem.key), op.least_bytes(problem.key))]
    ]


def roofs(device: DeviceFingerprint, points: Sequence[RooflinePoint]) -> Roofs:
    """The nominal roofs of a device that `report.nominal` knows, else the measured maxima.

    Args:
      device: whose roofs.
      points: at least one, all of one family.
    """
    family = points[0].problem.key
    size = tile_rule.ELEMENT_BYTES
    is_8_bit = size[family.a_dtype] == 1 == size[family.b_dtype]
    known = NOMINAL.get(device.numbers)
    if known is not None:
        return Roofs(
            tflops=known.tflops_8_bit if is_8_bit else known.tflops_16_bit,
            gbytes_per_s=known.gbytes_per_s,
            source=known.source,
            is_measured=False,
        )
    return Roofs(
        tflops=max(point.tflops for point in points),
        gbytes_per_s=max(point.num_bytes / point.problem.chosen.median_us / 1e3 for point in points),
        source="no nominal rates of this device are known (report/nominal.py): the largest values that "
        "these samples reached",
        is_measured=True,
    )
