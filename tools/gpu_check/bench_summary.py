"""What a benchmark's rows say: ratios, byte floors, the page. Pure functions of bench.json."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.gpu_check.document import heading, number, table, timing

OURS = "stoneware"

SMALL_M = 128
"""Rows per weight up to which a product waits for memory; the goal against torch is set there."""

BYTES_PER_US = 4.3e6
"""Streaming reads of an H200, 4.3 TB/s: the floor is the time in which the weight can be read."""

FLOOR_MAX_M = 64
FLOOR_MIN_WEIGHT_BYTES = 32e6
"""The floor is shown if the weight alone decides: few rows, and too large for the L2."""

FASTEST = "fastest of torch"

_L2_HOLDS = {"clean": "lines that were read", "dirty": "lines that were written"}

Row = Mapping[str, Any]


def rows_each(row: Row) -> int:
    """Rows that one weight is multiplied by: m, or its mean over the groups."""
    return row["m"] // max(row["groups"], 1)


def ours_us(row: Row) -> float | None:
    timing = row.get("device_us", {}).get(OURS)
    return timing["median_us"] if timing else None


def ratio(row: Row, peer: str = FASTEST) -> float | None:
    """The peer's time over ours; above 1 ours is faster. None if one has no figure."""
    device_us = row.get("device_us", {})
    peers = [name for name in device_us if name == peer or (peer == FASTEST and name != OURS)]
    if not peers or OURS not in device_us:
        return None
    return min(device_us[name]["median_us"] for name in peers) / device_us[OURS]["median_us"]


def floor_fraction(row: Row) -> float | None:
    """The least time for reading the weight, over ours: 1 is as fast as memory."""
    us = ours_us(row)
    return None if us is None else row["weight_bytes"] / BYTES_PER_US / us


def speedups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By family, range of m and peer: geometric mean and least of `ratio`, and where it is least."""
    summaries = []
    for family, members in by_family(rows).items():
        peers = sorted({name for row in members for name in row.get("device_us", {})} - {OURS})
        if len(peers) > 1:
            peers.append(FASTEST)
        for peer, most_m in itertools.product(peers, (SMALL_M, None)):
            ratios = [(ratio(row, peer), row) for row in members if most_m is None or rows_each(row) <= most_m]
            summaries.append({"family": family, "peer": peer, "most_m": most_m, **_means(ratios)})
    return summaries


def floors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By family: geometric mean and least of `floor_fraction` for few rows and large weights."""
    summaries = []
    for family, members in by_family(rows).items():
        fractions = [
            (floor_fraction(row), row)
            for row in members
            if rows_each(row) <= FLOOR_MAX_M and row.get("weight_bytes", 0) > FLOOR_MIN_WEIGHT_BYTES
        ]
        means = _means(fractions)
        if means["num_shapes"]:
            summaries.append({"family": family, **means})
    return summaries


def _means(values: Sequence[tuple[float | None, Row]]) -> dict[str, Any]:
    """Geometric mean and least of the values that are there, and where it is least."""
    present = [(value, str(row["layer"]), rows_each(row)) for value, row in values if value is not None]
    least, layer, m = min(present, default=(None, "", 0))
    return {
        "geomean": statistics.geometric_mean([value for value, *_ in present]) if present else None,
        "least": least,
        "least_at": f"{layer}, m={m}" if present else None,
        "num_shapes": len(present),
    }


def first_calls(runs: Sequence[Row]) -> list[dict[str, Any]]:
    """By family and call: medians over the fresh processes, the number of them, how many full garbage
    collections they ran in all (None if that was not counted), the errors."""
    summaries = []
    for family, call in dict.fromkeys((run["family"], run["call"]) for run in runs):
        members = [run for run in runs if (run["family"], run["call"]) == (family, call)]
        good = [run for run in members if "error" not in run]
        medians = {
            name: statistics.median(run[name] for run in good)
            for name in ("package_ms", "import_ms", "first_call_ms", "import_and_first_call_ms", "second_call_ms")
            if good
        }
        errors = sorted({run["error"] for run in members if "error" in run})
        counts = [run.get("full_collections") for run in good]
        summaries.append(
            {
                "family": family,
                "call": call,
                "num_processes": len(good),
                "full_collections": None if None in counts else sum(counts),
                "errors": errors,
                **medians,
            }
        )
    return summaries


