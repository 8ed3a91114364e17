"""Figures of merit of a table's entries: speed against the vendor library, rooflines.

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
class MeasuredProblem(Entry):
    """An entry of a table, with the figures that follow from its measurements."""

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
        """The vendor library's time divided by that of the chosen config; above 1 the chosen is faster."""
        vendor = self.vendor
        return vendor.median_us / self.chosen.median_us if vendor else None

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte of the operands and the result, each counted once."""
        assert isinstance(self.key, Key)  # the operation count of decorated kernels is unknown
        return spec_of(self.key.op).num_operations(self.key) / spec_of(self.key.op).least_bytes(self.key)

    @property
    def tflops(self) -> float:
        """Achieved by the chosen config, in 10^12 operations per second."""
        assert isinstance(self.key, Key)
        return spec_of(self.key.op).num_operations(self.key) / self.chosen.median_us / 1e6


def problems(entries: Iterable[Entry]) -> list[MeasuredProblem]:
    """The entries, sorted by op and key; if several have the same key, the first."""
    by_key: dict[AnyKey, Entry] = {}
    for entry in entries:
        by_key.setdefault(entry.key, entry)
    # The keys of an op are all of one type.
    return [MeasuredProblem(**vars(by_key[key])) for key in sorted(by_key, key=lambda key: (key.op, key))]


def kinds(measured: Iterable[MeasuredProblem]) -> dict[AnyKey, list[MeasuredProblem]]:
    """The problems by kind, in order."""
    by_kind: dict[AnyKey, list[MeasuredProblem]] = {}
    for problem in measured:
        by_kind.setdefault(problem.key.kind, []).append(problem)
    return by_kind


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive values; None if there are no values."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """The limits of a device for operands of one dtype.

    Attributes:
      tflops: dense floating-point operations, in 10^12 per second.
      gbytes_per_s: DRAM bandwidth, in 10^9 bytes per second.
      source: of the two, as a sentence.
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


def roofline(measured: Iterable[MeasuredProblem]) -> list[MeasuredProblem]:
    """The problems of our ops; the operation count of decorated kernels is unknown."""
    return [problem for problem in measured if isinstance(problem.key, Key) and problem.key.op in OPS]


def roofs(device: DeviceFingerprint, points: Sequence[MeasuredProblem]) -> Roofs:
    """The nominal roofs of a device that `report.nominal` lists, otherwise the measured maxima.

    Args:
      device: whose roofs.
      points: from `roofline`, at least one, all of one kind.
    """
    nominal = NOMINAL.get(device.numbers)
    if nominal is not None:
        key = points[0].key
        is_8_bit = isinstance(key, Key) and ELEMENT_BYTES[key.a_dtype] == ELEMENT_BYTES[key.b_dtype] == 1
        return Roofs(
            tflops=nominal.tflops_8_bit if is_8_bit else nominal.tflops_16_bit,
            gbytes_per_s=nominal.gbytes_per_s,
            source=nominal.source,
        )
    return Roofs(
        tflops=max(point.tflops for point in points),
        gbytes_per_s=max(point.tflops / point.intensity * 1e3 for point in points),
        source="no nominal rates of this device are known (report/nominal.py): the largest values that "
        "these samples reached",
    )
