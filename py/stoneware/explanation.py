"""explain: which config runs a problem, by which step of the look-up, why, and the runners-up."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stoneware.errors import explained, quoted
from stoneware.kernels import manifest, sum_order
from stoneware.kernels.config import TRITON_AOT, VENDOR, AnyConfig, Config, KernelConfig
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.ops import operation_of
from stoneware.runtime import gpu_models
from stoneware.runtime.device import CPU, Device, DeviceFingerprint, cuda_device, normalized_name
from stoneware.runtime.gpu_models import GPU_MODELS
from stoneware.specs import OPS, spec_of
from stoneware.tuning import policy, sources, table_file
from stoneware.tuning.lookup import Decision, Grade
from stoneware.tuning.table import DeviceTable
from stoneware.tuning.table_entry import MODELLED_RUN, Choice

if TYPE_CHECKING:
    import torch

    from stoneware.ops.dispatch import Operation


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A decision with its context; `print` it, or use `as_dict()`.

    Attributes:
      op, problem: the arguments of `explain`.
      device: the device that would run it.
      decision: config, step, source, grade, reason, runners-up and refusals.
      sum_order: the order in which an element is summed, in words; empty for a decorated kernel.
      batch_invariant: whether `sw.batch_invariant` requires a fixed order.
      table_digest: of the wheel's table; empty on a CPU, which needs no table, and for a decorated kernel.
      hint: how to get the answer for a GPU, if none was named and none is available; or how to let other kernels
        compete with torch's, if nothing was measured; or how to measure a stale choice again; otherwise empty.
    """

    op: str
    problem: Any
    device: Device
    decision: Decision
    sum_order: str = ""
    batch_invariant: bool = False
    table_digest: str = ""
    hint: str = ""

    @property
    def config(self) -> Config:
        return self.decision.config

    @property
    def step(self) -> str:
        return self.decision.step

    @property
    def source(self) -> str:
        return self.decision.source

    @property
    def grade(self) -> str:
        return self.decision.grade

    @property
    def run(self) -> dict[str, Any] | None:
        """Versions, date and commit of the run behind the chosen measurement, or None."""
        return dict(self.decision.run) or None

    def as_dict(self) -> dict[str, Any]:
        """The explanation in plain values, for `json.dumps`."""
        decision, chosen = self.decision, self.decision.chosen
        fingerprint = self.device.fingerprint
        return {
            "op": self.op,
            "problem": asdict(self.problem),
            "device": fingerprint.to_json() if fingerprint else "cpu",
            "hint": self.hint,
            "config": decision.config.to_json(),
            "step": decision.step,
            "source": decision.source,
            "grade": decision.grade,
            "reason": decision.reason,
            "chosen": chosen and _choice_json(chosen, chosen),
            "measured_on": decision.measured_on,
            "runners_up": [_choice_json(choice, chosen) for choice in decision.runners_up if chosen],
            "refusals": [{"what": item.what, "step": item.step, "reason": item.reason} for item in decision.refusals],
            "sum_order": self.sum_order,
            "batch_invariant": self.batch_invariant,
            "table_digest": self.table_digest,
            "run": self.run,
        }

    def __str__(self) -> str:
        decision = self.decision
        times_of = decision.measured_on if decision.grade == Grade.OTHER_DEVICE else ""
        step = str(decision.step)
        if times_of:
            step += f"{' shape' if decision.step == Grade.EXACT else ''}, measured on {times_of}"
        if decision.source:
            step += f", from the {decision.source}"
        is_kernel = isinstance(self.problem, KernelKey)
        lines = [
            *fitted("", problem_in_words(self.problem) if is_kernel else str(self.problem)),
            *fitted("device", str(self.device)),
            *fitted("hint", self.hint),
            *fitted("config", kernel_in_words(decision.config)),
        ]
        if not is_kernel:
            lines += fitted("kernel", decision.config.kernel)
            lines += fitted("sums", self.sum_order + (" (asked to be batch invariant)" if self.batch_invariant else ""))
        lines += fitted("step", f"{step} (grade: {decision.grade})")
        lines += fitted("why", decision.reason)
        if self.run:
            measured = "{date}, driver {driver}, CUDA {cuda}, torch {torch}, commit {commit}".format(**self.run)
            lines += fitted("measured", measured)
        if self.table_digest:
            lines += fitted("table", self.table_digest)
        if decision.chosen:
            lines.append(f"candidates{f' on {times_of}' if times_of else ''} (> is chosen)")
            lines += _choice_lines(decision.chosen, decision.runners_up)
        if decision.refusals:
            lines.append("refused")
            for item in decision.refusals:
                lines += fitted(" ", str(item), width=2)
        return "\n".join(lines)


