"""How results are written: JSON, tables in Markdown, errors in a line. Standard library only, like runner.py."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DETAIL = 400
"""Characters of an error that are kept; torch lists all its backends."""


def to_json(value: Any, indent: int = 0) -> str:
    """JSON text in which each entry of an object has a line, and each item of a list of objects, which diffs need."""
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(str(name))}: {to_json(item, indent + 1)}" for name, item in value.items()]
        ends = "{}"
    elif isinstance(value, list) and any(isinstance(item, (dict, str)) for item in value):
        items, ends = [json.dumps(item) for item in value], "[]"
    else:
        return json.dumps(value)
    line = "\n" + " " * indent
    return ends[0] + ",".join(f"{line} {item}" for item in items) + line + ends[1]


def write(path: pathlib.Path, text: str) -> None:
    """Replaces the file as a whole: a process that is killed leaves the old one or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


_FACTS = {
    "driver": "driver",
    "torch": "torch",
    "cuda_of_torch": "CUDA",
    "triton": "Triton",
    "transformers": "transformers",
    "python": "Python",
    "stoneware": "stoneware",
    "power_limit_w": "power limit in W",
    "memory_clock_mhz": "memory clock in MHz",
    "sm_clock_mhz": "SM clock in MHz",
}
"""What a page shows of `machine.describe`."""


def heading(title: str, report: Mapping[str, Any]) -> list[str]:
    """How a page begins: what was measured where, when and how.

    Args:
      report: with the head of `experiment.Experiment`.
    """
    facts, after = report["machine"], report["machine_after"]
    shown = ", ".join(f"{label} {facts[name]}" for name, label in _FACTS.items() if name in facts)
    return [
        f"# {title} on {facts['gpu']}",
        "",
        f"{report['date']}, {report['seconds']:.0f} s; {shown}, SM clock after it {after['sm_clock_mhz']}; commit "
        f"{report['commit']}, wheel sha256 {report['wheel_sha256']}.",
        "",
        f"Command: `{report['command']}`",
        "",
    ]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def timing(figures: Mapping[str, Any] | None, unit: str, digits: int) -> str:
    """Median and spread of what `experiment.figures` gives; "-" without a figure."""
    if not figures or f"median_{unit}" not in figures:
        return "-"
    return f"{figures[f'median_{unit}']:.{digits}f} ± {figures[f'spread_{unit}']:.{digits}f}"


def text_of(error: BaseException) -> str:
    """Type and message of an error, in one line; of a long one the start and the end, which has a traceback's error."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    half = _MAX_DETAIL // 2
    return text if len(text) <= _MAX_DETAIL else f"{text[:half]} ... {text[-half:]}"
