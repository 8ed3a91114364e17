"""`stoneware verify`: looks for damage in the installation, or in given files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, there
from stoneware.cli.output import Output

HELP = help.text(
    "Look for damage, and show every bad entry with its place.\n\n"
    "Without PATHS this installation is checked: the kernel manifest, the native modules, the "
    "bytes of every kernel, the tables of the wheel and of other packages, the user's store, and "
    "STONEWARE_TUNING. "
    "PATHS are sample folders, stores (.sqlite3), tables (.table) and manifests (.json). Nothing "
    "is changed.",
    examples=["stoneware verify", "stoneware verify samples/nvidia_h200 store.sqlite3 --json"],
    found="something is damaged or missing",
    json_keys="parts {part or path: number of problems}, problems [{part, problem}]",
)


def verify(paths: Annotated[list[str] | None, typer.Argument(metavar="[PATHS]...")] = None, json: Json = False) -> int:
    from stoneware.cli import verification

    output = Output("verify", json)
    if paths:
        parts = {path: verification.path(Path(path)) for path in there(paths)}
    else:
        parts = verification.installation()
    for part, problems in parts.items():
        output.text(f"{part}: {len(problems)} problems" if problems else f"{part}: good")
        output.text(*(f"  {problem}" for problem in problems))
    return output.document(
        {
            "parts": {part: len(problems) for part, problems in parts.items()},
            "problems": [
                {"part": part, "problem": problem} for part, problems in parts.items() for problem in problems
            ],
        },
        exit_codes.FOUND if any(parts.values()) else exit_codes.OK,
    )
