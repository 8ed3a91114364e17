"""Makes the page and the plots of a benchmark from its JSON: no GPU is needed.

    ./bazelw run //tools/bench:report -- --bench docs/measured/nvidia_h200/bench.json

Writes bench.md and the pictures that it shows, as SVG, next to the JSON or into --out_dir: for each
family a map of the ratios by layer and m, a roofline of all families, and host times. Equal input
gives equal bytes.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from absl import app, flags
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

from stoneware.report import style
from tools.gpu_check import bench_summary
from tools.gpu_check.bench_summary import OURS, Row

_BENCH = flags.DEFINE_string("bench", None, "The benchmark's bench.json.", required=True)
_OUT = flags.DEFINE_string("out_dir", None, "Folder to write to; that of --bench if not given.")

PEAK_TFLOPS = {"fp8": 1979.0, "bf16": 989.0}
"""Dense tensor core rates of an H200 SXM, from NVIDIA's H200 data sheet, halved where it counts
sparsity. Large products stay below: the power limit lowers the clock."""

PEAK_BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, from the same data sheet."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Told apart with any colour vision (Okabe and Ito, "Color Universal Design", 2008)."""

_PEERS = {
    "torch_row": "torch's kernel with the same scales",
    "torch_block": "torch's kernel with the same scales",
    "torch_mm": "torch.mm",
    "torch_grouped": "torch's grouped kernel",
    bench_summary.FASTEST: "torch's faster kernel, of row and tensor scales",
}
"""What torch's calls are, as the titles of the maps name them."""

_PX = 1 / 100  # inches of a pixel at matplotlib's 100 pixels an inch
_WIDTH_PX = 860

_STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and readable for programs
    "svg.hashsalt": "stoneware",
    "figure.dpi": 100,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
}


def speedup_map(rows: Sequence[Row], title: str) -> pyplot.Figure | None:
    """Torch's time over ours: a row a layer, a column an m; None without any.

    One map against torch's kernel with the same scales and, where torch was timed with others too, one
    against the fastest of all.
    """
    peers = list(dict.fromkeys(name for row in rows for name in row.get("device_us", {}) if name != OURS))
    maps = {
        peer: cells
        for peer in [*peers[:1], *([bench_summary.FASTEST] if len(peers) > 1 else [])]
        if (
            cells := {
                (row["layer"], bench_summary.rows_each(row)): value
                for row in rows
                if (value := bench_summary.ratio(row, peer)) is not None
            }
        )
    }
    if not maps:
        return None
    num_layers = sum(len({layer for layer, _ in cells}) for cells in maps.values())
    figure, all_axes = pyplot.subplots(
        len(maps),
        figsize=(_WIDTH_PX * _PX, (118 * len(maps) + 26 * num_layers) * _PX),
        layout="constrained",
        squeeze=False,
    )
    for axes, (peer, cells) in zip(all_axes.flat, maps.items()):
        axes.set_title(f"{title}\nspeed-up over {_PEERS.get(peer, peer)}")
        _draw_map(axes, rows, cells)
    figure.supxlabel(
        "torch's time / Stoneware's: above 1 (blue) Stoneware is faster, below 1 (orange) torch is", fontsize=9
    )
    return figure


