"""`stoneware link`: links an epilogue ahead of time, for a GPU that need not be in this machine."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, integers, refuse
from stoneware.cli.output import Output
from stoneware.errors import LinkError, StoreError, UnsupportedError, quoted
from stoneware.specs import OPS, spec_of

if TYPE_CHECKING:
    import torch

HELP = help.text(
    "Link an epilogue of sw.matmul, sw.scaled_mm or sw.grouped_mm ahead of time.\n\n"
    "EPILOGUE is a function as module:function, which is imported. For each m the kernel is the one that "
    "a call on the device would run. The cubins are kept in the folder 'linked' of the tuning folder, "
    "where calls find them: copy that folder to other machines, or link in the image that they start. "
    "Needs no GPU. What is linked already is skipped, so an interrupted run continues where it stopped.",
    examples=[
        "stoneware link torch:relu -m 1,16,4096 -n 14336 -k 4096 --device 'NVIDIA H200'",
        "stoneware link mypackage.epilogues:silu_times -m 256 -n 14336 -k 4096 --input mxn",
        "stoneware link mypackage.epilogues:bias_gelu --op scaled_mm -m 16,256 -n 4096 -k 4096 --input n",
        "stoneware link mypackage.epilogues:to_fp8 -m 4096 -n 4096 -k 4096 --input mx1:fp32 --gradients",
    ],
    findings="an epilogue could not be linked, or a cubin not be kept",
    json_keys="epilogue, device, links [{m, kernel, status (linked, kept or failed), seconds, reason}]",
)

_INPUT = re.compile(r"(?P<shape>scalar|[mn0-9]+(?:/2)?(?:x[mn0-9]+(?:/2)?)*)(?::(?P<dtype>\w+))?")


def link(
    epilogue: Annotated[str, typer.Argument(metavar="EPILOGUE", help="The function, as module:function.")],
    m: Annotated[str, typer.Option("-m", help="Rows of a, such as 1,16,4096.")],
    n: Annotated[int, typer.Option("-n", help="Columns of b.")],
    k: Annotated[int, typer.Option("-k", help="Inner size.")],
    op: Annotated[str, typer.Option(help="scaled_mm, matmul or grouped_mm.")] = "matmul",
    input: Annotated[
        list[str] | None,
        typer.Option(
            help="An input of the epilogue as SHAPE or SHAPE:DTYPE, in order; may be repeated. SHAPE has m, n, m/2, "
            "n/2 or integers separated by x, or is scalar. Default dtype: that of the result."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of a and b, as for explain.")] = None,
    out_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the result: bf16, fp16 or fp32. Default: as for explain.")
    ] = None,
    scales: Annotated[str | None, typer.Option(help="For scaled_mm and grouped_mm, as for explain.")] = None,
    num_groups: Annotated[int | None, typer.Option(help="For grouped_mm: number of b matrices.")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="The call has a bias.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="The call needs gradients.")] = False,
    device: Annotated[
        str | None, typer.Option(help="A GPU, as for explain, such as 'H200'. Default: the current GPU.")
    ] = None,
    json: Json = False,
) -> int:
    output = Output("link", json)
    if op not in OPS:
        raise ValueError(f"--op={op!r} must be one of {', '.join(OPS)}; pass one of these")
    options = {"scales": scales, "num_groups": num_groups, "has_bias": bias or None}
    refuse(
        [name for name, value in options.items() if value is not None and name not in spec_of(op).takes],
        f"{op} takes none of these",
    )
    from stoneware import explanation
    from stoneware.linking import cubins, toolchain
    from stoneware.ops import ahead

    function = ahead.function_of(epilogue)
    place = explanation.device_of(op, device)
    if place.kind != "cuda" or place.compute_capability != (9, 0):
        raise ValueError(
            f"--device={quoted(device or str(place))} must be a GPU of compute capability 9.0, because kernels for "
            "other devices take no epilogue; pass for example --device='NVIDIA H200'"
        )
    if cubins.FILES.folder() is None:
        raise StoreError("linked cubins need a folder that is this user's alone; set STONEWARE_CACHE_DIR to one")
    if (reason := toolchain.why_missing()) is not None:
        raise UnsupportedError(reason)
    sizes: dict[str, Any] = {name: value for name, value in {**options, "dtype": dtype}.items() if value is not None}
    stored = out_dtype or (dtype if op == "matmul" and dtype else "bf16")
    links: list[dict[str, Any]] = []
    m_values = integers("m", m)
    for position, rows in enumerate(m_values, start=1):
        begin = time.monotonic()
        entry: dict[str, Any] = {"m": rows, "kernel": None, "status": "failed", "seconds": None, "reason": None}
        links.append(entry)
        try:
            tensors = [_input(text, rows, n, stored) for text in input or []]
            each = ahead.link_of(
                op, function, tensors, place, out_dtype=stored, has_gradients=gradients, m=rows, n=n, k=k, **sizes
            )
            entry["kernel"], entry["status"] = each.kernel, "kept"
            if not each.is_kept:
                each.make()
                entry["status"] = "linked" if each.is_kept else "failed"
                entry["reason"] = None if each.is_kept else "the cubin could not be kept on the disk"
        except (LinkError, UnsupportedError) as error:
            entry["status"], entry["reason"] = "failed", str(error)
        entry["seconds"] = round(time.monotonic() - begin, 3)
        what = f"{entry['status']} {entry['kernel'] or ''}" if entry["reason"] is None else f"failed: {entry['reason']}"
        output.note(f"[{position}/{len(m_values)}] m={rows}: {what} ({entry['seconds']:.2f} s)")
    counts = {status: sum(each["status"] == status for each in links) for status in ("linked", "kept", "failed")}
    output.text(f"{epilogue} on {place}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    code = exit_codes.FINDINGS if counts["failed"] else exit_codes.OK
    return output.document({"epilogue": epilogue, "device": str(place), "links": links}, code)


def _input(text: str, m: int, n: int, dtype: str) -> torch.Tensor:
    """A tensor without memory, of the shape and dtype of --input.

    Raises:
      ValueError: the text breaks a rule.
    """
    import torch

    from stoneware.runtime.dtypes import TORCH_DTYPES

    dtypes = {**TORCH_DTYPES, "int64": torch.int64}  # for a seed of dropout
    match = _INPUT.fullmatch(text)
    name = (match["dtype"] if match else None) or dtype
    if match is None or name not in dtypes:
        raise ValueError(
            f"--input={text!r} must be SHAPE or SHAPE:DTYPE, with sizes such as m, n, n/2 and 1 and a dtype of "
            f"{', '.join(dtypes)}; pass for example mxn, n, mx1:fp32 or scalar:fp32"
        )
    shape = [] if match["shape"] == "scalar" else [_size(part, m, n, text) for part in match["shape"].split("x")]
    return torch.empty(shape, dtype=dtypes[name], device="meta")


def _size(part: str, m: int, n: int, text: str) -> int:
    number, _, half = part.partition("/")
    size = {"m": m, "n": n}.get(number)
    if size is None:
        if not number.isdigit() or half:
            raise ValueError(f"--input={text!r} must have sizes such as m, n, n/2 and 1, not {part!r}; correct it")
        return int(number)
    return size // 2 if half else size
