"""The short commands: info, verify, merge, bake, diff, report. Each imports what it needs when it runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, check_paths
from stoneware.cli.output import Output

if TYPE_CHECKING:
    from stoneware.tuning.differences import Difference

INFO_HELP = help.text(
    "Show versions, GPUs, native modules, kernels, tables and the tuning store.\n\n"
    "A missing or damaged part is shown with the reason; the exit code is still 0.",
    examples=["stoneware info", "stoneware info --json"],
    json_keys="what `stoneware.info().as_dict()` has",
)


def info(json: Json = False) -> int:
    from stoneware.installation import info as find

    report = find()
    output = Output("info", json)
    output.text(str(report))
    return output.document(report.as_dict(), exit_codes.OK)


VERIFY_HELP = help.text(
    "Look for damage, and show the location of every bad entry.\n\n"
    "Without PATHS this installation is checked: the kernel manifest, the native modules, the "
    "bytes of every kernel, the tables of the wheel and of other packages, the user's store, and "
    "STONEWARE_TUNING. "
    "PATHS are sample folders, stores (.sqlite3) and tables (.table). Nothing is changed.",
    examples=["stoneware verify", "stoneware verify samples/nvidia_h200 store.sqlite3 --json"],
    findings="something is damaged or missing",
    json_keys="parts {part or path: number of problems}, problems [{part, problem}]",
)


def verify(paths: Annotated[list[str] | None, typer.Argument(metavar="[PATHS]...")] = None, json: Json = False) -> int:
    from stoneware.cli import verification
    from stoneware.tuning import differences

    output = Output("verify", json)
    if paths:
        parts = {path: differences.verify(path) for path in check_paths(paths)}
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
        exit_codes.FINDINGS if any(parts.values()) else exit_codes.OK,
    )


MERGE_HELP = help.text(
    "Merge sample folders and stores into one sample folder per device.\n\n"
    "The result is a union: its bytes depend neither on the order nor on the number of merges. "
    "SOURCES are folders of a device, folders of such folders, and stores (.sqlite3). Damaged "
    "entries are skipped and reported. Only a source that is also --out is changed.",
    examples=[
        "stoneware merge node1.sqlite3 node2.sqlite3 --out samples",
        "stoneware merge samples store.sqlite3 --out samples --keep newest",
    ],
    findings="something in a source was damaged and left out",
    json_keys="folders [path], num_samples, problems [text]",
)


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCES...")],
    out: Annotated[str, typer.Option(help="Folder to write to: new, empty, or one of the sources.")],
    keep: Annotated[
        str,
        typer.Option(
            help="all; newest: the newest sample of each problem, candidate and kernel; or current: like newest, but "
            "only for kernels of this installation whose code is unchanged."
        ),
    ] = "all",
    json: Json = False,
) -> int:
    from stoneware.tuning import merge as samples

    output = Output("merge", json)
    merged = samples.merge(check_paths(sources), out, keep=keep)
    for problem in merged.problems:
        output.note(problem)
    folders = [str(folder) for folder in merged.folders]
    output.text(*(f"wrote {folder}" for folder in folders), f"{merged.num_samples} samples")
    return output.document(
        {"folders": folders, "num_samples": merged.num_samples, "problems": merged.problems},
        exit_codes.FINDINGS if merged.problems else exit_codes.OK,
    )


BAKE_HELP = help.text(
    "Bake the tuning table of one op from samples, for the kernels of this installation.\n\n"
    "The same files give the same bytes on any machine, and no GPU is needed. FILES are the "
    "<op>.jsonl, runs.json and device.json of any number of devices, each in its own folder, or "
    "such folders. A sample of a kernel that this installation lacks is refused.",
    examples=[
        "stoneware bake --op scaled_mm --out scaled_mm.table samples/nvidia_h200",
        "stoneware bake --op acme.kernels:softmax --out acme.kernels.softmax.table samples/*/*",
    ],
    json_keys="op, out, digest, num_bytes, num_files, devices [{name, num_entries}]",
)


def bake(
    op: Annotated[
        str, typer.Option(help="scaled_mm, matmul, grouped_mm, or a decorated kernel as package.module:function.")
    ],
    out: Annotated[str, typer.Option(help="The table to write.")],
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILES]...")] = None,
    json: Json = False,
) -> int:
    from stoneware.kernels import manifest
    from stoneware.kernels.key import is_kernel
    from stoneware.runtime import regular_file
    from stoneware.tuning import bake as baking
    from stoneware.tuning import table_file

    output = Output("bake", json)
    paths = _files(check_paths(files or []))
    built = None if is_kernel(op) else manifest.packaged()
    data = baking.bake(op, paths, built)
    baked = table_file.decode(data, out, op)
    regular_file.write(out, data)
    output.text(f"{out}: {len(data)} bytes from {len(paths)} files, digest {baked.digest}")
    return output.document(
        {
            "op": op,
            "out": out,
            "digest": baked.digest,
            "num_bytes": len(data),
            "num_files": len(paths),
            "devices": [
                {"name": device.fingerprint.name, "num_entries": device.num_entries} for device in baked.devices
            ],
        },
        exit_codes.OK,
    )


def _files(paths: Sequence[str]) -> list[Path]:
    """The sample files among the paths, and those in the folders among them."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            paths_inside = [path / "runs.json", path / "device.json", *sorted(path.glob("*.jsonl"))]
            members = [file for file in paths_inside if file.is_file()]
            if not members:
                raise ValueError(
                    f"{path} must be a device's sample folder, and has no <op>.jsonl, runs.json or "
                    "device.json; pass the folder of one device"
                )
            files += members
        else:
            files.append(path)
    return files