def import_and_first_call(runs: Sequence[Row]) -> dict[str, Any] | None:
    """The one number of a first use: import and first call together, in the family whose median is
    largest, next to torch's first call there. None if ours has no figure."""
    summaries = [item for item in first_calls(runs) if item["num_processes"]]
    worst = max(
        (item for item in summaries if item["call"] == OURS),
        key=lambda item: item["import_and_first_call_ms"],
        default=None,
    )
    if worst is None:
        return None
    peers = [item for item in summaries if item["family"] == worst["family"] and item["call"] != OURS]
    return {
        "family": worst["family"],
        "ms": worst["import_and_first_call_ms"],
        "num_processes": worst["num_processes"],
        "full_collections": worst["full_collections"],
        "torch_first_call_ms": peers[0]["first_call_ms"] if peers else None,
    }


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by family, in the order of their first rows."""
    return {
        family: [row for row in rows if row["family"] == family]
        for family in dict.fromkeys(row["family"] for row in rows)
    }


def to_markdown(report: Mapping[str, Any], plots: Mapping[str, str] | None = None) -> str:
    """The report as a page.

    Args:
      report: bench.json.
      plots: title -> file name in the folder of the page, of pictures to show.
    """
    titles, sizes = report["families"], report["installed"]
    lines = [
        *heading("Matmuls next to torch's", report),
        "Times are medians in µs ± the interquartile range: on the device, with an L2 that "
        f"holds {_L2_HOLDS[report['l2']]} of another buffer, ours and "
        "torch's interleaved in one run. Each product was compared with float64 first, every "
        "element, fresh random inputs over an output of NaN; one that is wrong has no figure. "
        "Ratios are torch's time over ours, so above 1 ours is faster. The m of this summary is, for "
        "grouped products, the mean number of rows per group.",
        "",
        *table(
            ["family", "against", "m", "geometric mean", "least", "at", "shapes"],
            [
                [
                    titles[item["family"]],
                    item["peer"],
                    "all" if item["most_m"] is None else f"up to {item['most_m']}",
                    number(item["geomean"], 3),
                    number(item["least"], 3),
                    item["least_at"] or "-",
                    item["num_shapes"],
                ]
                for item in speedups(report["rows"])
            ],
        ),
        "",
        f"The floor is the weight's bytes over {BYTES_PER_US / 1e6:g} TB/s; here its part of our "
        f"time, for up to {FLOOR_MAX_M} rows and weights of more than "
        f"{FLOOR_MIN_WEIGHT_BYTES / 1e6:g} MB.",
        "",
        *table(
            ["family", "geometric mean", "least", "at", "shapes"],
            [
                [
                    titles[item["family"]],
                    f"{item['geomean']:.1%}",
                    f"{item['least']:.1%}",
                    item["least_at"],
                    item["num_shapes"],
                ]
                for item in floors(report["rows"])
            ],
        ),
        "",
        "Host time of a call in µs, the device never waited for, and the first call in ms of fresh "
        "processes in which torch is imported and CUDA has started:",
        "",
        *_host_lines(report),
    ]
    first = import_and_first_call(report["first_calls"])
    if first is not None:
        lines += [
            "",
            f"Import and first call together take {first['ms']:.1f} ms in the slowest family, "
            f"{titles[first['family']]}: the median of {first['num_processes']} processes, which ran "
            f"{number(first['full_collections'], 0)} full garbage collections meanwhile. torch's first call "
            f"there takes {number(first['torch_first_call_ms'], 1)} ms.",
        ]
    lines += [
        "",
        f"`import stoneware` after torch takes {number(_package_ms(report), 2)} ms; the import "
        f"column has the op's import too. The installed wheel has {sizes['num_files']} files of "
        f"{sizes['num_bytes'] / 1e6:.2f} MB.",
        "",
    ]
    lines += [" ".join(f"- PROBLEM: {problem}".split()) for problem in report["problems"]]  # errors have several lines
    for title, file_name in (plots or {}).items():
        lines += ["", f"![{title}]({file_name})"]
    for family, rows in by_family(report["rows"]).items():
        lines += ["", f"<details><summary>{titles[family]}: {len(rows)} shapes</summary>", ""]
        lines += _family_lines(rows)
        lines += ["", "</details>"]
    return "\n".join(lines).rstrip() + "\n"


_FIRST_CALL_COLUMNS = {"import_ms": 1, "first_call_ms": 2, "import_and_first_call_ms": 1, "second_call_ms": 3}
"""With the digits that are shown."""


def _host_lines(report: Mapping[str, Any]) -> list[str]:
    firsts = {(item["family"], item["call"]): item for item in first_calls(report["first_calls"])}
    rows = []
    for family, title in report["families"].items():
        host_us = report["host_us"].get(family, {})
        timed = [call for how in host_us.values() for call in how]
        for call in dict.fromkeys([*timed, *(call for of_family, call in firsts if of_family == family)]):
            first = firsts.get((family, call), {})
            times = [timing(host_us.get(how, {}).get(call), "us", 1) for how in ("out", "allocating")]
            figures = [number(first.get(name), digits) for name, digits in _FIRST_CALL_COLUMNS.items()]
            counts = first.get("num_processes", "-"), number(first.get("full_collections"), 0)
            rows.append([title, call, *times, *figures, *counts])
    header = ["family", "call", "into out", "allocating", "import", "first call", "import and first call"]
    return table([*header, "second call", "processes", "full garbage collections"], rows)


def _package_ms(report: Mapping[str, Any]) -> float | None:
    times = [run["package_ms"] for run in report["first_calls"] if run["call"] == OURS and "error" not in run]
    return statistics.median(times) if times else None


def _family_lines(rows: Sequence[Row]) -> list[str]:
    peers = list(dict.fromkeys(name for row in rows for name in row.get("device_us", {}) if name != OURS))
    sizes = ["layer", "m", "n", "k"]
    header = [*sizes, "groups", "kernel", "layer of the look-up", OURS, *peers, "fastest / ours", "floor", "error"]
    cells = []
    for row in rows:
        device_us, fraction = row.get("device_us", {}), floor_fraction(row)
        cells.append(
            [
                *(row[size] for size in sizes),
                row["groups"] or "-",
                f"`{row['config']}`" if row.get("config") else "-",
                row.get("decided_by", "-"),
                *(timing(device_us.get(name), "us", 1) for name in (OURS, *peers)),
                number(ratio(row), 2),
                "-" if fraction is None else f"{fraction:.0%}",
                f"{row['errors'][OURS]:.1e}" if OURS in row.get("errors", {}) else "-",
            ]
        )
    return table(header, cells)
