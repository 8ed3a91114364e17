"""The verdict: speed against torch by op and band of m, and how often our kernels are chosen."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoneware.kernels.key import AnyKey, Key
from stoneware.report import measures
from stoneware.report.measures import Problem
from stoneware.tuning.choose import is_vendor

BANDS = (1, 8, 16, 32, 64, 128, 512, 2048)
"""The last m of each band of the tables; the band after them has no end."""

COARSE_BANDS = (16, 128, 2048)
"""The last m of each band of the verdict."""

_DTYPES = {"e4m3": "fp8", "e5m2": "fp8 (e5m2)"}

_IN_ORDER_OF_USE = (
    "matmul bf16",
    "scaled_mm fp8, row scales",
    "scaled_mm fp8, tensor scales",
    "scaled_mm fp8, block scales",
    "grouped_mm bf16",
    "grouped_mm fp8, row scales",
)
"""Titles of the sections that layers of models use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The problems that share a table: those of a family, with any number of groups.

    Attributes:
      title: op, dtypes, scales and other common properties of the problems, in words.
      is_common: whether layers of models call the op in this way.
      problems: in order of their keys.
      same_scales: key -> torch's time over that of the chosen kernel, where torch was measured.
      any_scales: the same with the time of torch's fastest kernel for the same sizes with any scales;
        only where torch was measured with other scales too, tensor scales among them, whose kernels
        do the least.
    """

    title: str
    is_common: bool
    problems: Sequence[Problem]
    same_scales: Mapping[AnyKey, float]
    any_scales: Mapping[AnyKey, float]

    @property
    def share_ours(self) -> float:
        """Share of the problems at which a kernel of ours is chosen, from 0 to 1."""
        return sum(not is_vendor(problem.chosen.config) for problem in self.problems) / len(self.problems)


def sections(found: Iterable[Problem]) -> list[Section]:
    """The sections of a device's problems, in the order of use."""
    members: dict[str, list[Problem]] = {}
    torch_us: dict[tuple[Any, ...], dict[str, float]] = {}  # key without scales -> scales -> torch's time
    for problem in found:
        family = problem.key.kind
        members.setdefault(title(family), []).append(problem)
        if isinstance(family, Key) and problem.vendor is not None:
            torch_us.setdefault(_without_scales(problem.key), {})[family.scales] = problem.vendor.median_us
    order = [*_IN_ORDER_OF_USE, *sorted(members.keys() - set(_IN_ORDER_OF_USE))]
    return [
        Section(
            title=name,
            is_common=name in _IN_ORDER_OF_USE,
            problems=members[name],
            same_scales={problem.key: problem.speedup for problem in members[name] if problem.speedup is not None},
            any_scales={
                problem.key: min(times.values()) / problem.chosen.median_us
                for problem in members[name]
                if len(times := torch_us.get(_without_scales(problem.key), {})) > 1 and "tensor" in times
            },
        )
        for name in order
        if name in members
    ]


def title(family: AnyKey) -> str:
    """What the problems of a section share, in words."""
    if not isinstance(family, Key):
        fixed = [f"{name}={value}" for name, value in zip(family.names, family.values) if type(value) is not int]
        return ", ".join([family.op, *fixed, *(f"{name}: {dtype}" for name, dtype in family.dtypes)])
    inputs = list(dict.fromkeys([family.a_dtype, family.b_dtype]))
    words = [f"{family.op} {' × '.join(_DTYPES.get(dtype, dtype) for dtype in inputs)}"]
    words += [f"{family.scales} scales"] if family.scales != "none" else []
    usual = family.a_dtype if family.scales == "none" else "bf16"
    words += [f"{family.out_dtype} result"] if family.out_dtype != usual else []
    words += [f"layout {family.layout}"] if family.layout != "nt" else []
    words += ["batched"] if family.is_batch else []
    words += [f"{family.accumulation} accumulation"] if family.accumulation != "fast" else []
    return ", ".join(words)


def band_labels(ends: Sequence[int]) -> list[str]:
    """The bands that end at each of `ends`, and the one after them."""
    starts = [1, *(end + 1 for end in ends)]
    inner = [str(end) if start == end else f"{start}–{end}" for start, end in zip(starts, ends)]
    return [*inner, f"over {ends[-1]}"]


def band(key: AnyKey, ends: Sequence[int]) -> int:
    """The band of a problem's m, as an index into `band_labels`."""
    return bisect.bisect_left(ends, key.sizes[-1]) if key.sizes else 0


def means(speedups: Mapping[AnyKey, float]) -> dict[str, float | None]:
    """The geometric mean in each coarse band of m, and over all; None where torch was not measured."""
    labels = band_labels(COARSE_BANDS)
    found: dict[str, float | None] = {
        label: measures.geometric_mean(value for key, value in speedups.items() if band(key, COARSE_BANDS) == idx)
        for idx, label in enumerate(labels)
    }
    return {**found, "all": measures.geometric_mean(speedups.values())}


def document(found: Sequence[Section]) -> list[dict[str, Any]]:
    """The verdict as JSON values, one object per section."""
    return [
        {
            "title": section.title,
            "num_problems": len(section.problems),
            "share_ours": section.share_ours,
            "same_scales": {"count": len(section.same_scales), "geomeans": means(section.same_scales)},
            "any_scales": {"count": len(section.any_scales), "geomeans": means(section.any_scales)},
        }
        for section in found
    ]


def _without_scales(key: AnyKey) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(key).items() if name != "scales")
