"""What layers.json says, as tables in Markdown. Pure functions of layers.json.

python -m tools.gpu_check.layers_summary layers.json    # the tables alone, for docs/layers.md
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tools.gpu_check.document import heading, table, timing
from tools.gpu_check.layers_sizes import MODES, OURS, TORCH

Row = Mapping[str, Any]


def to_markdown(report: Mapping[str, Any]) -> str:
    """The report as a page: machine and command, a table for each part, what was wrong."""
    lines = [
        *heading("Layers next to torch's", report),
        "Medians of blocks of several steps between two events ± their interquartile range, in ms; ours and "
        "torch's interleaved in random order in one run. In brackets: torch's bf16 time over this one, so "
        "above 1 is faster than torch's bf16. Values were checked first; what is wrong has no figure.",
    ]
    for name, part in report.get("parts", {}).items():
        if "machine_after" not in part:
            continue  # it was not begun, or it was killed
        clocks = [part[when]["sm_clock_mhz"] for when in ("machine", "machine_after")]
        dated = f"{part['date']}, {part['seconds']} s, SM clock {clocks[0]} MHz before and {clocks[1]} MHz after."
        lines += ["", f"## {name}", "", dated]
        lines += ["", *TABLES[name](part)] if timed_rows(part) else []
    problems = [f"- PROBLEM: {problem}" for problem in report["problems"]]
    return "\n".join([*lines, *([""] if problems else []), *problems]) + "\n"


def figures(report: Mapping[str, Any]) -> str:
    """The tables alone, for docs/layers.md."""
    tables = {name: TABLES[name](part) for name, part in report["parts"].items() if timed_rows(part)}
    return "\n\n".join("\n".join([f"**{name}**", "", *lines]) for name, lines in tables.items()) + "\n"


def timed_rows(part: Row) -> list[Row]:
    """The rows that have figures."""
    return [row for row in part.get("rows", ()) if "step" in row]


def linear_sums(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each number of tokens: the sum of the layers' medians by contender, without those that lack one."""
    found = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        members = [row for row in rows if row["tokens"] == tokens]
        names = [
            name for name in members[0]["checks"] if all("median_ms" in row["step"].get(name, {}) for row in members)
        ]
        sums = {name: sum(row["step"][name]["median_ms"] for row in members) for name in names}
        found.append({"tokens": tokens, "sum_ms": sums})
    return found


def _linear(part: Row) -> list[str]:
    rows = timed_rows(part)
    contenders = list(rows[0]["checks"])
    sums = {item["tokens"]: item["sum_ms"] for item in linear_sums(rows)}
    lines = []
    for tokens, of_tokens in sums.items():
        members = [row for row in rows if row["tokens"] == tokens]
        if lines:
            lines.append("")
        found = []
        for name in contenders:
            errors = [error for row in members for error in (row["checks"][name]["errors"] or {}).values() if error]
            figures = [_timing(row["step"], name, TORCH) for row in members]
            found.append([name, *figures, _ratio(of_tokens, name), f"{max(errors):.1e}" if errors else "-"])
        header = ["", *(f"{row['layer']} {row['in']}→{row['out']}" for row in members), "sum", "worst error"]
        lines += [f"Forward and backward at {tokens} tokens:", "", *table(header, found)]
    return lines


def _inference(part: Row) -> list[str]:
    rows = timed_rows(part)
    names = list(rows[0]["checks"])
    lines = table(
        ["", "", *(f"{row['tokens']} tokens" for row in rows)],
        [
            [name, mode, *(_timing(row["step"], f"{name}, {mode}", f"{TORCH}, {mode}") for row in rows)]
            for mode in MODES
            for name in names
        ],
    )
    held = ", ".join(f"{num_bytes / 1e9:.3f} GB in {name}" for name, num_bytes in part["weight_bytes"].items())
    head = f"A forward pass of {part['num_layers']} blocks:"
    return [head, "", *lines, "", f"The linears of the blocks hold {held}."]


