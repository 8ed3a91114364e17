"""What the look-up's choices cost at problems that no one tuned for: rows, figures and their table.

A row is a problem with the times of its candidates:

    regret           time of the look-up's choice over that of the fastest candidate
    torch_over_ours  torch's time over that of the choice; none where torch cannot run the problem

Where one candidate alone runs there is nothing to regret: such a problem counts against torch, and not
among the regrets. The fastest of some twenty medians is partly luck, so a regret of 1.01 may be
noise. The worst problems are therefore measured a second time. `is_noise` says what that does not confirm:
a regret, or a lead of torch, that is then within a tie of the table.

Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from stoneware.kernels.config import VENDOR, AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.tuning.lookup import Decision
from stoneware.tuning.samples import Sample
from stoneware.tuning.table_entry import Choice

Times = Mapping[AnyConfig, Sample | Choice]
Row = dict[str, Any]

M_BUCKETS = (1, 16, 64, 256, 1024)
"""Largest m of each bucket but the last: the m of the key, which for groups is their mean."""

TIE = 1.03
"""As tuning/choose.py has it: closer times are no difference."""

_PERCENTILES = (50, 99)


def right_samples(samples: Iterable[Sample], digest: Callable[[Any], str]) -> dict[AnyKey, dict[AnyConfig, Sample]]:
    """The samples by problem and candidate, of right values and of kernels as they are now."""
    by_problem: dict[AnyKey, dict[AnyConfig, Sample]] = {}
    for sample in samples:
        if sample.status == "ok" and sample.kernel_sha256 == digest(sample.config):
            by_problem.setdefault(sample.key, {})[sample.config] = sample
    return by_problem


def row_of(set_name: str, problem: str, m: int, decision: Decision, times: Times) -> Row | None:
    """The row of a problem; None if the choice has no time."""
    chosen = times.get(decision.config)
    if chosen is None:
        return None
    best = min(times.values(), key=lambda sample: sample.median_us)
    vendor_us = min((sample.median_us for sample in times.values() if sample.config.backend == VENDOR), default=None)
    interval_us = decision.chosen and decision.chosen.interval_us  # where the choice's time is an estimate
    return {
        "set": set_name,
        "problem": problem,
        "m": m,
        "m_bucket": _bucket(m),
        "step": str(decision.step),
        "grade": str(decision.grade),
        "chosen": str(decision.config),
        "chosen_us": chosen.median_us,
        "chosen_spread_us": chosen.spread_us,
        "best": str(best.config),
        "best_us": best.median_us,
        "vendor_us": vendor_us,
        "regret": round(chosen.median_us / best.median_us, 4),
        "torch_over_ours": None if vendor_us is None else round(vendor_us / chosen.median_us, 4),
        "interval_us": interval_us and list(interval_us),
        "num_intervals": int(interval_us is not None),
        "num_covered": int(interval_us is not None and interval_us[0] <= chosen.median_us <= interval_us[1]),
        "num_candidates": len(times),
    }


def _bucket(m: int) -> str:
    low = 1
    for high in M_BUCKETS:
        if m <= high:
            return str(high) if low == high else f"{low}-{high}"
        low = high + 1
    return f"{low}-"


def badness(row: Row) -> float:
    """By how much a row is bad, as a ratio: its regret, or torch's lead."""
    return max(row["regret"], 1 / (row["torch_over_ours"] or 1.0))


def worst(rows: Iterable[Row], count: int) -> list[Row]:
    """The worst of each set, the worst first."""
    by_set: dict[str, list[Row]] = {}
    for row in sorted(rows, key=badness, reverse=True):
        by_set.setdefault(row["set"], []).append(row)
    return [row for of_set in by_set.values() for row in of_set[:count]]


