"""Makes the page and the plots of benchmarks from their JSON: no GPU is needed.

    ./bazelw run //tools/bench:report -- --bench docs/measured/nvidia_h200/bench.json
    ./bazelw run //tools/bench:report -- --layers docs/measured/nvidia_h200/layers.json
    ./bazelw run //tools/bench:report -- --sweep DIR/sweep.json

Writes next to the JSON or into --out_dir, with --bench: bench.md and the pictures that it shows, which are for each
family a map of the ratios by layer and m, a roofline of all families, and host times; with --layers:
layers_tokens_per_second.svg, a whole model before and after; with --sweep: sweep.svg, time over m. Pictures are SVG
that follows the reader's light or dark mode. Equal input gives equal bytes.
"""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy
from absl import app, flags
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

from stoneware.report import style
from tools.bench import figure_colours
from tools.bench.figure_colours import GREY, GRID, INK, SERIES, SOFT
from tools.gpu_check import bench_summary, sweep
from tools.gpu_check.bench_summary import OURS, Row

_BENCH = flags.DEFINE_string("bench", None, "The bench.json of `gpu_check.pyz bench`.")
_LAYERS = flags.DEFINE_string("layers", None, "The layers.json of `gpu_check.pyz layers`.")
_SWEEP = flags.DEFINE_string("sweep", None, "The sweep.json of `gpu_check.pyz sweep`.")
_OUT = flags.DEFINE_string("out_dir", None, "Folder to write to; that of the JSON if not given.")

PEAK_TFLOPS = {"fp8": 1979.0, "bf16": 989.0}
"""Dense tensor core rates of an H200 SXM, from NVIDIA's H200 data sheet, halved where it counts
sparsity. Large products stay below: the power limit lowers the clock."""

PEAK_BYTES_PER_US = 4.8e6
"""Memory bandwidth of an H200, from the same data sheet."""

_PEERS = {
    "torch_row": "torch's kernel with the same scales",
    "torch_block": "torch's kernel with the same scales",
    "torch_mm": "torch.mm",
    "torch_grouped": "torch's grouped kernel",
    bench_summary.FASTEST: "torch's faster kernel, of row and tensor scales",
}
"""What torch's calls are, as the titles of the maps name them."""

TORCH, FP8 = "torch bf16", "stoneware rowwise"
"""Models of layers.json."""

_LINES = {sweep.ROW: GREY, sweep.TENSOR: SERIES[1], sweep.MM: GREY, sweep.OURS: SERIES[0]}
"""Colours of the calls of sweep.json."""

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
    "figure.constrained_layout.w_pad": 0.12,  # a reader's font may be wider than matplotlib's
    **figure_colours.PARAMETERS,
}


def setup(machine: Mapping[str, Any]) -> str:
    """The GPU and the torch of a run, for titles."""
    return f"{machine['gpu']}, torch {machine['torch']}"