_HINT = (
    "no GPU is available here, so this is the answer for the CPU; to get a GPU's, pass device= (on the command "
    "line --device) with a name such as H200, A100 or sm_80"
)

COLUMNS = 80
"""Width of a terminal, the limit of the lines of explain, info and diff."""


def fitted(label: str, text: str, width: int = 10) -> list[str]:
    """Lines of at most COLUMNS with a label before the text, which is indented by `width`."""
    indent = " " * (width if label else 0)
    return textwrap.wrap(
        text, COLUMNS, initial_indent=label.ljust(len(indent)), subsequent_indent=indent or "  ", break_on_hyphens=False
    )


def _choice_lines(chosen: Choice, runners_up: Iterable[Choice]) -> list[str]:
    """The choices from fast to slow, in lines of at most COLUMNS."""
    lines = []
    for choice in sorted([chosen, *runners_up], key=lambda choice: choice.median_us):
        time = f"{'>' if choice is chosen else ' '} {choice.median_us:9.2f} us"
        margin = "" if choice is chosen else f"{(choice.median_us / chosen.median_us - 1) * 100:+.1f} %"
        if choice.interval_us is not None:
            low_us, high_us = choice.interval_us
            time += f"{f'({low_us:.2f} to {high_us:.2f})':>22}"
        label = f"{time} {margin:>8} "
        lines += fitted(label, kernel_in_words(choice.config), width=len(label))
    return lines


def _choice_json(choice: Choice, chosen: Choice) -> dict[str, Any]:
    """A choice in JSON values."""
    return {
        "config": choice.config.to_json(),
        "median_us": choice.median_us,
        "spread_us": choice.spread_us,
        "run": choice.run,
        "is_stale": choice.is_stale,
        "is_modelled": choice.run == MODELLED_RUN,
        "interval_us": None if choice.interval_us is None else [float(f"{us:.4g}") for us in choice.interval_us],
        "margin": round(choice.median_us / chosen.median_us - 1, 6),
    }


def kernel_in_words(config: AnyConfig) -> str:
    """A config in words, such as "sm90: tile 64x16x256, 9 stages, swap AB"; of a kernel that this
    build lacks, only the name."""
    if isinstance(config, KernelConfig):
        return str(config)
    kernels = manifest.installed()
    record = kernels.kernels.get(config.kernel) if kernels else None
    parameters = record.config if record else {}
    words = [f"tile {'x'.join(map(str, parameters['tile']))}"] if "tile" in parameters else [config.kernel]
    if (cluster := parameters.get("cluster", [1, 1])[:2]) != [1, 1]:
        words.append(f"cluster {'x'.join(map(str, cluster))}")
    # "persistent" and "splitk" are one family (kernels/split_k.py), which shares k only if the config has splits.
    if (schedule := parameters.get("schedule", "splitk")) not in ("persistent", "splitk"):
        words.append("warp-specialized" if schedule == "warpspecialized" else schedule)
    if parameters.get("pingpong"):
        words.append("pingpong")
    if stages := parameters.get("stages") or parameters.get("num_stages"):
        words.append(f"{stages} stages")
    if warps := parameters.get("num_warps"):
        words.append(f"{warps} warps")
    if parameters.get("swap_ab"):
        words.append("swap AB")
    if parameters.get("accumulation") == "slow":
        words.append("float32 accumulation")
    if config.splits != 1:
        words.append(f"k split {config.splits} ways")
    if config.max_swizzle != 1:
        words.append(f"swizzle {config.max_swizzle}")
    if config.raster != "heuristic":
        words.append(f"raster {config.raster.replace('_', ' ')}")
    return f"{config.backend}: {', '.join(words)}"


