"""`stoneware diff`: where two tables, sample folders or stores choose another config."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, not_empty
from stoneware.cli.output import Output
from stoneware.kernels.key import AnyKey, Key

if TYPE_CHECKING:
    from stoneware.tuning.differences import Difference

HELP = help.text(
    "Compare what A and B choose: tables (.table), sample folders or stores.\n\n"
    "Timings differ from tune to tune; what counts is whether another config is chosen, and what "
    "that costs. Each problem at which the choice differs is shown with the time that each side "
    "measured for its own choice, and their share of the common problems.",
    examples=[
        "stoneware diff old/scaled_mm.table new/scaled_mm.table",
        "stoneware diff samples/nvidia_h200 store.sqlite3 --json",
    ],
    found="A and B differ, or part of one could not be read",
    json_keys="num_common, fraction, changed, only_a, only_b, each [{device, key, config_a, "
    "config_b, median_us_a, median_us_b}], skipped (what could not be read)",
)

MOST_LONELY = 20
"""Rows of a table of problems that only one side has: often one side has a whole device more."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", show_default=False)],
    json: Json = False,
) -> int:
    from stoneware.kernels.manifest import packaged
    from stoneware.tuning.differences import diff as compare

    output = Output("diff", json)
    first, second = not_empty([a, b])
    found = compare(first, second, packaged)
    for problem in found.skipped:
        output.note(problem)
    for title, members, most in (
        ("another config is chosen", found.changed, len(found.changed)),
        ("only in A", found.only_a, MOST_LONELY),
        ("only in B", found.only_b, MOST_LONELY),
    ):
        for device, of_device in itertools.groupby(members[:most], lambda item: item.device):
            output.table(
                f"{title}, {device}",
                ("problem", "A", "us", "B", "us ", "B / A"),
                [_row(item) for item in of_device],
                right=("us", "us ", "B / A"),
            )
        if len(members) > most:
            output.text(f"and {len(members) - most} more {title}; --json has them all", "")
    output.text(
        f"{found.num_common} problems in both, {len(found.changed)} of them with another config "
        f"({found.fraction:.1%}); {len(found.only_a)} only in A, {len(found.only_b)} only in B"
    )
    return output.document(found.as_dict(), exit_codes.FOUND if found else exit_codes.OK)


def _row(item: Difference) -> list[str]:
    has_both = item.config_a is not None and item.config_b is not None
    return [
        _problem(item.key),
        "-" if item.config_a is None else str(item.config_a),
        f"{item.median_us_a:.2f}" if item.config_a is not None else "-",
        "-" if item.config_b is None else str(item.config_b),
        f"{item.median_us_b:.2f}" if item.config_b is not None else "-",
        f"{item.median_us_b / item.median_us_a:.3f}" if has_both else "-",
    ]


def _problem(key: AnyKey) -> str:
    if isinstance(key, Key):
        scales = "" if key.scales == "none" else f" {key.scales}"
        return f"{key.op} {key.shape} {key.a_dtype}->{key.out_dtype}{scales} {key.layout}"
    dtypes = ", ".join(f"{name}: {dtype}" for name, dtype in key.dtypes)
    return f"{key.op} {key.shape}" + (f" ({dtypes})" if dtypes else "")
