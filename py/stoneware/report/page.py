"""The report as one HTML page that needs no network: a verdict, then a table for each op.

A reader chooses a model, and a script shows the page for it: it hides the rows and points of other shapes, and fills
each place with its text for the model, which the page holds as a template. Without scripts the page shows everything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from stoneware import __version__
from stoneware.explanation import kernel_in_words
from stoneware.kernels.key import AnyKey
from stoneware.report import figures, measures, style, verdict
from stoneware.report.measures import MeasuredProblem
from stoneware.report.sources import DeviceMeasurements
from stoneware.report.verdict import Section
from stoneware.runtime.canonical import printable_lines
from stoneware.specs import OPS, spec_of
from stoneware.tuning.table_entry import Choice

MOST_BAD = 100
"""Most rows in the table of samples that are not "ok"."""


def page(devices: Sequence[DeviceMeasurements], *, title: str) -> str:
    """The page as HTML; except for newlines, every character is printable.

    Args:
      devices: at least one.
      title: of the page.
    """
    parts = [(device, f"d{idx}", verdict.sections(device.problems)) for idx, device in enumerate(devices)]
    names = {name for device in devices for problem in device.problems for name in figures.models(problem.key)}
    options = "".join(f"<option>{escape(name)}</option>" for name in sorted(names))
    text = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style.STYLE}</style></head><body>",
            "<header><nav>",
            *itertools.chain.from_iterable(_links(*part) for part in parts),
            f'</nav><form><label>Model <select id="model"><option value="">all</option>{options}</select></label>',
            '<label>Shape <input id="shape" placeholder="4096 × 14336 or down"></label>',
            '<span id="count" class="soft"></span></form></header><main>',
            f"<h1>{escape(title)}</h1>",
            *itertools.chain.from_iterable(_device_html(*part) for part in parts),
            *itertools.chain.from_iterable(_model_templates(*part, sorted(names)) for part in parts),
            f'<p class="soft">Made by stoneware {__version__}.</p>',
            f"</main><script>{style.SCRIPT}</script></body></html>",
            "",
        ]
    )
    # Names of kernels, paths and messages come from other people; terminals and browsers obey control characters.
    return printable_lines(text)


def _links(device: DeviceMeasurements, anchor: str, sections: Sequence[Section]) -> list[str]:
    links = [(anchor, f"Verdict: {device.fingerprint.name}")]
    links += [(f"{anchor}-{idx}", section.title) for idx, section in enumerate(sections) if section.is_common]
    links += [(f"{anchor}-other", "Other")] if not all(section.is_common for section in sections) else []
    links += [(f"{anchor}-runs", "Runs")]
    return [f'<a href="#{target}">{escape(text)}</a>' for target, text in links]


def _device_html(device: DeviceMeasurements, anchor: str, sections: Sequence[Section]) -> list[str]:
    points = measures.roofline(device.problems)
    highest = max((measures.roofs(device.fingerprint, [point]).tflops for point in points), default=0.0)
    axes = figures.axes(points, highest) if points else None
    parts = [_section_html(device, section, f"{anchor}-{idx}", axes) for idx, section in enumerate(sections)]
    common = [text for section, text in zip(sections, parts) if section.is_common]
    other = [text for section, text in zip(sections, parts) if not section.is_common]
    if other:
        start = f'<details id="{anchor}-other"{"" if common else " open"}>'
        other = [start, "<summary><h2>Other layouts and dtypes</h2></summary>", *other, "</details>"]
    return [*_verdict_html(device, anchor, sections), *common, *other, *_runs_html(device, anchor)]


def _place(name: str, content: str) -> str:
    """Text that depends on the chosen model; `_template` has the others."""
    return f'<div data-place="{name}">{content}</div>'


def _template(name: str, model: str, content: str) -> str:
    return f'<template data-place="{name}" data-model="{escape(model)}">{content}</template>'


def _model_templates(
    device: DeviceMeasurements, anchor: str, sections: Sequence[Section], names: Sequence[str]
) -> Iterator[str]:
    """The text of each place of a device, for each model."""
    places = {section.title: f"{anchor}-{idx}" for idx, section in enumerate(sections)}
    for name in names:
        own = verdict.sections(problem for problem in device.problems if name in figures.models(problem.key))
        yield _template(anchor, name, _verdict_table(own, places) if own else "<p>No shape of it was measured.</p>")
        for section in own:
            yield _template(places[section.title], name, _summary(section))


def _verdict_html(device: DeviceMeasurements, anchor: str, sections: Sequence[Section]) -> list[str]:
    places = {section.title: f"{anchor}-{idx}" for idx, section in enumerate(sections)}
    parts = [
        f'<h2 id="{anchor}">{escape(device.fingerprint.name)}: the verdict<span class="of-model"></span></h2>',
        f'<p class="soft">{escape(_setup(device))}</p>',
        _place(anchor, _verdict_table(sections, places)),
    ]
    if any(section.same_scales for section in sections):
        parts += [
            _legend(),
            "<p>A cell is torch's time divided by the time of the kernel that Stoneware chooses, the geometric mean "
            "over the problems of the band: above 1 Stoneware is faster. All are shapes that were measured. There "
            "Stoneware chooses the fastest kernel, torch's own included, and its own if it is as fast. "
            "&ldquo;Any scales&rdquo; compares with torch's fastest kernel for the same sizes and dtypes, which "
            "may need coarser scales than the op has; it counts problems at which torch was measured with tensor "
            "scales too.</p>",
        ]
    return parts


def _setup(device: DeviceMeasurements) -> str:
    """The GPU and the versions of torch of all runs."""
    versions = sorted({str(run["torch"]) for run in device.runs_in_use})
    return f"{device.fingerprint.name}, torch {' and '.join(versions)}"


def _verdict_table(sections: Sequence[Section], places: Mapping[str, str]) -> str:
    """The verdict in words, and a row for each section; `places` has the anchor of each title."""
    bands = [*verdict.band_labels(verdict.COARSE_BANDS), "all"]
    rows = []
    for section in sections:
        lines = [("torch, same scales" if section.any_scales else "torch", section.same_scales)]
        lines += [("torch's fastest, any scales", section.any_scales)] if section.any_scales else []
        for line, (against, speedups) in enumerate(lines):
            if not speedups:
                continue
            name = f'<a href="#{places[section.title]}">{escape(section.title)}</a>' if line == 0 else ""
            share = f"{section.share_ours:.0%}" if line == 0 else "&nbsp;"
            cells = "".join(_speedup_cell(mean, "") for mean in verdict.means(speedups).values())
            rows.append(
                f"<tr><th>{name}<small>vs. {against}, {len(speedups)} problems</small></th>{cells}<td>{share}</td></tr>"
            )
    if not rows:
        return _sentence(sections)
    heads = "".join(f'<th class="n">{band}</th>' for band in bands)
    return (
        f'{_sentence(sections)}<div class="scroll heat"><table><thead><tr><th>m<small>of grouped_mm: mean rows per '
        f'group</small></th>{heads}<th class="n">ours chosen</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div>"
    )


def _sentence(sections: Sequence[Section]) -> str:
    """The verdict in words, over the problems of common calls or, without any, over all."""
    common = [section for section in sections if section.is_common] or sections
    same = [value for section in common for value in section.same_scales.values()]
    if not same:
        return "<p>Torch's kernels were not measured, so no speed-up is shown.</p>"
    problems = sum(len(section.problems) for section in common)
    ours = sum(section.share_ours * len(section.problems) for section in common) / problems
    pairs = [
        (section.same_scales[key], value)
        for section in common
        for key, value in section.any_scales.items()
        if key in section.same_scales
    ]
    mean = f"{measures.geometric_mean(same):.2f}"
    text = f"{mean} times as fast as torch's kernel with the same scales ({len(same)} problems)"
    if pairs:
        there, fastest = (measures.geometric_mean(values) for values in zip(*pairs))
        text += (
            f". At the {len(pairs)} of them where torch was also measured with tensor scales: {there:.2f} times with "
            f"the same scales, {fastest:.2f} times with torch's fastest of any scales"
        )
    return (
        f"<p><strong>{text}.</strong> A kernel of Stoneware is chosen at {ours:.0%} of {problems} problems, "
        "torch's own at the others.</p>"
    )


def _section_html(device: DeviceMeasurements, section: Section, anchor: str, axes: figures.Axes | None) -> str:
    parts = [
        f'<section class="op"><h2 id="{anchor}">{escape(section.title)}<span class="of-model"></span></h2>',
        _place(anchor, _summary(section)),
    ]
    if section.same_scales:
        parts.append(_heat_table(section))
    points = measures.roofline(section.problems)
    if axes and points:
        roofs = measures.roofs(device.fingerprint, points)
        names = zip(verdict.band_labels(verdict.COARSE_BANDS), range(4))
        legend = "".join(f'<span style="color:var(--m{idx})">● m {name}</span>' for name, idx in names)
        parts += [
            f"<h3>Roofline of {escape(section.title)}: {escape(_setup(device))}</h3>",
            f"<div class=\"legend\">{legend}<span>filled: Stoneware's kernel, hollow: torch's</span></div>",
            f'<div class="scroll">{figures.roofline(points, roofs, axes)}</div>',
            f"<p>The roof is {roofs.tflops:,.0f} TFLOP/s and {roofs.gbytes_per_s:,.0f} GB/s ({escape(roofs.source)}). "
            "A circled problem is above it: operands that stay in the L2 cache are not read from memory, the matrices "
            "of empty groups are not read at all, and the clock may have been above that of the stated rate.</p>",
        ]
    parts.append(_problems_html(section, is_open=not section.same_scales))
    return "\n".join([*parts, "</section>"])


def _summary(section: Section) -> str:
    values = list(section.same_scales.values())
    if not values:
        return f"<p>{len(section.problems)} problems. Torch's kernel was not measured.</p>"
    return (
        f"<p>{measures.geometric_mean(values):.2f} times as fast as torch with the same scales over {len(values)} "
        f"problems, from {min(values):.2f} to {max(values):.2f}: more than 2% faster at "
        f"{sum(value > 1.02 for value in values)}, more than 2% slower at {sum(value < 0.98 for value in values)}. "
        f"Kernels of Stoneware are chosen at {section.share_ours:.0%}.</p>"
    )


def _heat_table(section: Section) -> str:
    """Speed-ups by NK shape and band of m: shapes of models in a table, others in one that is folded."""
    labels = verdict.band_labels(verdict.BANDS)
    rows: dict[tuple[int, ...], list[MeasuredProblem]] = {}
    for problem in section.problems:
        rows.setdefault(figures.row_sizes(problem.key), []).append(problem)
    named = [members for members in rows.values() if figures.layers(members[0].key)]
    others = [members for members in rows.values() if not figures.layers(members[0].key)]
    named.sort(key=lambda members: figures.layers(members[0].key))
    op = section.problems[0].key.op
    column = spec_of(op).m_title if op in OPS else "m"
    sizes = "groups × n × k" if any(len(shared) > 2 for shared in rows) else "n × k"
    heads = "".join(f'<th class="n">{label}</th>' for label in labels)
    heads = f"<th>{sizes}<small>{escape(column)} →</small></th>{heads}"

    def table(group: Sequence[Sequence[MeasuredProblem]]) -> str:
        body = "\n".join(map(_heat_row, group))
        return f'<div class="scroll heat"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'

    parts = [table(named)] if named else []
    if others:
        start = f'<details class="unnamed"{"" if named else " open"}>'
        count = f"{len(others)} shapes that belong to no model of the list"
        parts.append(f"{start}<summary>{count}</summary>{table(others)}</details>")
    return "\n".join(parts)


def _heat_row(members: Sequence[MeasuredProblem]) -> str:
    key = members[0].key
    bands: dict[int, list[MeasuredProblem]] = {}
    for problem in members:
        bands.setdefault(verdict.band(problem.key, verdict.BANDS), []).append(problem)
    cells = []
    for idx in range(len(verdict.BANDS) + 1):
        speedups = [problem.speedup for problem in bands.get(idx, ()) if problem.speedup is not None]
        hovers = (_hover(problem, problem.vendor) for problem in bands.get(idx, ()) if problem.vendor)
        cells.append(_speedup_cell(measures.geometric_mean(speedups), "\n".join(hovers)))
    layers = escape(", ".join(figures.layers(key))).replace("_", "_<wbr>")
    names = f"<small>{layers}</small>" if layers else ""
    return f'<tr data-find="{escape(_find(key))}"><th>{figures.row_label(key)}{names}{"".join(cells)}'


def _hover(problem: MeasuredProblem, vendor: Choice) -> str:
    chosen = problem.chosen
    return (
        f"m={problem.key.sizes[-1]}: {problem.speedup:.2f}, {kernel_in_words(chosen.config)}, "
        f"{chosen.median_us:.1f} µs, torch {vendor.median_us:.1f} µs"
    )


def _problems_html(section: Section, is_open: bool) -> str:
    heads = ["problem", "speed-up", "chosen kernel", "µs", "± µs", "torch µs"]
    heads += ["torch's fastest µs"] if section.any_scales else []
    rows = [
        [
            problem.key.shape,
            "" if problem.speedup is None else f"{problem.speedup:.2f}",
            kernel_in_words(problem.chosen.config),
            f"{problem.chosen.median_us:.2f}",
            f"{problem.chosen.spread_us:.2f}",
            f"{problem.vendor.median_us:.2f}" if problem.vendor else "",
            *(
                [f"{section.any_scales[problem.key] * problem.chosen.median_us:.2f}"]
                if problem.key in section.any_scales
                else []
            ),
        ]
        for problem in section.problems
    ]
    return (
        f'<details{" open" if is_open else ""}><summary><span class="count">{len(rows)}</span> problems: times and '
        "kernels</summary>"
        "<p>Times are medians; ± is the interquartile range.</p>"
        f"{_table(heads, rows, [_find(problem.key) for problem in section.problems])}</details>"
    )


def _runs_html(device: DeviceMeasurements, anchor: str) -> list[str]:
    statuses = ", ".join(f"{count} {status}" for status, count in device.statuses.items())
    fields = ("id", "date", "driver", "cuda", "torch", "triton", "commit", "clocks", "num_samples")
    runs = [[str(run.get(field, "-")) for field in fields] for run in device.runs_in_use]
    bad = [
        [item.status, item.key.op, item.key.shape, kernel_in_words(item.config), item.run, item.detail or "-"]
        for _, item in device.samples
        if item.status != "ok"
    ]
    none = "Not known: tables keep only correct samples." if not device.samples else "None."
    heads = ["status", "op", "problem", "candidate", "run", "what happened"]
    more = f"<p>And {len(bad) - MOST_BAD} more.</p>" if len(bad) > MOST_BAD else ""
    facts = [
        ["device", str(device.fingerprint)],
        ["also known as", ", ".join(device.aliases) or "-"],
        ["samples", f"{sum(device.statuses.values())} ({statuses}) of {len(device.problems)} problems"],
        ["read from", ", ".join(device.origins)],
        *([f"table of {op}", digest] for op, digest in device.digests.items()),
    ]
    run_heads = ["run", "date", "driver", "CUDA", "torch", "Triton", "commit", "SM clock, MHz", "samples"]
    return [
        f'<h2 id="{anchor}-runs">{escape(device.fingerprint.name)}: what was measured</h2>',
        _table([], facts),
        f"<details><summary>{len(runs)} runs</summary>{_table(run_heads, runs)}</details>",
        f"<details><summary>Samples that were wrong, failed or hung: {len(bad)}</summary>",
        (_table(heads, bad[:MOST_BAD]) if bad else f"<p>{none}</p>") + more,
        "</details>",
    ]


def _speedup_cell(speedup: float | None, hover: str) -> str:
    # HTML ends a cell, and the style sheet adds a dash to an empty one: it keeps the page small.
    if speedup is None:
        return "<td>"
    hint = f' title="{escape(hover)}"' if hover else ""
    return f'<td class="s{style.step(speedup)}"{hint}>{speedup:.2f}x'


def _legend() -> str:
    starts = [f"below {style.EDGES[0]:g}", *(f"{edge:g}" for edge in style.EDGES)]
    steps = "".join(f'<span class="s{idx}">{text}</span>' for idx, text in enumerate(starts))
    return f'<div class="legend">{steps}<span>orange: torch is faster</span></div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], finds: Iterable[str] = ()) -> str:
    """An HTML table; `finds` has the text that the filter searches, for each row. A page has tens of thousands, so the
    filter takes n and k from the first cell where they are all of the text."""
    lines = ["<thead><tr>", *(f"<th>{escape(head)}</th>" for head in heads), "</tr></thead><tbody>"]
    for row, find in itertools.zip_longest(rows, finds):
        is_in_cell = find and find == "x".join(re.findall(r"[nk]=(\d+)", row[0]))
        mark = " data-find" if is_in_cell else f' data-find="{escape(find)}"' if find else ""
        # End tags are optional, and a page has tens of thousands of cells.
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}" for cell in row))
    return "\n".join(['<div class="scroll"><table class="plain">', *lines, "</tbody></table></div>"])


def _find(key: AnyKey) -> str:
    """The text that the page's filter searches: models, layers and sizes."""
    layers = figures.layers(key)
    sizes = "x".join(map(str, key.sizes[:-1]))
    return " ".join([*figures.models(key), *layers, sizes])
