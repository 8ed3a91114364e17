"""`stoneware tune`: measures every candidate of problems on this machine's GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoneware.cli import exit_codes, help
from stoneware.cli.flags import Json, flag, integers, refuse, split
from stoneware.cli.output import Output
from stoneware.errors import StoreError, UnsupportedError
from stoneware.runtime.device import cuda_device
from stoneware.specs import OPS, spec_of

if TYPE_CHECKING:
    from stoneware.measuring.settings import Settings
    from stoneware.tuning.store import Store

HELP = help.text(
    "Measure the candidates of every problem on this machine's GPU.\n\n"
    "Each candidate is checked against float64 before it is timed. Samples are stored as they are "
    "taken: an interrupted run continues where it stopped, and nothing is measured twice for the "
    "same kernel on the same hardware. Under torchrun the ranks share the problems, one GPU each; "
    "rank 0 prints the progress.",
    examples=[
        "stoneware tune",
        "stoneware tune --weights llama3_8b_qkv,llama3_8b_o --m-values 1,16,64",
        "stoneware tune --ops scaled_mm --shapes 16x4096x14336 --scales row",
        "stoneware tune --ops grouped_mm --weights mixtral_8x7b_down --dtypes e4m3",
        "stoneware tune --ops matmul --shapes 128x16x512x128 --layouts nt,nn",
        "stoneware tune --ops grouped_mm --shapes @shapes.txt",
        "stoneware tune --ops scaled_mm --shapes 4096x6144x8192 --a-dtypes e5m2 --accumulations slow --scales tensor",
        "stoneware tune --model Llama-3.1-8B/config.json --max-batch-tokens 4096 --fastest 12",
        "stoneware tune --stale --ops matmul,grouped_mm --fastest 12",
        "torchrun --nproc-per-node 8 -m stoneware tune",
    ],
    findings="a candidate was wrong, failed or hung, or a problem was not measured",
    json_keys="run, rank, world_size, store, num_problems, num_known, num_measured, statuses "
    "{ok, wrong, failed, hung}, failures [{problem, reason}], seconds; with "
    "--model also gain {num_problems, over_torch, over_wheel, num_changed}",
)

_LISTS = ("ops", "weights", "scales", "out_dtypes", "layouts", "dtypes", "a_dtypes", "accumulations")
"""Flags that are lists of names."""

_MODEL_FLAGS = ("tensor_parallel", "max_batch_tokens", "dtype")
_SHAPE_FLAGS = ("weights", "m_values", "shapes")
_OTHER_FLAGS = (*_LISTS, "shapes", "m_values", "stale")


def tune(
    context: typer.Context,
    ops: Annotated[
        str | None, typer.Option(help="Ops: scaled_mm, matmul, grouped_mm, separated by commas. Default: all.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="NK shapes by name, such as llama3_8b_qkv, separated by commas. Default: all, or none with --shapes."
        ),
    ] = None,
    m_values: Annotated[
        str | None,
        typer.Option(help="Rows of a for --weights, such as 1,16,64; for grouped_mm the mean rows of a group."),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="More shapes as MxNxK, such as 16x4096x14336, separated by commas; or @FILE, with a shape "
            "per line and comments after #. For matmul also BxMxNxK, a batch of B products; for grouped_mm "
            "GxMxNxK, G groups of M rows on average. Four sizes apply to both unless --ops names one."
        ),
    ] = None,
    scales: Annotated[str, typer.Option(help="Scale layouts, for scaled_mm.")] = "row,tensor",
    out_dtypes: Annotated[
        str,
        typer.Option(help="Output dtypes: bf16, fp16, fp32. For matmul also the dtypes of a and b; bf16 with fp32."),
    ] = "bf16",
    layouts: Annotated[str, typer.Option(help="Layouts of a and b, for matmul.")] = "nt",
    dtypes: Annotated[str, typer.Option(help="Dtypes of a and b, for grouped_mm.")] = "e4m3,bf16",
    a_dtypes: Annotated[str, typer.Option(help="Dtypes of a, for scaled_mm: e4m3, or e5m2 for gradients.")] = "e4m3",
    accumulations: Annotated[
        str, typer.Option(help="Accumulations, for scaled_mm: fast, or slow for gradients.")
    ] = "fast",
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json, or a folder with one: measures every linear and expert of that model, "
            "and says what was gained."
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share a layer of --model.")] = 1,
    max_batch_tokens: Annotated[int, typer.Option(help="Most tokens of a batch of --model.")] = 8192,
    dtype: Annotated[
        str, typer.Option(help="Dtypes of --model: bf16, fp16, fp8 (a scale per row), fp8_block or fp8_tensor.")
    ] = "bf16,fp8",
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="Measure again what the tables have of this GPU with an earlier version of the kernel that they "
            "choose. Flags of dtypes, scales and layouts select some of it.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Timings of each candidate.")] = 50,
    seconds_per_problem: Annotated[float, typer.Option(help="Stop timing a problem after this long.")] = 2.0,
    fastest: Annotated[
        int | None,
        typer.Option(
            help="Measure the vendor's kernels and the N others that the tables expect to be fastest. Default: all.",
            metavar="N",
        ),
    ] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure again even if a sample exists.")] = False,
    commit: Annotated[str, typer.Option(help="Commit of the kernels, kept with the run.")] = "unknown",
    device: Annotated[
        int | None, typer.Option(help="Number of the GPU. Default: 0, or under torchrun the local rank.", min=0)
    ] = None,
    store: Annotated[str | None, typer.Option(help="Store to write to. Default: the user's.")] = None,
    json: Json = False,
) -> int:
    sample_store = _store(store)
    from stoneware.measuring.settings import Settings

    output = Output("tune", json)
    flags = _flags(context)
    if model is not None:
        problems = _model_problems(flags, output, model, tensor_parallel, max_batch_tokens, dtype)
    else:
        problems = _stale_problems(flags, device) if stale else _problems(flags)
    settings = Settings(
        rounds=rounds,
        seconds_per_problem=seconds_per_problem,
        remeasure=remeasure,
        fastest=fastest,
        commit=commit,
        command=_command(flags),
    )
    return _measure(output, problems, settings, sample_store, device, has_gain=model is not None)


def _problems(flags: Mapping[str, Any]) -> Sequence[Any]:
    """The problems to measure; a flag is refused if none of the ops has it."""
    from stoneware.measuring import workloads

    selection = _selection(flags)
    if "m_values" in flags:
        selection["m_values"] = integers("m_values", flags["m_values"])
    text = flags.get("shapes", "")
    if text.startswith("@"):
        selection["shapes"] = _read_shapes(text, selection)
    elif "shapes" in flags:
        selection["shapes"] = split("shapes", text)
    problems = workloads.problems(**selection)
    _check_takers(selection, flags)
    return problems


def _selection(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that are lists."""
    if names := [name for name in _MODEL_FLAGS if name in flags]:
        raise ValueError(f"{flag(names[0])}={flags[names[0]]} is for --model, which is missing; pass --model too")
    return {name: split(name, flags[name]) for name in _LISTS if name in flags}


