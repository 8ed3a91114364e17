"""How good the table is where it was not measured, and how much of it is noise; needs no GPU.

    table_quality --print_held_out                                       shapes for `stoneware tune`
    table_quality --samples DIR --held_out DIR --again DIR --json_out F  the figures
    table_quality --samples DIR --leave_out                              the same without other samples

- held out: at shapes of other models, with m, n and k that no sample of the table has, what the
  look-up answers from --samples, and the time of that config as measured at the shape (--held_out)
  over the best one's: the regret; the vendor library's time over it; and how many of the estimates'
  90 % intervals hold. By op, dtype, scales and layout, and by grade and bucket of m
  (gpu_check/held_out_figures.py);
- left out: the same of --samples alone, at NK shapes that are taken away;
- again: a second tune of the same shapes (--again): at how many of them the table would choose
  another config, by the rule of tuning/choose.py, and by taking the plain fastest.

Each DIR is a folder of samples of one device, or a folder of one such.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import Key
from stoneware.runtime.device import DeviceFingerprint
from stoneware.specs import OPS
from stoneware.tuning import lookup, merge
from stoneware.tuning.entries import table_of_samples
from stoneware.tuning.lookup import Decision
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Table
from stoneware.tuning.table_entry import Entry
from tools.gpu_check import held_out_figures, held_out_problems
from tools.gpu_check.held_out_figures import Row

_PRINT_HELD_OUT = flags.DEFINE_bool("print_held_out", False, "Print the shapes as MxNxK, and end.")
_SAMPLES = flags.DEFINE_string("samples", None, "Samples that the table is baked from.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Samples at the shapes that are held out.")
_LEAVE_OUT = flags.DEFINE_bool("leave_out", False, "Ask --samples for NK shapes that are taken away.")
_AGAIN = flags.DEFINE_string("again", None, "Samples of a second tune of the shapes of --samples.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the figures to, besides.")

_HELD_OUT_SEED, _NUM_HELD_OUT = 7, 168
"""Seed and number of the shapes that --print_held_out prints."""


def read(path: str) -> tuple[DeviceRecord, list[tuple[Run, Sample]]]:
    """The device of a folder and its samples, each with its run.

    Raises:
      TableError: the folder has bad entries, or is not of one device.
    """
    source = merge.read_source(Path(path))
    if source.problems or len(source.devices) != 1:
        raise TableError(
            f"{path}: must hold good samples of one device, and has {len(source.devices)} devices "
            f"and these problems: {'; '.join(source.problems) or 'none'}"
        )
    return source.devices[0]


def entries(table: Table) -> dict[Key, Entry]:
    """The entries by key."""
    return {entry.key: entry for device in table.devices for entry in device.entries() if isinstance(entry.key, Key)}


def fastest(entry: Entry) -> AnyConfig:
    return min(entry.choices, key=lambda choice: choice.median_us).config


def again_figures(table: Table, second: Table) -> dict[str, Any]:
    """At how many shapes two tunes choose differently, and what the first one's choice costs as the
    second measured it."""
    a, b = entries(table), entries(second)
    common = sorted(set(a) & set(b))
    lost = []
    for key in common:
        times = {choice.config: choice.median_us for choice in b[key].choices}
        if a[key].choices[0].config in times:
            regret = times[a[key].choices[0].config] / min(times.values())
            lost.append({"problem": key.shape, "regret": round(regret, 4)})
    return {
        "num_shapes": len(common),
        "differing": sum(a[key].choices[0].config != b[key].choices[0].config for key in common),
        "differing_by_plain_fastest": sum(fastest(a[key]) != fastest(b[key]) for key in common),
        "first_choice_in_second_tune": held_out_figures.distribution(lost, "regret", is_high_bad=True),
    }


def row_of(key: Key, entry: Entry, table: Table, device: DeviceFingerprint) -> Row | None:
    """The row of a problem, by the table's first answer with a candidate that was timed there.

    None if the table has the problem, which is not held out then, or nothing was timed. Measurements of
    kernels that have other bytes now do not count.
    """
    times = {choice.config: choice for choice in entry.choices if not choice.is_stale}
    for found in lookup.answers(key, device, [Source("wheel", table)]):
        if found.step == "exact":
            return None
        estimates = [choice for choice in found.entry.choices if choice.config in times]
        if not estimates:
            continue
        chosen = estimates[0]
        decision = Decision(
            config=chosen.config, step=found.step, grade=found.grade_of(chosen), reason="", chosen=chosen
        )
        family = " ".join([key.op, key.a_dtype, key.scales, key.layout, *_groups_of(key)])
        covered = [
            choice.interval_us[0] <= times[choice.config].median_us <= choice.interval_us[1]
            for choice in estimates
            if choice.interval_us is not None
        ]
        return {
            **held_out_figures.row_of(family, key.shape, key.m, decision, times),
            "answered_by": found.measured.shape,
            "is_first": chosen == found.choice,
            # Of all candidates, not of the chosen one alone.
            "num_intervals": len(covered),
            "num_covered": sum(covered),
        }
    return None


def _groups_of(key: Key) -> list[str]:
    return ["grouped"] if key.op == "grouped_mm" else ["batch"] if key.is_batch else []


def rows_of(table: Table, device: DeviceFingerprint, held_out: Mapping[Key, Entry]) -> list[Row]:
    rows = [row_of(key, entry, table, device) for key, entry in sorted(held_out.items())]
    return [row for row in rows if row is not None]


def left_out_rows(op: str, taken: Sequence[tuple[Run, Sample]], device: DeviceFingerprint) -> list[Row]:
    """The rows of problems whose n and k no sample of the table has: the NK shapes are distributed
    over a few folds, and each fold is looked up in a table that is made from the others."""
    whole = entries(table_of_samples(op, taken))
    weights = sorted({(key.n, key.k) for key in whole})
    random.Random(7).shuffle(weights)
    rows = []
    for fold in range(_FOLDS):
        out = set(weights[fold::_FOLDS])
        rest = [one for one in taken if (one[1].key.n, one[1].key.k) not in out]
        if out and rest:
            held_out = {key: entry for key, entry in whole.items() if (key.n, key.k) in out}
            rows += rows_of(table_of_samples(op, rest), device, held_out)
    return rows


_FOLDS = 12
"""More would leave less out at a time, and take as much longer."""


def _with_figures(rows: Sequence[Row]) -> dict[str, Any]:
    return {**held_out_figures.figures(rows), "rows": rows}


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    if _PRINT_HELD_OUT.value:
        print(",".join(held_out_problems.shapes("fp8_row", _HELD_OUT_SEED, _NUM_HELD_OUT)))
        return 0
    if not _SAMPLES.value:
        raise app.UsageError("--samples must be given; it is what the table is baked from")
    report: dict[str, Any] = {"held_out": {}, "left_out": {}, "again": {}}
    try:
        record, taken = read(_SAMPLES.value)
        others = {
            name: read(flag.value)[1] for name, flag in (("held_out", _HELD_OUT), ("again", _AGAIN)) if flag.value
        }
        for op in OPS:
            of_table = [one for one in taken if one[1].op == op]
            if _LEAVE_OUT.value and of_table:
                report["left_out"][op] = _with_figures(left_out_rows(op, of_table, record.fingerprint))
            table = table_of_samples(op, of_table)
            for name, pairs in others.items():
                of_op = [one for one in pairs if one[1].op == op]
                if not of_op:
                    continue
                other = table_of_samples(op, of_op)
                if name == "again":
                    report[name][op] = again_figures(table, other)
                else:
                    report[name][op] = _with_figures(rows_of(table, record.fingerprint, entries(other)))
    except TableError as error:
        print(f"table_quality: {error}", file=sys.stderr)
        return 1
    report["device"] = record.fingerprint.to_json()
    report["runs"] = sorted({run.id for run, _ in taken})
    for name in ("again", "held_out", "left_out"):
        for op, figures in report[name].items():
            for title, value in figures.items():
                if title != "rows":
                    print(f"{name} {op} {title}: {value}")
            for row in sorted(figures.get("rows", ()), key=lambda row: -row["regret"])[:5]:
                print(f"  {row}")
    if _JSON_OUT.value:
        Path(_JSON_OUT.value).write_text(json.dumps(report, indent=1) + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    app.run(main)