def speedup_map(rows: Sequence[Row], title: str, where: str) -> pyplot.Figure | None:
    """Torch's time over ours: a row a layer, a column an m; None without any.

    One map against torch's kernel with the same scales and, where torch was timed with others too, one
    against the fastest of all.
    """
    timed = dict.fromkeys(name for row in rows for name in row.get("device_us", {}) if name != OURS)
    same_scales = [name for name in timed if name in _PEERS]
    peers = [*same_scales, *([bench_summary.FASTEST] if len(timed) > 1 else [])]
    maps = {
        peer: cells
        for peer in peers
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
        axes.set_title(f"compared with {_PEERS[peer]}")
        _draw_map(axes, rows, cells)
    _set_title(figure, f"{title}: speed-up of Stoneware\n{where}")
    figure.supxlabel(
        "torch's time / Stoneware's: above 1 (blue) Stoneware is faster, below 1 (orange) torch is", fontsize=9
    )
    return figure


def _draw_map(axes: pyplot.Axes, rows: Sequence[Row], cells: Mapping[tuple[str, int], float]) -> None:
    layers = list(dict.fromkeys(layer for layer, _ in cells))
    sizes = {row["layer"]: (row["n"], row["k"], row["groups"]) for row in rows}
    columns = sorted({m for _, m in cells})
    steps = [[style.step(cells[layer, m]) if (layer, m) in cells else math.nan for m in columns] for layer in layers]
    # Each cell is a shape with a colour of its own, which the style sheet can change; an image's pixels it cannot.
    axes.pcolormesh(
        numpy.ma.masked_invalid(steps),
        cmap=ListedColormap(style.LIGHT),
        vmin=-0.5,
        vmax=len(style.LIGHT) - 0.5,
        edgecolors=figure_colours.PAGE,
        linewidth=2,
    )
    axes.invert_yaxis()
    for y, layer in enumerate(layers):
        for x, m in enumerate(columns):
            if (layer, m) in cells:
                colour = figure_colours.INVERSE if style.is_strong(steps[y][x]) else INK
                axes.text(
                    x + 0.5, y + 0.5, f"{cells[layer, m]:.2f}", ha="center", va="center", color=colour, fontsize=10
                )
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [str(m) for m in columns])
    axes.set_yticks([y + 0.5 for y in range(len(layers))], [_layer_label(layer, *sizes[layer]) for layer in layers])
    axes.set_xlabel("mean rows per expert" if any(row["groups"] for row in rows) else "m")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def roofline(
    rows: Sequence[Row], families: Mapping[str, str], where: str, peaks: Mapping[str, float] = PEAK_TFLOPS
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
            [lowest, corner, highest], [lowest * bytes_per_us / 1e6, tflops, tflops], color=SOFT, linewidth=1, zorder=1
        )
        axes.annotate(
            f"{dtype} {tflops:,.0f}",
            (highest, tflops),
            ha="left",
            va="center",
            xytext=(5, 0),
            textcoords="offset points",
            color=SOFT,
            annotation_clip=False,
        )
    for colour, (family, members) in zip(SERIES, bench_summary.by_family(timed).items()):
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
    )
    _set_title(
        figure,
        f"Stoneware's kernels compared with the data sheet's rates (memory {bytes_per_us / 1e6:g} TB/s)\n{where}",
    )
    axes.grid(which="major", color=GRID)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    return figure


