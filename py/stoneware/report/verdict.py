"""The verdict: speed against torch's kernels by op and band of m, and how often our kernels are chosen."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoneware.kernels.key import AnyKey, Key
from stoneware.report import measures
from stoneware.report.measures import MeasuredProblem
from stoneware.tuning.choose import is_vendor

BANDS = (1, 8, 16, 32, 64, 128, 512, 2048)
"""The last m of each band of the tables; the band after them has no end."""

COARSE_BANDS = (16, 128, 2048)
"""The last m of each band of the verdict."""

_DTYPES = {"e4m3": "fp8", "e5m2": "fp8 (e5m2)"}

_COMMON = (
    "matmul bf16",
    "scaled_mm fp8, row scales",
    "scaled_mm fp8, tensor scales",
    "scaled_mm fp8, block scales",
    "grouped_mm bf16",
    "grouped_mm fp8, row scales",
)
"""Titles of the sections of calls that layers of models make, in order of use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The problems that share a title, and so a table of the page.

    Attributes:
      title: op, dtypes, scales and other common properties of the problems, in words.
      is_common: whether layers of models call the op in this way.
      problems: in order of their keys.
      same_scales: key -> torch's time divided by that of the chosen kernel, if torch was measured.
      any_scales: the same with the time of torch's fastest kernel for the same sizes with any scales;
        only if torch was also measured with other scales, including tensor scales, whose kernels do the
        least work.
    """

    title: str
    is_common: bool
    problems: Sequence[MeasuredProblem]
    same_scales: Mapping[AnyKey, float]
    any_scales: Mapping[AnyKey, float]

    @property
    def share_ours(self) -> float:
        """Share of the problems at which a kernel of ours is chosen, from 0 to 1."""
        return sum(not is_vendor(problem.chosen.config) for problem in self.problems) / len(self.problems)


def sections(measured: Iterable[MeasuredProblem]) -> list[Section]:
    """The sections of a device's problems, in the order of use."""
    members: dict[str, list[MeasuredProblem]] = {}
    torch_us: dict[tuple[Any, ...], dict[str, float]] = {}  # key without scales -> scales -> torch's time
    for problem in measured:
        kind = problem.key.kind
        members.setdefault(title(kind), []).append(problem)
        if isinstance(kind, Key) and problem.vendor is not None:
            torch_us.setdefault(_without_scales(problem.key), {})[kind.scales] = problem.vendor.median_us
    order = [*_COMMON, *sorted(members.keys() - set(_COMMON))]
    return [
        Section(
            title=name,
            is_common=name in _COMMON,
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


def title(kind: AnyKey) -> str:
    """The common properties of a kind in words: the title of its section."""
    if not isinstance(kind, Key):
        fixed = [f"{name}={value}" for name, value in zip(kind.names, kind.values) if type(value) is not int]
        return ", ".join([kind.op, *fixed, *(f"{name}: {dtype}" for name, dtype in kind.dtypes)])
    inputs = list(dict.fromkeys([kind.a_dtype, kind.b_dtype]))
    words = [f"{kind.op} {' × '.join(_DTYPES.get(dtype, dtype) for dtype in inputs)}"]
    words += [f"{kind.scales} scales"] if kind.scales != "none" else []
    usual = kind.a_dtype if kind.scales == "none" else "bf16"
    words += [f"{kind.out_dtype} result"] if kind.out_dtype != usual else []
    words += [f"layout {kind.layout}"] if kind.layout != "nt" else []
    words += ["batched"] if kind.is_batch else []
    words += [f"{kind.accumulation} accumulation"] if kind.accumulation != "fast" else []
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
    by_band: dict[str, float | None] = {
        label: measures.geometric_mean(value for key, value in speedups.items() if band(key, COARSE_BANDS) == idx)
        for idx, label in enumerate(labels)
    }
    return {**by_band, "all": measures.geometric_mean(speedups.values())}


def _without_scales(key: AnyKey) -> tuple[Any, ...]:
    return tuple(value for name, value in vars(key).items() if name != "scales")
