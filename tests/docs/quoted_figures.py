"""Figures in the text of pages, and the comments that cite the measurements behind them.

A comment stands above a paragraph or a table. It names a JSON file, or a folder of samples, whose document is that of
`stoneware report --json`, and has a Python expression over the document:

    <!-- figures: docs/measured/nvidia_h200/layers.json
    "is # to # times as fast": least_and_most(speedups(parts["models"]["rows"], "torch bf16", "stoneware rowwise")) -->

The words in quotes are those of the paragraph, with # for each figure. Without such words, the figures are all numbers
of the table's body except those of its first column, row by row. The expression gives the figures in this order; its
names are the document's keys and FUNCTIONS. A figure must be the value, rounded to the digits that the page shows.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_COMMENT = re.compile(r'<!--\s*figures:\s*(?P<source>\S+)\s+(?:"(?P<words>[^"]*#[^"]*)":)?(?P<query>.*?)-->', re.DOTALL)
_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBERS_CELL = re.compile(rf"{_NUMBER}(?: %)?(?:(?:; | of | – ){_NUMBER}(?: %)?)*")


@dataclass(frozen=True)
class Citation:
    """A comment with the text below it.

    Attributes:
      page, line: where the comment begins.
      source: path of the JSON file or of the folder, from the root of the repository.
      words: of the paragraph, with # for each figure; empty for a table.
      query: the expression.
      block: the paragraph or table.
    """

    page: str
    line: int
    source: str
    words: str
    query: str
    block: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def written(self) -> list[str]:
        """The figures as the page has them."""
        return self._in_table() if self.block.startswith("|") and not self.words else self._in_paragraph()

    def _in_paragraph(self) -> list[str]:
        pattern = re.escape(self.words).replace(r"\#", f"({_NUMBER})").replace(r"\ ", " ")
        matches = [*re.finditer(pattern, " ".join(self.block.split()))]
        assert self.words and len(matches) == 1, (
            f"{self}: {self.words!r} must stand once in the block below the comment"
        )
        return list(matches[0].groups())

    def _in_table(self) -> list[str]:
        rows = [line.strip("|").split("|")[1:] for line in self.block.splitlines()[2:]]
        cells = [cell.strip() for cell in itertools.chain.from_iterable(rows)]
        return [number for cell in cells if _NUMBERS_CELL.fullmatch(cell) for number in re.findall(_NUMBER, cell)]

    def check(self, document: Mapping[str, Any]) -> None:
        """Raises AssertionError if a figure of the page is not that of the document."""
        values = list(_flat(eval(self.query.strip(), {**FUNCTIONS, **document})))
        written = self.written()
        wanted = [as_written(value, text) for value, text in itertools.zip_longest(values, written, fillvalue="")]
        assert written == wanted, f"{self}: the page has {written}, and {self.source} {wanted}; correct the page"


def citations(page: str, text: str) -> list[Citation]:
    """The comments of a page."""
    return [
        Citation(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            source=match["source"],
            words=" ".join((match["words"] or "").split()),
            query=match["query"],
            block=re.split(r"\n\s*\n", re.sub(r"^(?:\s*<!--.*?-->)*\s*", "", text[match.end() :], flags=re.DOTALL))[0],
        )
        for match in _COMMENT.finditer(text)
    ]


def as_written(value: float | str, text: str) -> str:
    """A value with the digits, commas and sign of a figure; an absent value is what `zip_longest` fills in."""
    if value == "" or text == "":
        return str(value)
    # Halves are rounded up, like by hand; binary fractions would round some of them down.
    step = Decimal(1).scaleb(-len(text.partition(".")[2]))
    rounded = Decimal(repr(float(value))).quantize(step, ROUND_HALF_UP)
    return f"{rounded:{'+' if text.startswith('+') else ''}{',' if ',' in text else ''}f}"


def speedups(rows: Iterable[Mapping[str, Any]], before: str, after: str) -> list[float]:
    """The median time of `before` divided by that of `after`, of each row of layers.json."""
    return [row["step"][before]["median_ms"] / row["step"][after]["median_ms"] for row in rows]


def summed_speedup(rows: Iterable[Mapping[str, Any]], before: str, after: str) -> float:
    """The same of the times of all rows together."""
    rows = list(rows)
    return sum(row["step"][before]["median_ms"] for row in rows) / sum(row["step"][after]["median_ms"] for row in rows)


def tokens_per_second(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The tokens of each row divided by the median time of `name`."""
    return [row["tokens"] / row["step"][name]["median_ms"] * 1e3 for row in rows]


def matmul_speedups(rows: Iterable[Mapping[str, Any]], family: str, m: int, *peers: str) -> list[float]:
    """The time of the fastest of some kernels of torch divided by ours, of each row of bench.json that has both."""
    return [
        min(times[peer]["median_us"] for peer in peers if peer in times) / times["stoneware"]["median_us"]
        for row in rows
        if row["family"] == family and row["m"] == m
        for times in [row.get("device_us", {})]
        if "stoneware" in times and not times.keys().isdisjoint(peers)
    ]


def least_and_most(values: Iterable[float]) -> list[float]:
    values = list(values)
    return [min(values), max(values)]


def percent_torch_chosen(devices: Sequence[Mapping[str, Any]], title: str, least_m: int) -> float:
    """At how many problems of a section of the report, with m of `least_m` and more, torch's kernel is chosen."""
    chosen = [
        problem["chosen"]["backend"] == "vendor"
        for family in devices[0]["families"]
        if family["title"] == title
        for problem in family["problems"]
        if problem["sizes"][-1] >= least_m
    ]
    return 100 * statistics.fmean(chosen)


_MEMORY_BYTES_PER_US = 4.3e6
"""4.3 TB/s: what a kernel that only reads reaches on an H200; the data sheet has 4.8."""

_LARGE_WEIGHT = 2**23


def roof_share(
    devices: Sequence[Mapping[str, Any]],
    title: str,
    ms: tuple[int, int],
    element_bytes: int,
    tflops: float,
    time: str = "chosen_us",
) -> float:
    """The geometric mean of roof over time, of problems with m in a range and weights of 2^23 elements and more.

    The roof is the larger of the time of the bytes of a, b and a 16-bit result at 4.3 TB/s, and that of the products
    at `tflops`.
    """
    shares = []
    for problem in itertools.chain.from_iterable(
        family["problems"] for family in devices[0]["families"] if family["title"] == title
    ):
        n, k, m = problem["sizes"][-3:]
        if ms[0] <= m <= ms[1] and n * k >= _LARGE_WEIGHT and problem[time]:
            num_bytes = (m * k + n * k) * element_bytes + 2 * m * n
            roof = max(num_bytes / _MEMORY_BYTES_PER_US, 2e-6 * m * n * k / tflops)
            shares.append(roof / problem[time])
    return statistics.geometric_mean(shares)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        speedups,
        summed_speedup,
        tokens_per_second,
        matmul_speedups,
        least_and_most,
        percent_torch_chosen,
        roof_share,
    )
} | {"geometric_mean": statistics.geometric_mean}


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, int | float):
        yield values
    else:
        for value in values:
            yield from _flat(value)