def _check_takers(selection: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raises ValueError if none of the ops has a flag."""
    for name in selection:
        takers = [op for op in OPS if name in spec_of(op).choices]
        if takers and not {*takers} & {*selection.get("ops", OPS)}:
            raise ValueError(
                f"{flag(name)}={flags[name]} is for {' and '.join(takers)}, which "
                f"--ops={flags['ops']} leaves out; add {takers[0]}, or leave {flag(name)} out"
            )


def _stale_problems(flags: Mapping[str, Any], device: int | None) -> Sequence[Any]:
    refuse([name for name in _SHAPE_FLAGS if name in flags], "--stale takes the shapes of the tables")
    from stoneware.measuring import workloads
    from stoneware.sessions import stale

    selection = _selection(flags)
    # Before a GPU is needed, like the flags of other problems.
    workloads.problems(**selection, weights=())
    _check_takers(selection, flags)
    return stale.problems(cuda_device(_ordinal(device)), **selection)


def _model_problems(
    flags: Mapping[str, Any], output: Output, path: str, tensor_parallel: int, max_batch_tokens: int, dtype: str
) -> Sequence[Any]:
    from stoneware.sessions import model

    refuse([name for name in _OTHER_FLAGS if name in flags], "--model says what is measured")
    layers = model.layers(model.read_config(path), tensor_parallel)
    problems, skipped = model.problems(layers, model.tokens_up_to(max_batch_tokens), split("dtype", dtype))
    for reason in skipped:
        output.note(f"left out: {reason}")
    return problems


def _read_shapes(text: str, selection: Mapping[str, Any]) -> list[str]:
    """The shapes of @FILE, each checked, so that an error names its line."""
    from stoneware.measuring import workloads
    from stoneware.runtime import regular_file

    path = Path(text[1:])
    if text == "@":
        raise ValueError("--shapes=@ must name a file after @; pass for example --shapes=@shapes.txt")
    # First without shapes, so that an error of another flag names no line.
    workloads.problems(**{**selection, "weights": selection.get("weights", ())})
    shapes = []
    for number, line in enumerate(regular_file.read(path).decode("utf-8", "replace").splitlines(), start=1):
        if shape := line.partition("#")[0].strip():
            try:
                workloads.problems(**{**selection, "weights": (), "shapes": [shape]})
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            shapes.append(shape)
    if not shapes:
        raise ValueError(f"--shapes={text} must have a shape in a line, and has none; write for example 16x4096x14336")
    return shapes


def _ordinal(device: int | None) -> int:
    """torch's number of the GPU that measures.

    Raises:
      UnsupportedError: torch finds no GPU.
      ValueError: torch finds no GPU of this number.
    """
    import torch

    from stoneware.sessions import session

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"tune needs a GPU that torch can use, and torch {torch.__version__} finds none; run "
            "it on a machine with an NVIDIA GPU, with a torch that is built for CUDA"
        )
    ordinal = session.Ranks.from_environment().local_rank if device is None else device
    if ordinal >= torch.cuda.device_count():
        raise ValueError(
            f"--device={ordinal} must be the number of a GPU that torch finds, 0 to "
            f"{torch.cuda.device_count() - 1}; pass one of them (under torchrun its default is "
            "LOCAL_RANK: start as many ranks as there are GPUs)"
        )
    return ordinal


def _measure(
    output: Output, problems: Sequence[Any], settings: Settings, store: Store, device: int | None, has_gain: bool
) -> int:
    from stoneware.measuring.progress import Reporter
    from stoneware.sessions import model, session

    ordinal, ranks = _ordinal(device), session.Ranks.from_environment()
    # Ranks above 0 report only what went wrong.
    logging.getLogger("stoneware").setLevel(logging.WARNING if ranks.rank else logging.INFO)
    summary = session.tune(problems, store, ordinal, settings, Reporter(ranks.rank), ranks=ranks)
    statuses = {name: summary.statuses[name] for name in ("ok", "wrong", "failed", "hung")}
    is_good = not summary.failures and summary.statuses.total() == statuses["ok"]
    code = exit_codes.OK if is_good else exit_codes.FINDINGS
    if ranks.rank != 0:
        return code
    gain = None
    if has_gain:
        fingerprint = cuda_device(ordinal).fingerprint
        assert fingerprint is not None  # a GPU has one
        gain = model.gain(problems, store, fingerprint)
    output.text(str(summary), *([str(gain)] if gain else []))
    return output.document(
        {
            **vars(summary),
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "store": str(store.path),
            "statuses": statuses,
            "failures": [{"problem": problem, "reason": reason} for problem, reason in summary.failures],
            **({"gain": dataclasses.asdict(gain)} if gain else {}),
        },
        code,
    )


def _flags(context: typer.Context) -> dict[str, Any]:
    """The flags of the command line."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def _command(flags: Mapping[str, Any]) -> str:
    """The command line for the record of the run, without paths of this machine."""
    words = ["stoneware tune"]
    for name, value in flags.items():
        if name in ("store", "model"):
            words.append(f"{flag(name)} {name.upper()}")
        elif name == "shapes" and value.startswith("@"):
            words.append(f"{flag(name)} @FILE")
        elif value is True:
            words += [flag(name)] if name != "json" else []
        else:
            words.append(f"{flag(name)} {value}")
    return " ".join(words)


def _store(path: str | None) -> Store:
    from stoneware.tuning.store import Store, user_store

    if path is not None:
        if not path or Path(path).is_dir():
            raise ValueError(f"--store={path} must be the path of a file; pass for example --store=samples.sqlite3")
        return Store(path)
    default = user_store()
    if default is None:
        raise StoreError(
            "the user's store needs a folder, and this user has no home folder; set "
            "STONEWARE_CACHE_DIR, or pass --store=FILE"
        )
    return default