def host_bars(
    host_us: Mapping[str, Mapping[str, Mapping[str, Any]]], families: Mapping[str, str], where: str
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
        color=[SERIES[0] if call == OURS else GREY for _, call, _ in bars],
        height=0.7,
        error_kw={"elinewidth": 1, "ecolor": SOFT},
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
    axes.set_xlabel("µs; the host does not wait for the GPU")
    _set_title(figure, f"Host time per call: Stoneware (blue) compared with torch (grey)\n{where}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def tokens_per_second(report: Mapping[str, Any]) -> pyplot.Figure:
    """Bars of the tokens per second of a whole model, torch's bf16 and Stoneware's fp8, for each size of a pass.

    Args:
      report: layers.json with the part `inference`.
    """
    part = report["parts"]["inference"]
    rows = part["rows"]
    figure, axes = pyplot.subplots(figsize=(_WIDTH_PX * _PX, (110 + 62 * len(rows)) * _PX), layout="constrained")
    for y, row in enumerate(rows):
        rates = {name: row["tokens"] / row["step"][f"{name}, graph"]["median_ms"] * 1e3 for name in (TORCH, FP8)}
        for offset, name, colour in ((-0.2, TORCH, GREY), (0.2, FP8, SERIES[0])):
            faster = rates[name] / rates[TORCH]
            axes.barh(y + offset, faster, height=0.36, color=colour)
            text = f"{rates[name]:,.0f} tokens/s" + (f", {faster:.2f} times as many" if name == FP8 else "")
            axes.annotate(text, (faster, y + offset), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [f"{row['tokens']:,}" for row in rows])
    axes.set_ylabel("tokens of a pass")
    axes.invert_yaxis()
    axes.set_xlim(0, 2.9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    _set_title(
        figure,
        f"Llama 3 8B, tokens per second: Stoneware's fp8 (blue) compared with torch's bf16 (grey)\n"
        f"{setup(report['machine'])}; {part['num_layers']} blocks, random weights, one pass in a CUDA graph",
    )
    return figure


def times_over_m(report: Mapping[str, Any]) -> pyplot.Figure | None:
    """The time of a matmul at every m, a row of panels for each set and a panel for each weight; None without any.

    Args:
      report: sweep.json.
    """
    rows = [row for row in report["rows"] if "device_us" in row]
    if not rows:
        return None
    sets, weights = (list(dict.fromkeys(key)) for key in zip(*((row["set"], (row["n"], row["k"])) for row in rows)))
    figure, panels = pyplot.subplots(
        len(sets),
        len(weights),
        figsize=(_WIDTH_PX * _PX, (120 + 190 * len(sets)) * _PX),
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    lines = {}
    for row in rows:
        n, k = row["n"], row["k"]
        axes = panels[sets.index(row["set"])][weights.index((n, k))]
        axes.set_title(f"{row['set']}, {n} × {k}", fontsize=8)
        for name, times in row["device_us"].items():
            (lines[name],) = axes.plot(row["m"], times["median_us"], color=_LINES[name], linewidth=1.2, label=name)
        axes.set_ylim(bottom=0)
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("m")
    for axes in panels[:, 0]:
        axes.set_ylabel("µs")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
    _set_title(figure, f"Time of a matmul at every m: Stoneware compared with torch\n{setup(report['machine'])}")
    return figure


def _set_title(figure: pyplot.Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, horizontalalignment="left", fontsize=11)


def save(figure: pyplot.Figure, path: pathlib.Path) -> None:
    """Writes a figure as SVG with colours for light and dark mode, and closes it."""
    text = io.StringIO()
    # No date and no version: equal input must give equal bytes.
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    path.write_text(figure_colours.with_dark_mode(text.getvalue()), encoding="utf-8")


def write_layers(report: Mapping[str, Any], out_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes the picture of a layers.json into a folder; gives the files."""
    path = out_dir / "layers_tokens_per_second.svg"
    with matplotlib.rc_context(_STYLE):
        save(tokens_per_second(report), path)
    return [path]


def write_sweep(report: Mapping[str, Any], out_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes the picture of a sweep.json into a folder; gives the files: none without a figure."""
    path = out_dir / "sweep.svg"
    with matplotlib.rc_context(_STYLE):
        figure = times_over_m(report)
        if figure is None:
            return []
        save(figure, path)
    return [path]


def write(report: Mapping[str, Any], out_dir: pathlib.Path) -> list[pathlib.Path]:
    """Writes the page and its pictures into a folder; gives the files."""
    families = report["families"]
    rows = report["rows"]
    where = setup(report["machine"])
    plots: dict[str, str] = {}
    written = []
    with matplotlib.rc_context(_STYLE):
        figures = {
            f"Speed of {families[family]} against torch": (
                f"bench_speedup_{family}.svg",
                speedup_map(members, families[family], where),
            )
            for family, members in bench_summary.by_family(rows).items()
        }
        figures["Roofline"] = ("bench_roofline.svg", roofline(rows, families, where))
        figures["Host time"] = ("bench_host_time.svg", host_bars(report["host_us"], families, where))
        for title, (file_name, figure) in figures.items():
            if figure is None:
                continue
            save(figure, out_dir / file_name)
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
    if not (_BENCH.value or _LAYERS.value or _SWEEP.value):
        raise app.UsageError(
            "--bench, --layers or --sweep must name a JSON file, and all are missing; pass one of them"
        )
    # `bazel run` starts in a folder of its own; paths mean those of the shell.
    start = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    for flag, schema, write_files in ((_BENCH, 3, write), (_LAYERS, 2, write_layers), (_SWEEP, 1, write_sweep)):
        if not flag.value:
            continue
        try:
            report = json.loads((start / flag.value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise app.UsageError(f"--{flag.name}={flag.value} must be {flag.name}.json: {error}") from None
        if report.get("schema") != schema:
            raise app.UsageError(
                f"--{flag.name}={flag.value} must be of schema {schema}, it is of {report.get('schema')}; run the "
                "benchmark again"
            )
        out_dir = start / _OUT.value if _OUT.value else (start / flag.value).parent
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in write_files(report, out_dir):
            print(path)


if __name__ == "__main__":
    matplotlib.use("svg")
    app.run(main)