def problem_in_words(key: AnyKey) -> str:
    """A key in words, such as "scaled_mm m=16 n=4096 k=4096 e4m3->bf16 row nt"."""
    if isinstance(key, Key):
        scales = "" if key.scales == "none" else f" {key.scales}"
        return f"{key.op} {key.shape} {key.a_dtype}->{key.out_dtype}{scales} {key.layout}"
    dtypes = ", ".join(f"{name}: {dtype}" for name, dtype in key.dtypes)
    return f"{key.op} {key.shape}" + (f" ({dtypes})" if dtypes else "")


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: str | torch.dtype | None = None,
    out_dtype: str | torch.dtype | None = None,
    scales: str = "row",
    has_bias: bool = False,
    num_groups: int = 0,
    batch: int = 1,
    layout: str = "nt",
    device: str | torch.device | None = None,
) -> Explanation:
    """Shows which config would run a problem, and why; nothing is compiled, timed or launched.

    Args:
      op: "scaled_mm", "matmul" or "grouped_mm".
      m, n, k: sizes, ints up to 2**31-1.
      dtype: of a and b, by torch's or Stoneware's name; None for "e4m3" (scaled_mm, grouped_mm) or "bf16" (matmul).
      out_dtype: "bf16", "fp16" or "fp32" (not for grouped_mm); None for `dtype` (matmul) or "bf16".
      scales: "row", "tensor", "block" (1x128 of a, 128x128 of b) or "block_1d" (1x128 of both), or a
        pair for a and b such as "tensor/row"; matmul has none and ignores it.
      has_bias: whether a bias is added; grouped_mm has none and ignores it.
      num_groups: of grouped_mm, whose m is the rows of all groups together; others ignore it.
      batch: of matmul, the number of matmuls of this shape, each with its own b; others ignore it.
      layout: of matmul, that of a and of b, "n" for row-major and "t" for column-major; "nt" is
        a @ weight.t(), "nn" the gradient of its input, "tn" that of the weight; others ignore it.
      device: the name or alias of a GPU, or a part of a name that only one GPU has, such as "H200" or
        "A100"; or a compute capability, such as "sm_80". It is a device in the tuning tables, or one in
        `gpu_models.py`, and need not be in this machine. Or "cpu", "cuda", "cuda:1" or a torch.device.
        None is the current GPU, or the CPU if no GPU is available.

    Raises:
      TypeError: a size is not an int, or the device is neither a str nor a torch.device.
      ValueError: an argument breaks a rule, or the device is unknown or not in this machine.
      ImportError: torch is not installed.
      UnsupportedError: nothing can run the problem there.
      TableError: the tuning table of this installation is damaged.
    """
    if op not in OPS:
        raise ValueError(f"op={quoted(op)} must be one of {', '.join(OPS)}; pass one of these")
    try:
        operation = operation_of(op)
    except ModuleNotFoundError as error:
        raise explained(error) from error
    if not isinstance(scales, str):
        raise TypeError(
            f"scales={quoted(scales)} must be a str, not {type(scales).__name__}; pass 'row', 'tensor' or 'tensor/row'"
        )
    options = {"scales": scales, "has_bias": has_bias, "num_groups": num_groups, "batch": batch, "layout": layout}
    dtypes = {"dtype": _dtype_name(dtype), "out_dtype": _dtype_name(out_dtype)}
    spec = spec_of(op)
    problem = spec.make_problem(
        m=m,
        n=n,
        k=k,
        **{name: options[name] for name in spec.takes},
        **{name: value for name, value in dtypes.items() if value is not None},
    )
    place = device_of(op, device)
    decision = operation.decide(problem, place)
    packaged = table_file.packaged(op) if place.kind == "cuda" else None
    return Explanation(
        op=op,
        problem=problem,
        device=place,
        decision=decision,
        sum_order=_sum_order(decision.config),
        batch_invariant=policy.is_batch_invariant(),
        table_digest=packaged.digest if packaged else "",
        hint=_HINT if device is None and place.kind == "cpu" else _tuning_hint(operation, problem, place, decision),
    )


def _tuning_hint(operation: Operation, problem: Any, device: Device, decision: Decision) -> str:
    """Which kernels a measurement could choose instead of torch's, or how to measure stale ones again."""
    if decision.grade == Grade.STALE:
        return "run `stoneware tune --stale` on such a GPU to measure its changed kernels again"
    if decision.grade != Grade.HEURISTIC or decision.config.backend != VENDOR:
        return ""
    backends = {config.backend for config in operation.candidates(problem, device)} - {VENDOR}
    titles = " and ".join(_KERNELS_OF[name] for name in _KERNELS_OF if name in backends)
    return f"run `stoneware tune` on such a GPU to let {titles} kernels compete" if titles else ""


_KERNELS_OF = {"sm90": "Hopper", TRITON_AOT: "Triton"}
"""Backend -> its kernels in words."""


def _sum_order(config: Config) -> str:
    if config.backend == VENDOR and policy.is_batch_invariant():
        return "that of our kernels, as a comparison in this process showed"
    return sum_order.of(manifest.packaged().kernels.get(config.kernel), config.splits)


def _dtype_name(dtype: str | torch.dtype | None) -> str | torch.dtype | None:
    """Stoneware's name of a dtype of torch's; another value is unchanged, and the problem checks it."""
    from stoneware.runtime.dtypes import DTYPE_NAMES

    return dtype if dtype is None or isinstance(dtype, str) else DTYPE_NAMES.get(dtype, dtype)


