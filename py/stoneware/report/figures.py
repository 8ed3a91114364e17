"""The figures of the report, as the JSON that plotly.js draws; made of what measures.py gives."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.kernels.registry import OPS, spec
from stoneware.report import regret
from stoneware.report.measures import Problem, RooflinePoint, Roofs
from stoneware.report.regret import Regret
from stoneware.tuning.table_entry import Choice

Figure = dict[str, Any]

WIDTH_PX = 1120
_ROW_PX = 30
_LEGEND_ROW_PX = 20
_FONT = {"family": "sans-serif", "size": 13, "color": "#222"}
_HOVER = "%{customdata}<extra></extra>"
_MOST_UPRIGHT_COLUMNS = 16  # of more the labels of four digits would run into each other

COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#7f7f7f",
    "#6a3d9a",
    "#b2df8a",
    "#8c510a",
    "#1a1a1a",
    "#fb9a99",
    "#01665e",
    "#cab2d6",
    "#b15928",
)
"""One a kernel; the first seven tell apart with any colour vision (Okabe and Ito, "Color Universal
Design", 2008). Cells carry the kernel's number too."""

SLOWER_TO_FASTER = ((0.0, "#8c2d04"), (0.25, "#f4a582"), (0.5, "#f7f7f7"), (0.75, "#92c5de"), (1.0, "#08519c"))
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
    fixed = [f"{name}={value}" for name, value in zip(family.names, family.values) if type(value) is not int]
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
    problems = [problem for problem in problems if problem.speedup is not None]
    if not problems:
        return None
    reach = max(abs(math.log2(problem.speedup)) for problem in problems)
    # An outlier would take the colours from all the others, and no spread would exaggerate.
    reach = min(max(reach, 0.25), 2.0)
    step = 1.0 if reach > 1.5 else 0.5 if reach > 0.6 else 0.25
    ticks = [idx * step for idx in range(-4, 5) if abs(idx * step) <= reach + 0.01]

    def hover(problem: Problem) -> list[str]:
        return [
            f"ours: {_timed(problem.chosen)}",
            f"vendor: {_timed(problem.vendor)}",
            f"vendor / ours: {problem.speedup:.3f}",
        ]

    return _heat_map(
        "Speed against the vendor library (its time / ours; above 1 ours is faster)",
        family,
        problems,
        value=lambda problem: math.log2(problem.speedup),
        text=lambda problem: f"{problem.speedup:.2f}",
        hover=hover,
        zmin=-reach,
        zmax=reach,
        colorscale=SLOWER_TO_FASTER,
        colorbar={
            "title": {"text": "times<br>as fast", "side": "top"},
            "thickness": 14,
            "tickvals": ticks,
            "ticktext": [f"{2**tick:.3g}" for tick in ticks],
        },
    )


def region_map(family: AnyKey, problems: Sequence[Problem]) -> Figure:
    """(c) Categorical map of the chosen kernels, ties marked."""
    counts = Counter(kernel_of(problem.chosen.config) for problem in problems)
    kernels = sorted(counts, key=lambda kernel: (-counts[kernel], str(kernel)))
    number = {kernel: idx for idx, kernel in enumerate(kernels)}
    colours = [COLOURS[idx % len(COLOURS)] for idx in range(len(kernels))]

    def idx_of(problem: Problem) -> int:
        return number[kernel_of(problem.chosen.config)]

    def hover(problem: Problem) -> list[str]:
        ties = (f"ties: {_timed(choice)}" for choice in problem.ties[:5])
        return [_timed(problem.chosen), problem.rule, *ties]

    figure = _heat_map(
        "Chosen kernels (≈: another candidate ties within the noise)",
        family,
        problems,
        value=idx_of,
        text=lambda problem: f"{idx_of(problem) + 1}{' ≈' if problem.ties else ''}",
        hover=hover,
        zmin=-0.5,
        zmax=len(kernels) - 0.5,
        showscale=False,
        colorscale=[(edge / len(kernels), colour) for idx, colour in enumerate(colours) for edge in (idx, idx + 1)],
    )
    labels = [kernel_label(kernel, family) for kernel in kernels]
    figure["data"] += [
        {
            "type": "scatter",
            "x": [None],
            "y": [None],
            "mode": "markers",
            "hoverinfo": "skip",
            "marker": {"symbol": "square", "size": 12, "color": colours[idx]},
            "name": f"{idx + 1}  {label if labels.count(label) == 1 else kernels[idx]} ({counts[kernels[idx]]})",
        }
        for idx, label in enumerate(labels)
    ]
    legend_px = _LEGEND_ROW_PX * len(kernels) + 10
    figure["layout"]["height"] += legend_px
    figure["layout"]["margin"]["b"] += legend_px
    figure["layout"]["legend"] = {
        "x": 0,
        "xanchor": "left",
        "y": 0,
        "yanchor": "bottom",
        "yref": "container",
        "maxheight": legend_px + 10,  # of a lower legend plotly.js shows a part, with a scroll bar
        "itemclick": False,
        "itemdoubleclick": False,
        "font": {"size": 12},
    }
    return figure


def roofline(points: Sequence[RooflinePoint], roofs: Roofs) -> Figure:
    """(b) Achieved operations per second against arithmetic intensity, under the roofs."""
    low = min(point.intensity for point in points) / 1.5
    high = max(*(point.intensity for point in points), roofs.ridge) * 1.5
    corners = [low, roofs.ridge, high] if low < roofs.ridge else [low, high]
    kind = "measured" if roofs.is_measured else "nominal"
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": corners,
        "name": f"{kind} roofs",
        "y": [min(roofs.tflops, corner * roofs.gbytes_per_s / 1e3) for corner in corners],
        "line": {"color": "#444", "width": 2},
        "hoverinfo": "skip",
    }
    m_values = sorted({point.problem.key.m for point in points})
    ticks = m_values[:: -(-len(m_values) // 9)]  # more would overlap on the colour bar
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": "chosen kernel",
        "x": [point.intensity for point in points],
        "y": [point.tflops for point in points],
        "marker": {
            "size": 9,
            "line": {"width": 0.5, "color": "#fff"},
            "colorscale": "Viridis",
            "color": [math.log2(point.problem.key.m) for point in points],
            "colorbar": {
                "title": {"text": "m"},
                "thickness": 14,
                "tickvals": [math.log2(m) for m in ticks],
                "ticktext": [str(m) for m in ticks],
            },
        },
        "customdata": [
            _lines(
                point.problem,
                f"{point.tflops:.4g} TFLOP/s, {point.intensity:.4g} FLOP/byte",
                _timed(point.problem.chosen),
            )
            for point in points
        ],
        "hovertemplate": _HOVER,
    }
    bottom = min(point.tflops for point in points) / 2
    layout = _layout(
        f"Roofline ({kind} roofs: {roofs.tflops:,.0f} TFLOP/s, {roofs.gbytes_per_s:,.0f} GB/s)",
        460,
        _axis(
            "FLOP per byte of a, b and the result, each once",
            type="log",
            dtick=1,
            range=[math.log10(low), math.log10(high)],
        ),
        _axis("TFLOP/s", type="log", dtick=1, range=[math.log10(bottom), math.log10(roofs.tflops * 1.6)]),
    )
    layout["margin"]["l"] = 70
    layout["legend"] = {"x": 0.01, "y": 0.99, "bgcolor": "rgba(255,255,255,0.8)"}
    return {"data": [line, dots], "layout": layout}


def regret_histogram(by_name: Mapping[str, Sequence[Regret]]) -> Figure:
    """(d) How much the look-up loses where it must take a neighbour."""
    edges = [round((edge - 1) * 100) for edge in regret.BIN_EDGES]
    labels = [f"{low} to {high} %" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]} % up"]
    bars = [
        {
            "type": "bar",
            "name": f"{name} ({len(regrets)} problems)",
            "x": labels,
            "y": counts,
            "text": list(map(str, counts)),
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": COLOURS[idx]},
            "hoverinfo": "skip",
        }
        for idx, (name, regrets) in enumerate(by_name.items())
        if regrets and (counts := regret.summary(regrets)["histogram"])
    ]
    layout = _layout(
        "Regret: time of what the look-up would choose, over the best",
        360,
        _axis("slower than the best by", type="category"),
        _axis("problems", rangemode="tozero"),
    )
    layout["margin"]["l"] = 70
    layout["margin"]["t"] = 72  # the legend stands above the bars, any of which may be the highest
    layout["legend"] = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": bars, "layout": layout}


