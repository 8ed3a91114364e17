"""`stoneware info`: what this installation has and what it finds on this machine."""

from __future__ import annotations

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json
from stoneware.cli.output import Output

HELP = help.text(
    "Show versions, GPUs, native modules, kernels, tables and the tuning store.\n\n"
    "A missing or damaged part is shown with the reason; the exit code is still 0.",
    examples=["stoneware info", "stoneware info --json"],
    json_keys="what `stoneware.info().as_dict()` has",
)


def info(json: Json = False) -> int:
    from stoneware.installation import info as find

    found = find()
    output = Output("info", json)
    output.text(str(found))
    return output.document(found.as_dict(), exit_codes.OK)
