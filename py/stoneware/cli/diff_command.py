"""`stoneware diff`: where two tables, sample folders or stores choose another config."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, not_empty
from stoneware.cli.output import Output

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
"""How many problems are shown that only one side has: often it has one device more."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A")], b: Annotated[str, typer.Argument(metavar="B")], json: Json = False
) -> int:
    from stoneware.explanation import fitted
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
            output.text(*fitted("", f"{title}, {device}"), *(line for item in of_device for line in _lines(item)), "")
        if len(members) > most:
            output.text(f"and {len(members) - most} more {title}; --json has them all", "")
    output.text(
        *fitted(
            "",
            f"{found.num_common} problems in both, {len(found.changed)} of them with another config "
            f"({found.fraction:.1%}); {len(found.only_a)} only in A, {len(found.only_b)} only in B",
        )
    )
    return output.document(found.as_dict(), exit_codes.FOUND if found else exit_codes.OK)


def _lines(item: Difference) -> list[str]:
    """The problem, and below it what each side chooses, with its time."""
    from stoneware.explanation import fitted, kernel_in_words, problem_in_words

    sides = [("A", item.config_a, item.median_us_a), ("B", item.config_b, item.median_us_b)]
    has_both = item.config_a is not None and item.config_b is not None
    ratio = f", B / A = {item.median_us_b / item.median_us_a:.3f}" if has_both else ""
    lines = fitted("", f"  {problem_in_words(item.key)}{ratio}")
    for side, config, median_us in sides:
        if config is not None:
            lines += fitted(f"    {side} {median_us:9.2f} us", kernel_in_words(config), width=20)
    return lines
