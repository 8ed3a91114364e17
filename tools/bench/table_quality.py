"""How good the table is where it was not measured, and how much of it is noise; needs no GPU.

    table_quality --print_held_out                                       shapes for `stoneware tune`
    table_quality --samples DIR --held_out DIR --again DIR --json_out F  the figures

- held out: at shapes of other models, with m, n and k that no sample of the table has, what the
  look-up answers from --samples, and the time of that config as measured at the shape (--held_out)
  over the best one's: the regret. Beside it that of always taking the vendor library.
- again: a second tune of the same shapes (--again): at how many of them the table would choose
  another config, by the rule of tuning/choose.py, and by taking the plain fastest.

Each DIR is a folder of samples of one device, or a folder of one such.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.kernels.registry import OPS, VENDOR
from stoneware.tuning import lookup, merge, sources
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Table
from stoneware.tuning.table_entry import Entry
from tools.gpu_check import held_out_problems

_PRINT_HELD_OUT = flags.DEFINE_bool("print_held_out", False, "Print the shapes as MxNxK, and end.")
_SAMPLES = flags.DEFINE_string("samples", None, "Samples that the table is baked from.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Samples at the shapes that are held out.")
_AGAIN = flags.DEFINE_string("again", None, "Samples of a second tune of the shapes of --samples.")
_JSON_OUT = flags.DEFINE_string("json_out", None, "File to write the figures to, besides.")

_HELD_OUT_SEED, _NUM_HELD_OUT = 7, 168
"""Of the shapes that --print_held_out prints."""


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
    record, runs, samples = source.devices[0]
    return record, [(runs[sample.run], sample) for sample in samples]


def entries(table: Table) -> dict[AnyKey, Entry]:
    """The entries that were measured with their own output dtype, by key."""
    return {
        entry.key: entry
        for device in table.devices
        for entry in device.entries()
        if entry.measured_out_dtype == getattr(entry.key, "out_dtype", "")
    }


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
            lost.append(times[a[key].choices[0].config] / min(times.values()))
    return {
        "num_shapes": len(common),
        "differing": sum(a[key].choices[0].config != b[key].choices[0].config for key in common),
        "differing_by_plain_fastest": sum(fastest(a[key]) != fastest(b[key]) for key in common),
        "first_choice_in_second_tune": summary(lost),
    }


def held_out_figures(
    table: Table, device: DeviceRecord, held_out: Table
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summaries, and a row per shape.

    Raises:
      TableError: a shape is in the table, so that it is not held out.
    """
    rows = []
    for key, entry in sorted(entries(held_out).items()):
        times = {choice.config: choice.median_us for choice in entry.choices}
        best_us = min(times.values())
        for found in lookup.answers(key, device.fingerprint, [Source("wheel", table)]):
            if found.layer == "exact":
                raise TableError(f"{key.shape} is in --samples, and so is not held out; leave it out")
            chosen = next((one for one in found.entry.choices if one.config in times), None)
            if chosen is None:
                continue
            vendor = [us for config, us in times.items() if config.backend == VENDOR]
            rows.append(
                {
                    "m": key.m,
                    "n": key.n,
                    "k": key.k,
                    "scales": key.scales,
                    "layer": found.layer,
                    "answered_by": (found.modelled_from or found.entry.key).shape,
                    "chosen": str(chosen.config),
                    "chosen_us": times[chosen.config],
                    "best": str(fastest(entry)),
                    "best_us": best_us,
                    "regret": round(times[chosen.config] / best_us, 4),
                    "vendor_us": min(vendor, default=None),
                }
            )
            break
    regrets = [row["regret"] for row in rows]
    vendors = [row["vendor_us"] / row["best_us"] for row in rows if row["vendor_us"]]
    return {"look_up": summary(regrets), "always_the_vendor": summary(vendors)}, rows


def summary(ratios: Sequence[float]) -> dict[str, Any]:
    """Count, geometric mean, 90th percentile by nearest rank, and the worst."""
    if not ratios:
        return {"count": 0}
    ordered = sorted(ratios)
    return {
        "count": len(ratios),
        "geomean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4),
        "percentile_90": round(ordered[math.ceil(0.9 * len(ordered)) - 1], 4),
        "worst": round(ordered[-1], 4),
    }


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    if _PRINT_HELD_OUT.value:
        print(",".join(held_out_problems.shapes("fp8_row", _HELD_OUT_SEED, _NUM_HELD_OUT)))
        return 0
    if not _SAMPLES.value:
        raise app.UsageError("--samples must be given; it is what the table is baked from")
    report: dict[str, Any] = {"held_out": {}, "again": {}}
    try:
        record, taken = read(_SAMPLES.value)
        others = {
            name: read(flag.value)[1] for name, flag in (("held_out", _HELD_OUT), ("again", _AGAIN)) if flag.value
        }
        for op in OPS:
            table = sources.table_of_samples(op, [one for one in taken if one[1].op == op])
            for name, pairs in others.items():
                of_op = [one for one in pairs if one[1].op == op]
                if not of_op:
                    continue
                other = sources.table_of_samples(op, of_op)
                if name == "again":
                    report[name][op] = again_figures(table, other)
                else:
                    figures, rows = held_out_figures(table, record, other)
                    report[name][op] = {**figures, "rows": rows}
    except TableError as error:
        print(f"table_quality: {error}", file=sys.stderr)
        return 1
    report["device"] = record.fingerprint.to_json()
    report["runs"] = sorted({run.id for run, _ in taken})
    for name in ("again", "held_out"):
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
