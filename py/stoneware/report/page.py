"""The report as one HTML page that needs no network: plotly.js, data and figures are inside."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from stoneware import __version__
from stoneware.kernels.key import AnyKey
from stoneware.report import figures, measures, regret
from stoneware.report.document import document, regrets_of, speedups
from stoneware.report.measures import Problem
from stoneware.report.regret import Regret
from stoneware.report.sources import DeviceMeasurements

NUM_WORST = 8
"""Rows of a table of the worst regrets."""

MOST_BAD = 100
"""Rows of the table of samples that are not "ok"."""

DATA_ID = "stoneware-report"
"""The id of the script element whose JSON holds every number of the page."""

REGRET_NAMES = {"m": "nearest m", "weight": "nearest shape"}
"""What was left out -> who answers."""

_STYLE = """
body { font: 14px/1.45 sans-serif; color: #222; background: #fff; margin: 32px 40px; }
main { width: 1120px; }
h1 { font-size: 24px; margin: 0 0 12px; } h2 { font-size: 19px; margin: 36px 0 4px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
table { border-collapse: collapse; margin: 6px 0 14px; font-size: 13px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #e2e2e2;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; } td.n, th.n { text-align: right; white-space: nowrap; }
.figure { margin: 10px 0 18px; }
nav a { margin-right: 18px; white-space: nowrap; }
"""

_DRAW = (
    """
const report = JSON.parse(document.getElementById("%s").textContent);
for (const [id, figure] of Object.entries(report.figures))
  Plotly.newPlot(id, figure.data, figure.layout, {
    displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]});
"""
    % DATA_ID
)
# The buttons are listed, because plotly.js's own list has one that sends the figure to a server.


def page(devices: Sequence[DeviceMeasurements], *, title: str, plotly_js: str) -> str:
    """The page as HTML.

    Args:
      devices: what was measured, at least one.
      title: of the page.
      plotly_js: the library's source, as `plotly.offline.get_plotlyjs()` gives it.
    """
    drawn: dict[str, figures.Figure] = {}
    contents = [_device_html(device, drawn) for device in devices]
    data = json.dumps({**document(devices), "figures": drawn}, allow_nan=False)
    # "</script" and "<!--" mean something in a script element; JSON reads \u003c as the same.
    escaped = data.replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
            f"<script>{plotly_js}</script>",
            "</head><body><main>",
            f"<h1>{html.escape(title)}</h1>",
            f"<p>Made by stoneware {__version__}. Times are medians in µs, ± the interquartile range. "
            "A kernel is chosen as the tuning table chooses: the fastest, ties within the noise to "
            "the canonical config, never slower than the vendor library by more than the noise.</p>",
            *contents,
            "</main>",
            f'<script type="application/json" id="{DATA_ID}">{escaped}</script>',
            f"<script>{_DRAW}</script>",
            "</body></html>",
            "",
        ]
    )


def _device_html(device: DeviceMeasurements, drawn: dict[str, figures.Figure]) -> str:
    by_family = measures.families(device.problems)
    anchors = {family: f"family-{len(drawn)}-{idx}" for idx, family in enumerate(by_family)}
    links = (
        f'<a href="#{anchor}">{html.escape(figures.family_title(family))}</a>' for family, anchor in anchors.items()
    )
    return "\n".join(
        [
            _header(device),
            "<nav>",
            *links,
            "</nav>",
            *(_family_html(device, family, members, anchors[family], drawn) for family, members in by_family.items()),
        ]
    )


def _header(device: DeviceMeasurements) -> str:
    statuses = ", ".join(f"{count} {status}" for status, count in device.statuses.items())
    facts = [
        ("device", str(device.fingerprint)),
        ("also known as", ", ".join(device.aliases) or "-"),
        ("samples", f"{len(device.measurements)} ({statuses}) of {len(device.problems)} problems"),
        ("from", ", ".join(device.origins)),
        *((f"table of {op}", digest) for op, digest in device.digests.items()),
    ]
    runs = [
        [
            run["id"],
            run["date"],
            run["driver"],
            run["cuda"],
            run["torch"],
            run["triton"],
            run["commit"],
            run.get("clocks", "-"),
            str(run["num_samples"]),
        ]
        for run in device.runs_in_use
    ]
    bad = [
        [item.status, item.key.op, item.key.shape, str(item.config), item.run, getattr(item, "detail", "") or "-"]
        for item in device.measurements
        if item.status != "ok"
    ]
    parts = [
        f"<h2>{html.escape(device.fingerprint.name)}</h2>",
        _table(None, facts),
        "<h3>Runs</h3>",
        _table(
            ["run", "date", "driver", "CUDA", "torch", "Triton", "commit", "SM MHz", "samples"],
            runs,
            numbers=("samples",),
        ),
        "<h3>Samples that were wrong, failed or hung</h3>",
    ]
    if bad:
        heads = ["status", "op", "problem", "candidate", "run", "what happened"]
        parts.append(_table(heads, bad[:MOST_BAD]))
    elif device.is_from_tables_alone:
        parts.append("<p>Not known: tables keep what was right only.</p>")
    else:
        parts.append("<p>None.</p>")
    if len(bad) > MOST_BAD:
        parts.append(f"<p>And {len(bad) - MOST_BAD} more.</p>")
    return "\n".join(parts)


def _family_html(
    device: DeviceMeasurements,
    family: AnyKey,
    members: Sequence[Problem],
    anchor: str,
    drawn: dict[str, figures.Figure],
) -> str:
    text = f"{len(members)} problems; the vendor library was not measured."
    if found := speedups(members):
        ahead = sum(speedup > 1 for speedup in found)
        text = (
            f"{len(members)} problems on {html.escape(device.fingerprint.name)}. Against the "
            f"vendor library: {measures.geometric_mean(found):.3f} times as fast in the geometric "
            f"mean, {min(found):.3f} at least, {max(found):.3f} at most; faster at {ahead} of "
            f"{len(found)}."
        )
    parts = [f'<h2 id="{anchor}">{html.escape(figures.family_title(family))}</h2>', f"<p>{text}</p>"]

    def add(figure: figures.Figure | None) -> None:
        if figure is not None:
            name = f"figure-{len(drawn)}"
            drawn[name] = figure
            parts.append(f'<div class="figure" id="{name}"></div>')

    add(figures.speedup_map(family, members))
    add(figures.region_map(family, members))
    points = measures.roofline(members)
    if points:
        roofs = measures.roofs(device.fingerprint, points)
        add(figures.roofline(points, roofs))
        parts.append(f"<p>Roofs: {html.escape(roofs.source)}.</p>")
    regrets = {REGRET_NAMES[left_out]: items for left_out, items in regrets_of(device, family).items()}
    if any(regrets.values()):
        add(figures.regret_histogram(regrets))
        parts += [_regret_html(name, items) for name, items in regrets.items()]
    return "\n".join(parts)


def _regret_html(name: str, regrets: Sequence[Regret]) -> str:
    if not regrets:
        return f"<h3>{name}</h3>\n<p>No problem has a neighbour to answer for it.</p>"
    found = regret.summary(regrets)
    worst = sorted(regrets, key=lambda item: -item.ratio)[:NUM_WORST]
    rows = [
        [
            f"{item.ratio:.3f}",
            item.key.shape,
            item.answered_by.shape,
            figures.kernel_label(item.chosen, item.key),
            f"{item.chosen_us:.2f}",
            figures.kernel_label(item.best, item.key),
            f"{item.best_us:.2f}",
        ]
        for item in worst
        if item.ratio > 1
    ]
    heads = ["ratio", "problem", "answered by", "would run", "µs", "best", "µs"]
    return "\n".join(
        [
            f"<h3>{name}</h3>",
            "<p>{count} problems: {geomean:.4f} in the geometric mean, {worst:.3f} at worst; the best "
            "was chosen at {num_best}.</p>".format(**found),
            _table(heads, rows, numbers=("ratio", "µs")) if rows else "",
        ]
    )


def _table(heads: Sequence[str] | None, rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """An HTML table; without heads the first column is the head of its row."""
    marks = [' class="n"' if head in numbers else "" for head in heads or ("", "")]

    def line(first: str, others: str, cells: Sequence[str]) -> str:
        tags = [first, *[others] * (len(cells) - 1)]
        return (
            "<tr>"
            + "".join(f"<{tag}{mark}>{html.escape(cell)}</{tag}>" for tag, mark, cell in zip(tags, marks, cells))
            + "</tr>"
        )

    lines = [line("th", "th", heads)] if heads else []
    lines += [line("td" if heads else "th", "td", row) for row in rows]
    return "\n".join(["<table>", *lines, "</table>"])
