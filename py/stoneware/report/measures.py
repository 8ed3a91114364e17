"""What a table's entries say: speed against the vendor library, rooflines.

Pure functions; nothing is drawn here. Times are in microseconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from stoneware.kernels.key import ELEMENT_BYTES, AnyKey, Key
from stoneware.report.nominal import NOMINAL
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.specs import OPS, spec_of
from stoneware.tuning.choose import is_vendor
from stoneware.tuning.table_entry import Choice, Entry


@dataclass(frozen=True, kw_only=True)
class Problem(Entry):
    """What was measured at one key: an entry of a table, with what follows from it."""

    @property
    def chosen(self) -> Choice:
        return self.choices[0]

    @property
    def vendor(self) -> Choice | None:
        """The fastest kernel of the vendor library; None if it was not measured."""
        vendors = [choice for choice in self.choices if is_vendor(choice.config)]
        return min(vendors, key=lambda choice: choice.median_us, default=None)

    @property
    def speedup(self) -> float | None:
        """The vendor library's time over that of the chosen; above 1 the chosen is faster."""
        vendor = self.vendor
        return vendor.median_us / self.chosen.median_us if vendor else None


def problems(entries: Iterable[Entry]) -> list[Problem]:
    """The entries as problems; if several have the same key, the first.

    Returns:
      One problem per key, sorted by op and key.
    """
    found: dict[AnyKey, Problem] = {}
    for entry in entries:
        if entry.key not in found:
            found[entry.key] = Problem(**vars(entry))
    return [found[key] for key in sorted(found, key=lambda key: (key.op, key))]  # an op's keys are of one kind


def kinds(found: Iterable[Problem]) -> dict[AnyKey, list[Problem]]:
    """The problems by kind, in order."""
    by_kind: dict[AnyKey, list[Problem]] = {}
    for problem in found:
        by_kind.setdefault(problem.key.kind, []).append(problem)
    return by_kind


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None if there are no values."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """What a device can do at most, for one kind of operands.

    Attributes:
      tflops: dense floating-point operations, in 10^12 per second.
      gbytes_per_s: DRAM bandwidth, in 10^9 bytes per second.
      source: where the two are from, as a sentence.
    """

    tflops: float
    gbytes_per_s: float
    source: str

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
      intensity: floating-point operations per byte of the operands and the result, each counted once.
      tflops: achieved by the chosen candidate, in 10^12 per second.
      is_8_bit: whether a and b have 8 bits per element.
    """

    problem: Problem
    intensity: float
    tflops: float
    is_8_bit: bool


def roofline(found: Iterable[Problem]) -> list[RooflinePoint]:
    """A point for each problem of our ops; the operation count of decorated kernels is unknown."""
    points = []
    for problem in found:
        key = problem.key
        if not isinstance(key, Key) or key.op not in OPS:
            continue
        if {key.a_dtype, key.b_dtype, key.out_dtype} <= ELEMENT_BYTES.keys():
            num_operations = spec_of(key.op).num_operations(key)
            points.append(
                RooflinePoint(
                    problem=problem,
                    intensity=num_operations / spec_of(key.op).least_bytes(key),
                    tflops=num_operations / problem.chosen.median_us / 1e6,
                    is_8_bit=ELEMENT_BYTES[key.a_dtype] == ELEMENT_BYTES[key.b_dtype] == 1,
                )
            )
    return points


def roofs(device: DeviceFingerprint, points: Sequence[RooflinePoint]) -> Roofs:
    """The nominal roofs of a device that `report.nominal` lists, otherwise the measured maxima.

    Args:
      device: whose roofs.
      points: at least one, all of one family.
    """
    known = NOMINAL.get(device.numbers)
    if known is not None:
        return Roofs(
            tflops=known.tflops_8_bit if points[0].is_8_bit else known.tflops_16_bit,
            gbytes_per_s=known.gbytes_per_s,
            source=known.source,
        )
    return Roofs(
        tflops=max(point.tflops for point in points),
        gbytes_per_s=max(point.tflops / point.intensity * 1e3 for point in points),
        source="no nominal rates of this device are known (report/nominal.py): the largest values that "
        "these samples reached",
    )