def with_second_pass(rows: Sequence[Row], again: Sequence[Row]) -> list[Row]:
    """The rows, those that were measured a second time with `again` (the second regret and ratio to
    torch) and `is_noise`."""
    second = {(row["set"], row["problem"]): row for row in again}
    marked = []
    for row in rows:
        other = second.get((row["set"], row["problem"]))
        if other is not None:
            ratios = {name: other[name] for name in ("regret", "torch_over_ours")}
            row = {**row, "again": ratios, "is_noise": badness(other) <= TIE < badness(row)}
        marked.append(row)
    return marked


def figures(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Figures of each set, of each grade and each bucket of m in it; a set names op, dtype, scales and
    layout."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for title in ("", f", {row['grade']}", f", m {row['m_bucket']}"):
            groups.setdefault(row["set"] + title, []).append(row)
    return {title: _figures_of(groups[title]) for title in sorted(groups, key=_order_of_titles)}


def _order_of_titles(title: str) -> tuple[str, bool, int, str]:
    name, _, rest = title.partition(", ")
    is_bucket = rest.startswith("m ")
    return name, is_bucket, int(rest[2:].partition("-")[0]) if is_bucket else 0, rest


def _figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    beside_torch = [row for row in rows if row["torch_over_ours"] is not None]
    num_intervals = sum(row["num_intervals"] for row in rows)
    chosen = [row for row in rows if row["num_candidates"] > 1]
    lasting = [row for row in chosen if not row.get("is_noise")]
    return {
        "problems": len(rows),
        "without_alternative": len(rows) - len(chosen),
        "regret": distribution(chosen, "regret", is_high_bad=True),
        "regret_without_noise": distribution(lasting, "regret", is_high_bad=True),
        "torch_over_ours": distribution(beside_torch, "torch_over_ours", is_high_bad=False),
        "vendor_chosen": sum(row["chosen"].startswith(VENDOR) for row in rows),
        "coverage_of_90": round(sum(row["num_covered"] for row in rows) / num_intervals, 4) if num_intervals else None,
    }


def distribution(rows: Sequence[Row], name: str, *, is_high_bad: bool) -> dict[str, Any] | None:
    """Geometric mean; median, 99th percentile towards the bad end (nearest rank) and worst, each with
    its problem."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: row[name] if is_high_bad else -row[name])
    places = {f"p{part}": ordered[math.ceil(part / 100 * len(ordered)) - 1] for part in _PERCENTILES}
    named = {title: {"ratio": row[name], "problem": row["problem"]} for title, row in places.items()}
    return {
        "geomean": round(geometric_mean(row[name] for row in rows), 4),
        **named,
        "worst": {"ratio": ordered[-1][name], "problem": ordered[-1]["problem"]},
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people: a line for each group, the worst problems."""
    lines = [
        f"{'':32}{'problems':>9}  {'regret: mean   p50    p99  worst':>33}  {'torch/ours: mean  p99  worst':>29}  90 %"
    ]
    for title, of_group in report["groups"].items():
        regret, ratio, coverage = (of_group[name] for name in ("regret", "torch_over_ours", "coverage_of_90"))
        cells = ["-"]
        if regret:
            cells = [f"{regret['geomean']:.3f}", *(f"{regret[name]['ratio']:.3f}" for name in ("p50", "p99", "worst"))]
        beside = ["-"]
        if ratio:
            beside = [f"{ratio['geomean']:.3f}", *(f"{ratio[name]['ratio']:.3f}" for name in ("p99", "worst"))]
        inside = "-" if coverage is None else f"{coverage:.0%}"
        lines.append(f"{title:32}{of_group['problems']:>9}  {'  '.join(cells):>33}  {'  '.join(beside):>29}  {inside}")
    for row in report["rows"]:
        if "again" in row:
            note = "noise" if row["is_noise"] else "lasting" if badness(row) > TIE else "a tie"
            lines.append(
                f"{row['problem']}: {row['chosen']}, not {row['best']}: regret {row['regret']:.3f}, again "
                f"{row['again']['regret']:.3f}; torch/ours {row['torch_over_ours']}, again "
                f"{row['again']['torch_over_ours']}: {note}"
            )
    return "\n".join(lines) + "\n"