def _models(part: Row) -> list[str]:
    rows = timed_rows(part)
    tokens = dict.fromkeys(row["tokens"] for row in rows)
    found = []
    for kind in dict.fromkeys(row["model"] for row in rows):
        members = [row for row in rows if row["model"] == kind]
        found += [
            [kind, name, *(_timing(row["step"], name, TORCH) for row in members)] for name in members[0]["checks"]
        ]
    head = f"A forward pass of {part['num_layers']} blocks, each compiled, in a CUDA graph:"
    return [head, "", *table(["", "", *(f"{num_tokens} tokens" for num_tokens in tokens)], found)]


def _train(part: Row) -> list[str]:
    [row] = timed_rows(part)
    head = (
        f"{part.get('parameters', 0) / 1e6:.1f} M parameters, {row['tokens']} tokens a step of "
        f"{part.get('num_bytes', 0) / 1e6:.1f} MB of {part.get('text', 'text')} (sha256 {part.get('sha256', '-')})."
    )
    found = []
    for name, losses in part["losses"].items():
        off = losses.get("against_bf16")
        note = ""
        if "first_difference" in losses:
            at = losses["first_difference"]
            note = "the losses of the first" if at is None else f"other losses from step {at} on"
        resumed = f"went on at step {losses['first_step']}" if losses["first_step"] else ""
        found.append(
            [
                TORCH if name == "torch" else name,
                _timing(row["step"], name, "torch"),
                losses["steps"],
                f"{losses['last_mean']:.4f}",
                "-" if off is None else f"{off:+.2%}",
                "; ".join(filter(None, (resumed, note))) or "-",
            ]
        )
    mean = f"loss, mean of the last {part['mean_steps']}"
    return [head, "", *table(["run", "ms a step", "steps", mean, "against bf16", "note"], found)]


def _lora(part: Row) -> list[str]:
    [row] = timed_rows(part)
    weights, peaks = row["weight_bytes"], row["peak_bytes"]
    head = (
        f"A step of {part['num_layers']} blocks at {row['tokens']} tokens, rank {part['rank']}; gradients differ by "
        f"{row['checks'][OURS]['errors']['gradients']:.2g} from bf16's (limit {part['limits']['gradients']})."
    )
    found = [
        [
            name,
            _timing(row["step"], name, TORCH),
            f"{num_bytes / 1e9:.3f} ({num_bytes / weights[TORCH]:.3f} of bf16's)",
            f"{peaks[name] / 1e9:.3f}" if name in peaks else "-",
        ]
        for name, num_bytes in weights.items()
    ]
    header = ["frozen weights", "ms a step", "GB of weights", "GB at most in addition in a step"]
    return [head, "", *table(header, found)]


def _host(part: Row) -> list[str]:
    head = "Time on the host until a call is queued, all sizes 512, in µs; layers forward and backward:"
    found = []
    for row in timed_rows(part):
        step = {
            name: {key: 1e3 * value for key, value in one.items() if key.endswith("_ms")}
            for name, one in row["step"].items()
        }
        found += [[row["call"], name, _timing(step, name, TORCH, digits=1)] for name in step]
    return [head, "", *table(["call", "", "µs"], found)]


def _steps(part: Row) -> list[str]:
    rows = timed_rows(part)
    names = [f"{row['model']}, {row['batch']} x {row['length']} tokens" for row in rows]
    contenders = dict.fromkeys(name for row in rows for name in row["step"])
    found = [[name, *(_timing(row["step"], name, TORCH) for row in rows)] for name in contenders]
    return ["A step of forward, backward and AdamW, in ms, eager:", "", *table(["", *names], found)]


TABLES = {
    "linear": _linear,
    "inference": _inference,
    "models": _models,
    "train": _train,
    "lora": _lora,
    "host": _host,
    "steps": _steps,
}


def _timing(step: Mapping[str, Row], name: str, reference: str, digits: int = 3) -> str:
    one = step.get(name, {})
    text = timing(one, "ms", digits)
    against = step.get(reference, {}).get("median_ms")
    return text if against is None or name == reference or text == "-" else f"{text} ({against / one['median_ms']:.2f})"


def _ratio(sums_ms: Mapping[str, float], name: str) -> str:
    if name not in sums_ms:
        return "-"
    ratio = f" ({sums_ms[TORCH] / sums_ms[name]:.2f})" if TORCH in sums_ms else ""
    return f"{sums_ms[name]:.2f}{ratio}"


if __name__ == "__main__":
    print(figures(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
