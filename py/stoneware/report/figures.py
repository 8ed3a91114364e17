"""The figures of the report, as the JSON that plotly.js draws; made of what measures.py gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.kernels.registry import OPS, spec
from stoneware.report import regret
from stoneware.report.measures import Problem, RooflinePoint, Roofs
from stoneware.report.regret import Regret
from stoneware.tuning.table import Choice

Figure = dict[str, Any]

WIDTH_PX = 1120
_ROW_PX = 30
_LEGEND_ROW_PX = 20
_FONT = {"family": "sans-serif", "size": 13, "color": "#222"}
_GREY = "#9aa0a6"

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7f7f7f",
    "#6a3d9a", "#b2df8a", "#8c510a", "#1a1a1a", "#fb9a99", "#01665e", "#cab2d6", "#b15928",
)
"""One a kernel; the first seven tell apart with any colour vision (Okabe and Ito, "Color Universal
Design", 2008). Cells carry the kernel's number too."""

SLOWER_TO_FASTER = (
    (0.0, "#8c2d04"), (0.25, "#f4a582"), (0.5, "#f7f7f7"), (0.75, "#92c5de"), (1.0, "#08519c"),
)
"""Diverging, red to blue; the middle is where both are equally fast."""


def family_title(family: AnyKey) -> str:
    """A family in words."""
    if isinstance(family, Key):
        scales = "" if family.scales == "none" else f", {family.scales} scales"
        groups = f", {family.num_groups} groups" if family.num_groups else ""
        batch = f", batch of {family.num_groups}" if family.is_batch else ""
        return (
            f"{family.op} {family.a_dtype} × {family.b_dtype} → {family.out_dtype}{scales}, "
            f"layout {family.layout}{batch or groups}"
        )
    fixed = [
        f"{name}={value}" for name, value in zip(family.names, family.values)
        if type(value) is not int
    ]
    return ", ".join([family.op, *fixed, *(f"{name}: {dtype}" for name, dtype in family.dtypes)])


def row_label(key: AnyKey) -> str:
    """What a problem shares with those of its row: n × k with the layer's names."""
    if not isinstance(key, Key):
        return " ".join(f"{name}={size}" for name, size in _named_sizes(key)[:-1]) or "all"
    sizes = " × ".join(map(str, key.sizes[:-1]))
    shapes = (key.n, key.k), (key.num_groups, key.n, key.k)
    layers = spec(key.op).layers if key.op in OPS else {}
    names = [name for name, shape in layers.items() if shape in shapes]
    return f"{', '.join(names)}  {sizes}" if names else sizes


def column_label(key: AnyKey) -> str:
    """The size that varies at run time: m."""
    return str(key.sizes[-1]) if key.sizes else "all"


def column_title(family: AnyKey) -> str:
    """What varies along a row."""
    if isinstance(family, Key):
        return spec(family.op).m_title if family.op in OPS else "m"
    return next((name for name, _ in reversed(_named_sizes(family))), "")


def _named_sizes(key: KernelKey) -> list[tuple[str, int]]:
    """The sizes of a decorated kernel's key with their names, in the order of `key.sizes`."""
    named = [(name, value) for name, value in zip(key.names, key.values) if type(value) is int]
    return sorted(named, key=lambda item: item[0].lower() == "m")


def kernel_label(config: AnyConfig, family: AnyKey) -> str:
    """A candidate without what its whole family shares."""
    if not isinstance(config, Config):
        return str(config)
    shared = {family.op, *family.op.split("_")}
    if isinstance(family, Key):
        shared |= {family.a_dtype, family.b_dtype, family.out_dtype, family.layout}
    words = [word for word in config.kernel.split("_") if word not in shared]
    if config.backend == "vendor" or not words:
        words = [config.kernel]
    return " ".join([config.backend, *(word for word in words if word not in config.backend)])


def kernel_of(config: AnyConfig) -> AnyConfig:
    """The candidate without the knobs of its launch, which need no kernel of their own."""
    if isinstance(config, Config):
        return Config(backend=config.backend, kernel=config.kernel)
    return config


def speedup_map(family: AnyKey, problems: Sequence[Problem]) -> Figure | None:
    """(a) Heat map of the vendor library's time over the chosen's; None if it was not measured."""
    grid = _Grid([problem for problem in problems if problem.speedup is not None])
    if not grid.problems:
        return None
    reach = max(abs(math.log2(problem.speedup)) for problem in grid.problems)
    # An outlier would take the colours from all the others, and no spread would exaggerate.
    reach = min(max(reach, 0.25), 2.0)
    step = 1.0 if reach > 1.5 else 0.5 if reach > 0.6 else 0.25
    ticks = [idx * step for idx in range(-4, 5) if abs(idx * step) <= reach + 0.01]
    trace = {
        "type": "heatmap", "x": grid.columns, "y": grid.rows,
        "z": grid.cells(lambda problem: math.log2(problem.speedup)),
        "text": grid.cells(lambda problem: f"{problem.speedup:.2f}", ""),
        "texttemplate": "%{text}", "textfont": {"size": 12}, "xgap": 2, "ygap": 2,
        "customdata": grid.cells(_speed_hover, ""), "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False, "zmin": -reach, "zmax": reach, "colorscale": SLOWER_TO_FASTER,
        "colorbar": {
            "title": {"text": "times<br>as fast", "side": "top"}, "thickness": 14,
            "tickvals": ticks, "ticktext": [f"{2 ** tick:.3g}" for tick in ticks],
        },
    }
    return {"data": [trace], "layout": grid.layout(
        "Speed against the vendor library (its time / ours; above 1 ours is faster)",
        column_title(family),
    )}


def region_map(family: AnyKey, problems: Sequence[Problem]) -> Figure:
    """(c) Categorical map of the chosen kernels, ties marked."""
    grid = _Grid(problems)
    counts: dict[AnyConfig, int] = {}
    for problem in problems:
        kernel = kernel_of(problem.chosen.config)
        counts[kernel] = counts.get(kernel, 0) + 1
    kernels = sorted(counts, key=lambda kernel: (-counts[kernel], str(kernel)))
    number = {kernel: idx for idx, kernel in enumerate(kernels)}
    colours = [COLOURS[idx % len(COLOURS)] for idx in range(len(kernels))]
    steps = [
        step for idx, colour in enumerate(colours)
        for step in ((idx / len(kernels), colour), ((idx + 1) / len(kernels), colour))
    ]

    def text(problem: Problem) -> str:
        mark = " ≈" if problem.ties else ""
        return f"{number[kernel_of(problem.chosen.config)] + 1}{mark}"

    cells = {
        "type": "heatmap", "x": grid.columns, "y": grid.rows, "xgap": 2, "ygap": 2,
        "z": grid.cells(lambda problem: number[kernel_of(problem.chosen.config)]),
        "text": grid.cells(text, ""), "texttemplate": "%{text}", "textfont": {"size": 12},
        "customdata": grid.cells(_choice_hover, ""),
        "hovertemplate": "%{customdata}<extra></extra>", "hoverongaps": False,
        "zmin": -0.5, "zmax": len(kernels) - 0.5, "colorscale": steps, "showscale": False,
    }
    labels = [kernel_label(kernel, family) for kernel in kernels]
    legend = [
        {
            "type": "scatter", "x": [None], "y": [None], "mode": "markers",
            "marker": {"symbol": "square", "size": 12, "color": colours[idx]},
            "name": f"{idx + 1}  {label if labels.count(label) == 1 else kernels[idx]} "
                    f"({counts[kernels[idx]]})",
            "hoverinfo": "skip",
        }
        for idx, label in enumerate(labels)
    ]
    layout = grid.layout(
        "Chosen kernels (≈: another candidate ties within the noise)", column_title(family)
    )
    legend_px = _LEGEND_ROW_PX * len(kernels) + 10
    layout["height"] += legend_px
    layout["margin"]["b"] += legend_px
    layout["legend"] = {
        "x": 0, "xanchor": "left", "y": 0, "yanchor": "bottom", "yref": "container",
        "maxheight": legend_px + 10,  # of a lower legend plotly.js shows a part, with a scroll bar
        "itemclick": False, "itemdoubleclick": False, "font": {"size": 12},
    }
    return {"data": [cells, *legend], "layout": layout}


def roofline(points: Sequence[RooflinePoint], roofs: Roofs) -> Figure:
    """(b) Achieved operations per second against arithmetic intensity, under the roofs."""
    low = min(point.intensity for point in points) / 1.5
    high = max(*(point.intensity for point in points), roofs.ridge) * 1.5
    corners = [low, roofs.ridge, high] if low < roofs.ridge else [low, high]
    kind = "measured" if roofs.is_measured else "nominal"
    line = {
        "type": "scatter", "mode": "lines", "x": corners, "name": f"{kind} roofs",
        "y": [min(roofs.tflops, corner * roofs.gbytes_per_s / 1e3) for corner in corners],
        "line": {"color": "#444", "width": 2}, "hoverinfo": "skip",
    }
    m_values = sorted({point.problem.key.m for point in points})
    dots = {
        "type": "scatter", "mode": "markers", "name": "chosen kernel",
        "x": [point.intensity for point in points], "y": [point.tflops for point in points],
        "marker": {
            "size": 9, "line": {"width": 0.5, "color": "#fff"}, "colorscale": "Viridis",
            "color": [math.log2(point.problem.key.m) for point in points],
            "colorbar": {
                "title": {"text": "m"}, "thickness": 14,
                "tickvals": [math.log2(m) for m in _thinned(m_values)],
                "ticktext": [str(m) for m in _thinned(m_values)],
            },
        },
        "customdata": [
            f"{_title(point.problem)}<br>{point.tflops:.4g} TFLOP/s, "
            f"{point.intensity:.4g} FLOP/byte<br>{_timed(point.problem.chosen)}" for point in points
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    bottom = min(point.tflops for point in points) / 2
    layout = _layout(f"Roofline ({kind} roofs: {roofs.tflops:,.0f} TFLOP/s, "
                     f"{roofs.gbytes_per_s:,.0f} GB/s)", 460)
    layout["xaxis"] = {**_axis("FLOP per byte of a, b and the result, each once"), "type": "log",
                       "range": [math.log10(low), math.log10(high)], "dtick": 1}
    layout["yaxis"] = {**_axis("TFLOP/s"), "type": "log", "dtick": 1,
                       "range": [math.log10(bottom), math.log10(roofs.tflops * 1.6)]}
    layout["margin"]["l"] = 70
    layout["legend"] = {"x": 0.01, "y": 0.99, "bgcolor": "rgba(255,255,255,0.8)"}
    return {"data": [line, dots], "layout": layout}


def regret_histogram(by_name: Mapping[str, Sequence[Regret]]) -> Figure:
    """(d) How much the look-up loses where it must take a neighbour."""
    edges = [round((edge - 1) * 100) for edge in regret.BIN_EDGES]
    labels = [f"{low} to {high} %" for low, high in zip(edges, edges[1:])] + [f"{edges[-1]} % up"]
    bars = []
    for idx, (name, regrets) in enumerate(by_name.items()):
        if not regrets:
            continue
        counts = list(regret.summary(regrets).histogram)
        bars.append({
            "type": "bar", "name": f"{name} ({len(regrets)} problems)", "x": labels, "y": counts,
            "text": [str(count) for count in counts], "textposition": "outside",
            "cliponaxis": False, "marker": {"color": COLOURS[idx]}, "hoverinfo": "skip",
        })
    layout = _layout("Regret: time of what the look-up would choose, over the best", 360)
    layout["xaxis"] = {**_axis("slower than the best by"), "type": "category"}
    layout["yaxis"] = {**_axis("problems"), "rangemode": "tozero"}
    layout["margin"]["l"] = 70
    layout["margin"]["t"] = 72  # the legend stands above the bars, any of which may be the highest
    layout["legend"] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": bars, "layout": layout}


_MOST_UPRIGHT_COLUMNS = 16
"""With more, the labels of four digits would run into each other."""


class _Grid:
    """Problems by row (n × k) and column (m)."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        rows = {problem.key.sizes[:-1]: row_label(problem.key) for problem in problems}
        columns = {problem.key.sizes[-1:]: column_label(problem.key) for problem in problems}
        self._row_sizes, self._column_sizes = sorted(rows), sorted(columns)
        self.rows = [rows[sizes] for sizes in self._row_sizes]
        self.columns = [columns[size] for size in self._column_sizes]
        self._by_sizes = {problem.key.sizes: problem for problem in problems}

    def cells(self, value: Any, missing: Any = None) -> list[list[Any]]:
        """The value of each problem; rows from top to bottom."""
        return [
            [
                missing if (problem := self._by_sizes.get(row + column)) is None else value(problem)
                for column in self._column_sizes
            ]
            for row in self._row_sizes
        ]

    def layout(self, title: str, x_title: str) -> dict[str, Any]:
        layout = _layout(title, 110 + _ROW_PX * max(len(self.rows), 5))
        layout["xaxis"] = {**_axis(x_title), "type": "category", "showgrid": False}
        if len(self.columns) > _MOST_UPRIGHT_COLUMNS:
            layout["xaxis"]["tickangle"] = -90
        layout["yaxis"] = {
            "type": "category", "autorange": "reversed", "showgrid": False, "zeroline": False,
            "ticksuffix": "  ",
        }
        # Room for the longest label; a letter of this font is some 7.5 px wide.
        layout["margin"]["l"] = 30 + round(7.5 * max(map(len, self.rows)))
        return layout


def _layout(title: str, height_px: int) -> dict[str, Any]:
    return {
        "title": {"text": title, "x": 0, "xanchor": "left", "xref": "container",
                  "pad": {"l": 4}, "font": {"size": 15}},
        "width": WIDTH_PX, "height": height_px, "font": _FONT, "plot_bgcolor": "#fff",
        "paper_bgcolor": "#fff", "margin": {"t": 44, "b": 56, "l": 60, "r": 20},
        "hoverlabel": {"align": "left", "bgcolor": "#fff", "font": {"size": 12}},
    }


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": "#e5e5e5", "linecolor": _GREY, "zeroline": False}


def _thinned(values: Sequence[int], most: int = 9) -> list[int]:
    """At most some of the values, with the first: more would overlap on a colour bar."""
    return list(values[::-(-len(values) // most)])


def _title(problem: Problem) -> str:
    return f"<b>{problem.key.shape}</b>"


def _timed(choice: Choice) -> str:
    return f"{choice.config}: {choice.median_us:.2f} ± {choice.spread_us:.2f} µs, run {choice.run}"


def _speed_hover(problem: Problem) -> str:
    return "<br>".join([
        _title(problem), f"ours: {_timed(problem.chosen)}", f"vendor: {_timed(problem.vendor)}",
        f"vendor / ours: {problem.speedup:.3f}",
    ])


def _choice_hover(problem: Problem) -> str:
    return "<br>".join([
        _title(problem), _timed(problem.chosen), problem.rule,
        *(f"ties: {_timed(choice)}" for choice in problem.ties[:5]),
    ])
