"""`stoneware explain`: which config runs a problem, by which step of the look-up, why, and the runners-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, flag, refuse
from stoneware.cli.output import Output
from stoneware.kernels.key import is_kernel
from stoneware.specs import OPS, spec_of

HELP = help.text(
    "Show which kernel runs a problem, by which step of the look-up, why, and the runners-up.\n\n"
    "Nothing is compiled, timed or launched. OP is scaled_mm, matmul, grouped_mm, or a kernel "
    "under @stoneware.autotune as package.module:function; such a kernel's key arguments follow as "
    "KEY=VALUE, and its module is not imported.",
    examples=[
        "stoneware explain scaled_mm -m 16 -n 4096 -k 14336",
        "stoneware explain matmul -m 1 -n 4096 -k 4096 --device 'NVIDIA H200'",
        "stoneware explain matmul -m 1 -n 4096 -k 4096 --device sm_80",
        "stoneware explain matmul -m 4096 -n 4096 -k 8192 --layout tn",
        "stoneware explain grouped_mm -m 128 -n 4096 -k 14336 --num-groups 8",
        "stoneware explain mypackage.kernels:softmax ROWS=4096 COLS=1024",
    ],
    json_keys="of an op, what `stoneware.explain(...).as_dict()` has; of a kernel, answers, which have the same",
)


def explain(
    op: Annotated[str, typer.Argument(metavar="OP")],
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Key arguments of a decorated kernel.")
    ] = None,
    m: Annotated[
        int | None, typer.Option("-m", help="Rows of a; for grouped_mm the rows of all groups together.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", help="Columns of b.")] = None,
    k: Annotated[int | None, typer.Option("-k", help="Inner size.")] = None,
    num_groups: Annotated[int | None, typer.Option(help="For grouped_mm: number of b matrices.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="For matmul: number of products of this shape, with a different b per product.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="For matmul: layout of a and b: nt (a @ weight.t()), nn, tn or tt. Default: nt.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of a and b: e4m3 for scaled_mm, bf16 or fp16 for matmul, e4m3 or bf16 for grouped_mm."
        ),
    ] = None,
    out_dtype: Annotated[str | None, typer.Option(help="Dtype of the result: bf16, fp16 or fp32.")] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            help="For scaled_mm: row, tensor, block, block_1d, or one each for a and b, as tensor/row. Default: row."
        ),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="A GPU, which need not be here: a name such as 'NVIDIA H200' or A100, or sm_80; or cuda:1; or cpu. "
            "Default: the current GPU, or the CPU."
        ),
    ] = None,
    json: Json = False,
) -> int:
    from stoneware.runtime import environment

    output = Output("explain", json)
    environment.tuning_mode()  # raises for a value that every call would refuse
    options = {"num_groups": num_groups, "batch": batch, "layout": layout, "scales": scales, "has_bias": bias or None}
    dtypes = {"dtype": dtype, "out_dtype": out_dtype}
    if is_kernel(op):
        from stoneware.cli import kernel_explanation

        sizes = {"m": m, "n": n, "k": k}
        names = [name for name, value in {**sizes, **options, **dtypes}.items() if value is not None]
        refuse(names, "a decorated kernel takes KEY=VALUE")
        answers = kernel_explanation.explain(op, key or [], device)
        output.text("\n\n".join(map(str, answers)))
        return output.document({"op": op, "answers": [answer.as_dict() for answer in answers]}, exit_codes.OK)
    if key:
        raise ValueError(
            f"{key[0]!r} must be left out: KEY=VALUE is for kernels given as package.module:"
            f"function; give the sizes of {op} as -m, -n and -k"
        )
    if m is None or n is None or k is None:
        missing = [f"-{name}" for name, size in (("m", m), ("n", n), ("k", k)) if size is None]
        raise ValueError(f"{' '.join(missing)} must be given for an op; pass for example -m 16 -n 4096 -k 14336")
    from stoneware import explanation

    if op in OPS:
        _check_options(op, options)
    arguments: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    answer = explanation.explain(op, m=m, n=n, k=k, dtype=dtype, out_dtype=out_dtype, device=device, **arguments)
    output.text(str(answer))
    return output.document(answer.as_dict(), exit_codes.OK)


def _check_options(op: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError if the op lacks an option that was passed, or needs another."""
    from stoneware.specs.op_spec import FLAGS

    for name, value in options.items():
        if value is None and name in spec_of(op).needs:
            raise ValueError(f"{flag(name)} must be given for {op}; {spec_of(op).needs[name]}")
        if value is not None and name not in spec_of(op).takes:
            takers = [other for other in OPS if name in spec_of(other).takes]
            have = f"{' and '.join(takers)} {'has' if len(takers) == 1 else 'have'}"
            refuse([name], f"{op} has no {FLAGS[name]}, only {have}")
