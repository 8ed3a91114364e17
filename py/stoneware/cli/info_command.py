"""`stoneware info`: what this installation has and what it finds on this machine."""

from __future__ import annotations

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json
from stoneware.cli.output import Output

HELP = help.text(
    "Show versions, GPUs, native modules, kernels, tables and the tuning store.\n\n"
    "A part that is missing or damaged is shown with the reason, and is no failure.",
    examples=["stoneware info", "stoneware info --json"],
    json_keys="what `stoneware.info().as_dict()` has",
)


def info(json: Json = False) -> int:
    from stoneware.installation import info as find

    found = find()
    output = Output("info", json)
    output.text(str(found))
    return output.document(found.as_dict(), exit_codes.OK)