DIFF_HELP = help.text(
    "Compare what A and B choose: tables (.table), sample folders or stores.\n\n"
    "Timings differ from tune to tune; what matters is whether another config is chosen, and what "
    "that costs. Each problem at which the choice differs is shown with the time that each side "
    "measured for its own choice, and their share of the common problems.",
    examples=[
        "stoneware diff old/scaled_mm.table new/scaled_mm.table",
        "stoneware diff samples/nvidia_h200 store.sqlite3 --json",
    ],
    findings="A and B differ, or part of one could not be read",
    json_keys="num_common, fraction, changed, only_a, only_b, each [{device, key, config_a, "
    "config_b, median_us_a, median_us_b}], skipped (what could not be read)",
)

MOST_ONLY = 20
"""How many problems are shown that only one side has; often it has one device more, and thousands of them."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A")], b: Annotated[str, typer.Argument(metavar="B")], json: Json = False
) -> int:
    from stoneware.explanation import fitted
    from stoneware.tuning.differences import diff as compare

    output = Output("diff", json)
    first, second = check_paths([a, b])
    differences = compare(first, second)
    for problem in differences.skipped:
        output.note(problem)
    for title, members, most in (
        ("another config is chosen", differences.changed, len(differences.changed)),
        ("only in A", differences.only_a, MOST_ONLY),
        ("only in B", differences.only_b, MOST_ONLY),
    ):
        for device, items in itertools.groupby(members[:most], lambda item: item.device):
            output.text(*fitted("", f"{title}, {device}"), *itertools.chain(*map(_lines, items)), "")
        if len(members) > most:
            output.text(f"and {len(members) - most} more {title}; --json has them all", "")
    output.text(
        *fitted(
            "",
            f"{differences.num_common} problems in both, {len(differences.changed)} of them with another config "
            f"({differences.fraction:.1%}); {len(differences.only_a)} only in A, {len(differences.only_b)} only in B",
        )
    )
    return output.document(differences.as_dict(), exit_codes.FINDINGS if differences else exit_codes.OK)


def _lines(item: Difference) -> list[str]:
    """The problem, and below it the choice of each side with its time."""
    from stoneware.explanation import fitted, kernel_in_words, problem_in_words

    sides = [("A", item.config_a, item.median_us_a), ("B", item.config_b, item.median_us_b)]
    has_both = item.config_a is not None and item.config_b is not None
    ratio = f", B / A = {item.median_us_b / item.median_us_a:.3f}" if has_both else ""
    lines = fitted("", f"  {problem_in_words(item.key)}{ratio}")
    for side, config, median_us in sides:
        if config is not None:
            lines += fitted(f"    {side} {median_us:9.2f} us", kernel_in_words(config), width=20)
    return lines


REPORT_HELP = help.text(
    "Show the measurements on one HTML page that needs no network.\n\n"
    "For each device: speed against torch's kernels by op and m, then a table of speed-ups by shape "
    "for each op, a roofline and the chosen kernels. A reader may choose a model, whose shapes are then shown alone. "
    "SOURCES are sample folders, stores (.sqlite3) and "
    "tables (.table); without any, this installation's tables and the user's store are drawn.",
    examples=[
        "stoneware report --out report.html",
        "stoneware report --out h200.html samples/nvidia_h200",
        "stoneware report --json samples/nvidia_h200 > numbers.json",
    ],
    json_keys="out (the page, or null without --out), devices [{device, aliases, sources, "
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
    json: Json = False,
) -> int:
    if out is None and not json:
        raise ValueError("--out must name the page to write; pass --out=report.html, or --json")
    from stoneware.report import document, page
    from stoneware.report import sources as report_sources
    from stoneware.runtime import regular_file

    output = Output("report", json)
    devices = report_sources.load(check_paths(sources or []), ops=op or [])
    if out is not None:
        names = ", ".join(item.fingerprint.name for item in devices)
        text = page.page(devices, title=f"Stoneware report: {names}")
        regular_file.write(out, text.encode("utf-8"))
        num_problems = sum(len(item.problems) for item in devices)
        output.text(f"{out}: {num_problems} problems on {names}")
    numbers = document.document(devices) if json else {}
    return output.document({"out": out, **numbers}, exit_codes.OK)