def device_of(op: str, device: str | torch.device | None) -> Device:
    """The device that `explain` answers for, with its rules and errors."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif isinstance(device, torch.device):
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"device={quoted(device)} must be of type 'cuda' or 'cpu'; pass one of them")
    elif not isinstance(device, str):
        raise TypeError(
            f"device={quoted(device)} must be a str, a torch.device or None, not "
            f"{type(device).__name__}; pass a name as 'NVIDIA H200', 'cuda:1' or 'cpu'"
        )
    name = str(device)
    if name in ("cpu", "cpu:0"):
        return CPU
    if name == "cuda" or name.startswith("cuda:"):
        return _cuda_device(name)
    return Device(fingerprint=_described(op, name))


def _described(op: str, name: str) -> DeviceFingerprint:
    """The GPU with a name, whose hardware need not be here."""
    capability = gpu_models.compute_capability(name)
    model = gpu_models.of_compute_capability(capability) if capability else None
    label = model.fingerprint.name if model else name
    for where, devices in _named_devices(op):
        if capability and not model:
            label = min(
                (one.names[0] for one in devices if one.fingerprint.compute_capability == capability), default=""
            )
        if devices_named(label, devices):
            return device_named(label, devices, where, _OTHER_DEVICES).fingerprint
    short_names = {model.fingerprint.name: model.short_name for model in GPU_MODELS}
    measured = {device.fingerprint.name for other in OPS for device in _devices_of(other)}
    in_tables = sorted(short_names.get(label, label) for label in measured)
    archs = sorted({model.fingerprint.compute_capability for model in GPU_MODELS})
    raise ValueError(
        f"device={quoted(name)} must name a GPU in the tuning tables ({', '.join(in_tables) or 'none'}), another "
        f"GPU model ({', '.join(short_names[label] for label in short_names if label not in measured)}) or a compute "
        "capability "
        f"({', '.join(f'sm_{major}{minor}' for major, minor in archs)}); pass one of those{_OTHER_DEVICES}"
    )


def _named_devices(op: str) -> Iterator[tuple[str, Sequence[NamedDevice]]]:
    """Where a device is searched, in words, and the devices there. Tables of other ops are read only if needed."""
    yield f"the tuning table of {op}", _devices_of(op)
    yield "the tuning tables", [device for other in OPS for device in _devices_of(other)]
    yield "the list of GPU models", GPU_MODELS


def _devices_of(op: str) -> list[DeviceTable]:
    return [device for source in sources.sources(op) for device in source.table.devices]


_OTHER_DEVICES = ", 'cuda', 'cpu' or None"


class NamedDevice(Protocol):
    """A device of a table, or a GPU model."""

    @property
    def fingerprint(self) -> DeviceFingerprint: ...

    @property
    def names(self) -> tuple[str, ...]: ...


_NamedDevice = TypeVar("_NamedDevice", bound=NamedDevice)


def device_named(name: str, devices: Sequence[_NamedDevice], where: str, others: str) -> _NamedDevice:
    """The device with this name or alias, or with it as a part of a name.

    Args:
      name: of a device.
      devices: to search.
      where: what messages call the devices.
      others: what may be passed instead of a name, for messages.

    Raises:
      ValueError: no device has such a name, or several do.
    """
    matches = devices_named(name, devices)
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(sorted({label for device in matches or devices for label in device.names}))
    rule = f"is not in {where}, which has {names or 'no device'}"
    if matches:
        rule = f"is part of the names of {len(matches)} devices in {where}: {names}"
    raise ValueError(f"device={quoted(name)} {rule}; pass one of those{others}")


def devices_named(name: str, devices: Iterable[_NamedDevice]) -> list[_NamedDevice]:
    """The first device with this name or alias; otherwise those with its words in a name, each name once.
    Only whole words match: H20 does not match H200."""
    words = normalized_name(name)
    matches: dict[str, _NamedDevice] = {}
    for device in devices:
        labels = [normalized_name(label) for label in device.names]
        if words in labels:
            return [device]
        if words and any(f" {words} " in f" {label} " for label in labels):
            matches.setdefault(device.fingerprint.name, device)
    return list(matches.values())


def _cuda_device(name: str) -> Device:
    import torch

    match = re.fullmatch(r"cuda(?::([0-9]{1,9}))?", name)
    if match is None:
        raise ValueError(f"device={quoted(name)} must be 'cuda' or 'cuda:' and a number, as 'cuda:1'")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={quoted(name)} must be a GPU that torch can use, and torch {torch.__version__} "
            "finds none; pass 'cpu', or the name of a GPU, as 'NVIDIA H200'"
        )
    ordinal = torch.cuda.current_device() if match[1] is None else int(match[1])
    if ordinal >= torch.cuda.device_count():
        raise ValueError(
            f"device={quoted(name)} must be one of the {torch.cuda.device_count()} GPUs that torch "
            f"finds; pass 'cuda:0' to 'cuda:{torch.cuda.device_count() - 1}'"
        )
    return cuda_device(ordinal)