def _draw_map(axes: pyplot.Axes, rows: Sequence[Row], cells: Mapping[tuple[str, int], float]) -> None:
    layers = list(dict.fromkeys(layer for layer, _ in cells))
    sizes = {row["layer"]: (row["n"], row["k"], row["groups"]) for row in rows}
    columns = sorted({m for _, m in cells})
    steps = [[style.step(cells[layer, m]) if (layer, m) in cells else math.nan for m in columns] for layer in layers]
    axes.imshow(steps, cmap=ListedColormap(style.LIGHT), vmin=-0.5, vmax=len(style.LIGHT) - 0.5, aspect="auto")
    for y, layer in enumerate(layers):
        for x, m in enumerate(columns):
            if (layer, m) in cells:
                colour = "white" if style.is_strong(steps[y][x]) else "#1f2328"
                axes.text(x, y, f"{cells[layer, m]:.2f}", ha="center", va="center", color=colour, fontsize=10)
    axes.set_xticks(range(len(columns)), [str(m) for m in columns])
    axes.set_yticks(range(len(layers)), [_layer_label(layer, *sizes[layer]) for layer in layers])
    axes.set_xlabel("mean rows per expert" if any(row["groups"] for row in rows) else "m")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def roofline(
    rows: Sequence[Row], families: Mapping[str, str], peaks: Mapping[str, float] = PEAK_TFLOPS
) -> pyplot.Figure | None:
    """TFLOP/s of ours over operations per byte, with the roofs of memory and of tensor cores."""
    timed = [row for row in rows if bench_summary.ours_us(row) is not None]
    if not timed:
        return None
    figure, axes = pyplot.subplots(figsize=(_WIDTH_PX * _PX, 460 * _PX), layout="constrained")
    bytes_per_us = PEAK_BYTES_PER_US
    lowest, highest = 0.5, 1e4
    for dtype, tflops in peaks.items():
        corner = tflops * 1e6 / bytes_per_us
        axes.plot(
            [lowest, corner, highest],
            [lowest * bytes_per_us / 1e6, tflops, tflops],
            color="#888",
            linewidth=1,
            zorder=1,
        )
        axes.annotate(
            f"{dtype} {tflops:,.0f}",
            (highest, tflops),
            ha="left",
            va="center",
            xytext=(5, 0),
            textcoords="offset points",
            color="#555",
            annotation_clip=False,
        )
    for colour, (family, members) in zip(COLOURS, bench_summary.by_family(timed).items()):
        flop = [2 * row["m"] * row["n"] * row["k"] for row in members]
        axes.scatter(
            [work / row["num_bytes"] for work, row in zip(flop, members)],
            [work / bench_summary.ours_us(row) / 1e6 for work, row in zip(flop, members)],
            s=16,
            color=colour,
            label=families[family],
            zorder=2,
            linewidths=0,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(lowest, highest),
        xlabel="operations per byte of operands and result",
        ylabel="TFLOP/s",
        title=f"Stoneware under the data sheet's roofs; memory {bytes_per_us / 1e6:g} TB/s",
    )
    axes.grid(which="major", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    return figure


def host_bars(
    host_us: Mapping[str, Mapping[str, Mapping[str, Any]]], families: Mapping[str, str]
) -> pyplot.Figure | None:
    """Bars of host time per call, into out and allocating; the spread is a line."""
    bars = [
        (f"{families[family]}: {call}, {'into out' if how == 'out' else how}", call, timing)
        for family, of_family in host_us.items()
        for how in ("out", "allocating")
        for call, timing in of_family.get(how, {}).items()
    ]
    if not bars:
        return None
    figure, axes = pyplot.subplots(figsize=(_WIDTH_PX * _PX, (90 + 19 * len(bars)) * _PX), layout="constrained")
    medians = [timing["median_us"] for *_, timing in bars]
    axes.barh(
        range(len(bars)),
        medians,
        xerr=[timing["spread_us"] / 2 for *_, timing in bars],
        color=[COLOURS[0] if call == OURS else "#b8bcc2" for _, call, _ in bars],
        height=0.7,
        error_kw={"elinewidth": 1, "ecolor": "#444"},
    )
    for y, (_, _, timing) in enumerate(bars):
        axes.annotate(
            f"{timing['median_us']:.1f}",
            (timing["median_us"] + timing["spread_us"] / 2, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(t["median_us"] + t["spread_us"] / 2 for *_, t in bars))
    axes.set_xlabel("µs; the GPU is not waited for")
    axes.set_title("Host time per call\nStoneware blue, torch grey")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(report: Mapping[str, Any], out_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes the page and its pictures into a folder; gives the files."""
    families = report["families"]
    rows = report["rows"]
    plots: dict[str, str] = {}
    written = []
    with matplotlib.rc_context(_STYLE):
        figures = {
            f"Speed of {families[family]} against torch": (
                f"bench_speedup_{family}.svg",
                speedup_map(members, families[family]),
            )
            for family, members in bench_summary.by_family(rows).items()
        }
        figures["Roofline"] = ("bench_roofline.svg", roofline(rows, families))
        figures["Host time"] = ("bench_host_time.svg", host_bars(report["host_us"], families))
        for title, (file_name, figure) in figures.items():
            if figure is None:
                continue
            # No date and no version: equal input must give equal bytes.
            figure.savefig(out_dir / file_name, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
            plots[title] = file_name
            written.append(out_dir / file_name)
    page = out_dir / "bench.md"
    page.write_text(bench_summary.to_markdown(report, plots), encoding="utf-8")
    return [page, *written]


def _layer_label(layer: str, n: int, k: int, groups: int) -> str:
    return f"{layer}  {f'{groups} × ' if groups else ''}{n} × {k}"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    # `bazel run` starts in a folder of its own; paths mean those of the shell.
    start = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    bench = start / _BENCH.value
    try:
        report = json.loads(bench.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise app.UsageError(f"--bench={_BENCH.value} must be bench.json: {error}") from None
    if report.get("schema") != 3:
        raise app.UsageError(
            f"--bench={_BENCH.value} must be of schema 3, it is of {report.get('schema')}; run the benchmark again"
        )
    out_dir = start / _OUT.value if _OUT.value else bench.parent
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in write(report, out_dir):
        print(path)


if __name__ == "__main__":
    matplotlib.use("svg")
    app.run(main)
