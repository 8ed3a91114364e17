"""What a benchmark's rows say: ratios, byte floors, the page. Pure functions of bench.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.gpu_check.document import line

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


def geometric_mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def speedups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By family, range of m and peer: geometric mean and least of `ratio`, and where it is least."""
    found = []
    for family, members in by_family(rows).items():
        peers = sorted({name for row in members for name in row.get("device_us", {})} - {OURS})
        if len(peers) > 1:
            peers.append(FASTEST)
        for peer in peers:
            for most_m in (SMALL_M, None):
                ratios = [
                    (value, str(row["layer"]), rows_each(row))
                    for row in members
                    if (most_m is None or rows_each(row) <= most_m) and (value := ratio(row, peer)) is not None
                ]
                least = min(ratios, default=None)
                found.append(
                    {
                        "family": family,
                        "peer": peer,
                        "most_m": most_m,
                        "geomean": geometric_mean([value for value, *_ in ratios]),
                        "least": least and least[0],
                        "least_at": least and f"{least[1]}, m={least[2]}",
                        "num_shapes": len(ratios),
                    }
                )
    return found


def floors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By family: geometric mean and least of `floor_fraction` where it is asked for."""
    found = []
    for family, members in by_family(rows).items():
        fractions = [
            (value, str(row["layer"]), rows_each(row))
            for row in members
            if rows_each(row) <= FLOOR_MAX_M
            and row.get("weight_bytes", 0) > FLOOR_MIN_WEIGHT_BYTES
            and (value := floor_fraction(row)) is not None
        ]
        if fractions:
            value, layer, m = min(fractions)
            found.append(
                {
                    "family": family,
                    "geomean": geometric_mean([value for value, *_ in fractions]),
                    "least": value,
                    "least_at": f"{layer}, m={m}",
                    "num_shapes": len(fractions),
                }
            )
    return found


def first_calls(runs: Sequence[Row]) -> list[dict[str, Any]]:
    """By family and call: medians over the fresh processes, the number of them, how many full garbage
    collections they ran in all (None if that was not counted), the errors."""
    found = []
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
        found.append(
            {
                "family": family,
                "call": call,
                "num_processes": len(good),
                "full_collections": None if None in counts else sum(counts),
                "errors": errors,
                **medians,
            }
        )
    return found


def import_and_first_call(runs: Sequence[Row]) -> dict[str, Any] | None:
    """The one number of a first use: import and first call together, in the family whose median is
    largest, beside torch's first call there. None if ours has no figure."""
    found = [item for item in first_calls(runs) if item["num_processes"]]
    worst = max(
        (item for item in found if item["call"] == OURS),
        key=lambda item: item["import_and_first_call_ms"],
        default=None,
    )
    if worst is None:
        return None
    peers = [item for item in found if item["family"] == worst["family"] and item["call"] != OURS]
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
      plots: title -> file name beside the page, of pictures to show.
    """
    titles = report["families"]
    lines = _head(report)
    for item in speedups(report["rows"]):
        rng = "all" if item["most_m"] is None else f"up to {item['most_m']}"
        lines.append(
            line(
                titles[item["family"]],
                item["peer"],
                rng,
                _number(item["geomean"], 3),
                _number(item["least"], 3),
                item["least_at"] or "-",
                item["num_shapes"],
            )
        )
    lines += [
        "",
        f"The floor is the weight's bytes over {BYTES_PER_US / 1e6:g} TB/s; here its part of our "
        f"time, for up to {FLOOR_MAX_M} rows and weights of more than "
        f"{FLOOR_MIN_WEIGHT_BYTES / 1e6:g} MB.",
        "",
        "| family | geometric mean | least | at | shapes |",
        "|---|---|---|---|---|",
        *(
            line(
                titles[item["family"]],
                f"{item['geomean']:.1%}",
                f"{item['least']:.1%}",
                item["least_at"],
                item["num_shapes"],
            )
            for item in floors(report["rows"])
        ),
        "",
        "Host time of a call in µs, the device never waited for, and the first call in ms of fresh "
        "processes in which torch is imported and CUDA has started:",
        "",
        "| family | call | into out | allocating | import | first call | import and first call "
        "| second call | processes | full garbage collections |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += _host_lines(report)
    first = import_and_first_call(report["first_calls"])
    if first is not None:
        lines += [
            "",
            f"Import and first call together take {first['ms']:.1f} ms in the slowest family, "
            f"{titles[first['family']]}: the median of {first['num_processes']} processes, which ran "
            f"{_count(first['full_collections'])} full garbage collections meanwhile. torch's first call "
            f"there takes {_number(first['torch_first_call_ms'], 1)} ms.",
        ]
    sizes = report["installed"]
    lines += [
        "",
        f"`import stoneware` after torch takes {_number(_package_ms(report), 2)} ms; the import "
        f"column has the op's import too. The installed wheel has {sizes['num_files']} files of "
        f"{sizes['num_bytes'] / 1e6:.2f} MB.",
        "",
    ]
    marks = [f"- Not in this installation: {name}: {why}" for name, why in report["missing"].items()]
    marks += [f"- PROBLEM: {problem}" for problem in report["problems"]]
    lines += [" ".join(mark.split()) for mark in marks]  # errors have several lines
    for title, file_name in (plots or {}).items():
        lines += ["", f"![{title}]({file_name})"]
    for family, rows in by_family(report["rows"]).items():
        lines += ["", f"<details><summary>{titles[family]}: {len(rows)} shapes</summary>", ""]
        lines += _family_lines(rows)
        lines += ["", "</details>"]
    return "\n".join(lines).rstrip() + "\n"


def _head(report: Mapping[str, Any]) -> list[str]:
    """What was measured where and how, down to the head of the first table."""
    facts = report["machine"]
    return [
        f"# Matmuls on {facts['gpu']}, beside torch's",
        "",
        f"{report['date']}, driver {facts['driver']}, torch {facts['torch']} with CUDA "
        f"{facts['cuda_of_torch']}, Python {facts['python']}, SM clock {facts['sm_clock_mhz']} MHz "
        f"before and {report['machine_after']['sm_clock_mhz']} MHz after, memory clock "
        f"{facts['memory_clock_mhz']} MHz, power limit {facts['power_limit_w']} W, stoneware "
        f"{facts['stoneware']}, commit {report['commit']}, wheel sha256 {report['wheel_sha256']}.",
        "",
        f"Command: `{report['command']}`, {report['seconds']:.0f} s.",
        "",
        "Times are medians in µs ± the interquartile range: on the device, with an L2 that "
        f"holds {_L2_HOLDS[report['l2']]} of another buffer, ours and "
        "torch's interleaved in one run. Each product was compared with float64 first, every "
        "element, fresh random inputs over an output of NaN; one that is wrong has no figure. "
        "Ratios are torch's time over ours, so above 1 ours is faster. The m of this summary is, for "
        "grouped products, the mean number of rows per group.",
        "",
        "| family | against | m | geometric mean | least | at | shapes |",
        "|---|---|---|---|---|---|---|",
    ]


def _host_lines(report: Mapping[str, Any]) -> list[str]:
    firsts = {(item["family"], item["call"]): item for item in first_calls(report["first_calls"])}
    lines = []
    for family, title in report["families"].items():
        host_us = report["host_us"].get(family, {})
        calls = dict.fromkeys(
            [
                *(name for how in host_us.values() for name in how),
                *(call for of_family, call in firsts if of_family == family),
            ]
        )
        for call in calls:
            first = firsts.get((family, call), {})
            lines.append(
                line(
                    title,
                    call,
                    *(_timing(host_us.get(how, {}).get(call)) for how in ("out", "allocating")),
                    *(
                        _number(first.get(name), digits)
                        for name, digits in (
                            ("import_ms", 1),
                            ("first_call_ms", 2),
                            ("import_and_first_call_ms", 1),
                            ("second_call_ms", 3),
                        )
                    ),
                    first.get("num_processes", "-"),
                    _count(first.get("full_collections")),
                )
            )
    return lines


def _package_ms(report: Mapping[str, Any]) -> float | None:
    times = [run["package_ms"] for run in report["first_calls"] if run["call"] == OURS and "error" not in run]
    return statistics.median(times) if times else None


def _family_lines(rows: Sequence[Row]) -> list[str]:
    peers = list(dict.fromkeys(name for row in rows for name in row.get("device_us", {}) if name != OURS))
    heads = [
        "layer",
        "m",
        "n",
        "k",
        "groups",
        "kernel",
        "layer of the look-up",
        OURS,
        *peers,
        "fastest / ours",
        "floor",
        "error",
    ]
    lines = [line(*heads), "|" + "---|" * len(heads)]
    for row in rows:
        device_us = row.get("device_us", {})
        fraction, value = floor_fraction(row), ratio(row)
        lines.append(
            line(
                row["layer"],
                row["m"],
                row["n"],
                row["k"],
                row["groups"] or "-",
                f"`{row['config']}`" if row.get("config") else "-",
                row.get("decided_by", "-"),
                *(_timing(device_us.get(name)) for name in (OURS, *peers)),
                _number(value, 2),
                "-" if fraction is None else f"{fraction:.0%}",
                f"{row['errors'][OURS]:.1e}" if OURS in row.get("errors", {}) else "-",
            )
        )
    return lines


def _timing(timing: Mapping[str, float] | None) -> str:
    return "-" if timing is None else f"{timing['median_us']:.1f} ± {timing['spread_us']:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
