"""`stoneware bake`: samples and a kernel manifest in, the tuning table of one op out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, listed, there
from stoneware.cli.output import Output

HELP = help.text(
    "Bake the tuning table of one op from samples and a kernel manifest.\n\n"
    "The same files give the same bytes on any machine, and no GPU is needed. FILES are the "
    "<op>.jsonl, runs.json and device.json of any number of devices, each in its own folder, or "
    "such folders. A sample of a kernel that the manifest lacks is refused.",
    examples=[
        "stoneware bake --op scaled_mm --out scaled_mm.table samples/nvidia_h200",
        "stoneware bake --op acme.kernels:softmax --kernels acme.kernels:softmax \\\n"
        "      --out acme.kernels.softmax.table samples/*/*",
    ],
    json_keys="op, out, digest, num_bytes, num_files, devices [{name, num_entries}]",
)


def bake(
    op: Annotated[
        str, typer.Option(help="scaled_mm, matmul, grouped_mm, or a decorated kernel as package.module:function.")
    ],
    out: Annotated[str, typer.Option(help="The table to write.")],
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILES]...")] = None,
    manifest: Annotated[
        str | None, typer.Option(help="kernel_manifest.json. Default: that of this installation.")
    ] = None,
    kernels: Annotated[str | None, typer.Option(help="All decorated kernels that exist, separated by commas.")] = None,
    json: Json = False,
) -> int:
    from stoneware.kernels import manifest as manifest_format
    from stoneware.kernels.key import is_kernel
    from stoneware.runtime import regular_file
    from stoneware.tuning import bake as baking
    from stoneware.tuning import table_file

    output = Output("bake", json)
    found: manifest_format.Manifest | None
    if manifest is not None:
        found = manifest_format.read_manifest(manifest, remedy="build it with the kernel_manifest rule")
    else:
        found = None if is_kernel(op) else manifest_format.packaged()
    paths = _files(there(files or []))
    if is_kernel(op):
        _check_kernel(op, paths)
    data = baking.bake(op, paths, found, listed("kernels", kernels) if kernels is not None else ())
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


def _check_kernel(op: str, paths: list[Path]) -> None:
    """Raises ValueError if no sample is of the kernel: its name is probably misspelt."""
    from stoneware.tuning import merge
    from stoneware.tuning.samples import read_samples

    files = [path for path in paths if path.suffix == ".jsonl"]
    if not files or merge.file_name(op) in {path.name for path in files}:
        return
    known = {sample.op for path in files for _, sample in read_samples(path, [])}
    raise ValueError(
        f"--op={op!r} must be one that the samples have, {', '.join(sorted(known)) or 'none'}; "
        f"correct the name, or give the folder with its {merge.file_name(op)}"
    )


def _files(paths: Sequence[str]) -> list[Path]:
    """The sample files among the paths, and those in the folders among them."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [path / "runs.json", path / "device.json", *sorted(path.glob("*.jsonl"))]
            members = [file for file in inside if file.is_file()]
            if not members:
                raise ValueError(
                    f"{path} must be a device's sample folder, and has no <op>.jsonl, runs.json or "
                    "device.json; pass the folder of one device"
                )
            found += members
        else:
            found.append(path)
    return found
