"""`stoneware merge`: sample folders and stores into one sample folder per device."""

from __future__ import annotations

from typing import Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, not_empty
from stoneware.cli.output import Output

HELP = help.text(
    "Merge sample folders and stores into one sample folder per device.\n\n"
    "The result is a union: its bytes depend neither on the order nor on the number of merges. "
    "SOURCES are folders of a device, folders of such folders, and stores (.sqlite3). Damaged "
    "entries are skipped and reported. Only a source that is also --out is changed.",
    examples=[
        "stoneware merge node1.sqlite3 node2.sqlite3 --out samples",
        "stoneware merge samples store.sqlite3 --out samples --keep newest",
    ],
    found="something in a source was damaged and left out",
    json_keys="folders [path], num_samples, problems [text]",
)


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCES...")],
    out: Annotated[str, typer.Option(help="Folder to write to: new, empty, or one of the sources.")],
    keep: Annotated[
        str,
        typer.Option(
            help="all; newest, of each problem, candidate and kernel; or current, of these only those of kernels "
            "that this installation has, with the bytes that they have now."
        ),
    ] = "all",
    json: Json = False,
) -> int:
    from stoneware.tuning import merge as samples

    output = Output("merge", json)
    merged = samples.merge(not_empty(sources), out, keep=keep)
    for problem in merged.problems:
        output.note(problem)
    folders = [str(folder) for folder in merged.folders]
    output.text(*(f"wrote {folder}" for folder in folders), f"{merged.num_samples} samples")
    return output.document(
        {"folders": folders, "num_samples": merged.num_samples, "problems": merged.problems},
        exit_codes.FOUND if merged.problems else exit_codes.OK,
    )
