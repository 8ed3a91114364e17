"""`stoneware report`: what was measured, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, not_empty
from stoneware.cli.output import Output

HELP = help.text(
    "Draw what was measured as one HTML page that needs no network.\n\n"
    "For each device: speed against torch's kernels by op and m, then a table of speed-ups by shape "
    "for each op, a roofline and the chosen kernels. SOURCES are sample folders, stores (.sqlite3) and "
    "tables (.table); without any, this installation's tables and the user's store are drawn.",
    examples=[
        "stoneware report --out report.html",
        "stoneware report --out h200.html --device H200 samples/nvidia_h200",
        "stoneware report --json samples/nvidia_h200 > numbers.json",
    ],
    json_keys="out (the page, or null if none was asked for), devices [{device, aliases, sources, "
    "digests, statuses, runs, verdict [{title, num_problems, share_ours, same_scales, any_scales}], "
    "families [{family, title, num_problems, speedup_geomean, speedup_least, problems, roofs, "
    "roofline}]}]. --json needs no --out",
)


def report(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[SOURCES]...", help="Sample folders, stores and tables.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The page to write.")] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="An op or a kernel to draw; may be repeated. Default: all.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Name, alias or part of a name of the device to draw. Default: all.")
    ] = None,
    json: Json = False,
) -> int:
    if out is None and not json:
        raise ValueError("--out must name the page to write; pass --out=report.html, or --json")
    from stoneware.report import document, page
    from stoneware.report import sources as report_sources

    output = Output("report", json)
    devices = report_sources.load(not_empty(sources or []), device=device, ops=op or [])
    if out is not None:
        names = ", ".join(item.fingerprint.name for item in devices)
        text = page.page(devices, title=f"Stoneware report: {names}")
        # A path of a source may hold bytes that are not text; they are written as escapes.
        Path(out).write_text(text, encoding="utf-8", errors="backslashreplace")
        num_problems = sum(len(item.problems) for item in devices)
        output.text(f"{out}: {num_problems} problems on {names}")
    numbers = document.document(devices) if json else {}
    return output.document({"out": out, **numbers}, exit_codes.OK)