def _heat_map(
    title: str,
    family: AnyKey,
    problems: Sequence[Problem],
    *,
    value: Callable[[Problem], float],
    text: Callable[[Problem], str],
    hover: Callable[[Problem], list[str]],
    **trace: Any,
) -> Figure:
    """A cell for each problem by row (n × k) and column (m); `trace` has the colours."""
    rows = {problem.key.sizes[:-1]: row_label(problem.key) for problem in problems}
    columns = {problem.key.sizes[-1:]: column_label(problem.key) for problem in problems}
    by_sizes = {problem.key.sizes: problem for problem in problems}

    def cells(value: Callable[[Problem], Any], missing: Any = "") -> list[list[Any]]:
        return [
            [value(by_sizes[row + column]) if row + column in by_sizes else missing for column in sorted(columns)]
            for row in sorted(rows)
        ]

    labels = [rows[sizes] for sizes in sorted(rows)]
    x_axis = _axis(column_title(family), type="category", showgrid=False)
    if len(columns) > _MOST_UPRIGHT_COLUMNS:
        x_axis["tickangle"] = -90
    layout = _layout(
        title,
        110 + _ROW_PX * max(len(rows), 5),
        x_axis,
        {"type": "category", "autorange": "reversed", "showgrid": False, "zeroline": False, "ticksuffix": "  "},
    )
    # Room for the longest label; a letter of this font is some 7.5 px wide.
    layout["margin"]["l"] = 30 + round(7.5 * max(map(len, labels)))
    return {
        "layout": layout,
        "data": [
            {
                "type": "heatmap",
                "x": [columns[size] for size in sorted(columns)],
                "y": labels,
                "z": cells(value, None),
                "text": cells(text),
                "texttemplate": "%{text}",
                "textfont": {"size": 12},
                "xgap": 2,
                "ygap": 2,
                "hovertemplate": _HOVER,
                "customdata": cells(lambda problem: _lines(problem, *hover(problem))),
                "hoverongaps": False,
                **trace,
            }
        ],
    }


def _layout(title: str, height_px: int, x_axis: Any, y_axis: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "x": 0, "xanchor": "left", "xref": "container", "pad": {"l": 4}, "font": {"size": 15}},
        "width": WIDTH_PX,
        "height": height_px,
        "font": _FONT,
        "plot_bgcolor": "#fff",
        "paper_bgcolor": "#fff",
        "margin": {"t": 44, "b": 56, "l": 60, "r": 20},
        "hoverlabel": {"align": "left", "bgcolor": "#fff", "font": {"size": 12}},
        "xaxis": x_axis,
        "yaxis": y_axis,
    }


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": "#e5e5e5", "linecolor": "#9aa0a6", "zeroline": False, **more}


def _lines(problem: Problem, *lines: str) -> str:
    """What is shown of a problem under the pointer."""
    return "<br>".join([f"<b>{problem.key.shape}</b>", *lines])


def _timed(choice: Choice) -> str:
    return f"{choice.config}: {choice.median_us:.2f} ± {choice.spread_us:.2f} µs, run {choice.run}"
