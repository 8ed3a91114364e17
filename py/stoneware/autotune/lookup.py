"""Which config runs a problem: the layers are asked in order and the first that answers wins.

    1. argument        the caller's config=
    2. exact           the table's entry for this shape
    3. nearest m       the entry for the same n and k with the nearest m, in log space
    4. nearest shape   the nearest entry of the family, in log space over (n, k, m)
    5. heuristic       the op's rule of thumb
    6. default         the first config that a backend offers

An answer that the installation or the device refuses is kept as a Refusal and the next choice is
asked. Pure: no compile, no benchmark, no synchronisation, no allocation on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.autotune.table import Choice, DeviceTable, Entry, Table
from stoneware.errors import UnsupportedError
from stoneware.runtime.device import Device

LAYERS = ("argument", "exact", "nearest m", "nearest shape", "heuristic", "default")
GRADES = (
    "argument", "exact", "16-bit output", "drifted kernel", "nearest m", "nearest shape",
    "other device", "heuristic", "default",
)
"""How far a decision can be trusted, best first; of several that apply the last is given."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A config or a whole backend that was asked and refused.

    Attributes:
      what: the config, or the backend's name.
      layer: one of LAYERS; empty for a backend, which is refused in every layer.
      reason: a sentence.
    """

    what: str
    layer: str = ""
    reason: str

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.layer})' if self.layer else ''}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The config that runs a problem, and why.

    Attributes:
      config: what runs.
      layer: one of LAYERS.
      grade: one of GRADES.
      reason: a sentence.
      chosen: the measurement behind the config, for layers 2 to 4.
      runners_up: the other candidates at the entry's shape, fast ones first.
      refusals: what was asked before and refused.
    """

    config: Config
    layer: str
    grade: str
    reason: str
    chosen: Choice | None = None
    runners_up: tuple[Choice, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def decide(
    key: Key,
    device: Device,
    *,
    argument: Config | None,
    table: Table | None,
    heuristic: Sequence[Config],
    heuristic_reason: str,
    defaults: Sequence[Config],
    refusal: Callable[[Config], str | None],
    refused_backends: Sequence[Refusal] = (),
    backend: str | None = None,
) -> Decision:
    """Chooses a config for `key` on `device`.

    Args:
      key: the problem.
      device: where it runs.
      argument: the caller's own config; if it is refused, nothing else is tried.
      table: the baked table; None where no table applies, as on a CPU.
      heuristic: configs by the op's rule of thumb, best first, and `heuristic_reason`, that rule.
      defaults: configs of every backend that supports the problem, the canonical one first.
      refusal: why a config cannot run here, or None.
      refused_backends: the backends that do not support the problem at all.
      backend: the one that the caller asked for, if any; the others are refused for that.

    Raises:
      UnsupportedError: every layer refused; the message lists each refusal, or only those of
        `backend` if one was asked for.
    """
    refusals = list(refused_backends)

    def accepts(config: Config, layer: str) -> bool:
        reason = refusal(config)
        if reason is not None:
            item = Refusal(what=str(config), layer=layer, reason=reason)
            if item not in refusals:
                refusals.append(item)
        return reason is None

    if argument is not None:
        if accepts(argument, "argument"):
            return Decision(
                config=argument, layer="argument", grade="argument", reason="the caller gave it"
            )
        raise UnsupportedError(f"config={argument} cannot run {key.op} {key.shape} on {device}: "
                               f"{refusals[-1].reason}; leave config out to let the table choose")

    found = table.device(device.fingerprint) if table and device.fingerprint else None
    if found is not None:
        device_table, is_same_device = found
        for layer, entry in _entries(key, device_table):
            for choice in entry.choices:
                if accepts(choice.config, layer):
                    return _from_entry(
                        key, layer, entry, choice, device_table, is_same_device, tuple(refusals)
                    )
    for config in heuristic:
        if accepts(config, "heuristic"):
            return Decision(
                config=config, layer="heuristic", grade="heuristic", reason=heuristic_reason,
                refusals=tuple(refusals),
            )
    for config in defaults:
        if accepts(config, "default"):
            return Decision(
                config=config, layer="default", grade="default",
                reason="no measurement and no rule of thumb applies; the first that can run here",
                refusals=tuple(refusals),
            )
    if backend is not None:
        reasons = dict.fromkeys(
            item.reason for item in refusals
            if item.what == backend or item.what.startswith(f"{backend}:")
        )
        raise UnsupportedError(
            f"backend={backend!r} cannot run {key.op} {key.shape} on {device}: "
            f"{'; '.join(reasons) or 'it has no config for it'}; leave backend out to let another "
            "one run"
        )
    raise UnsupportedError(
        f"no backend can run {key.op} {key.shape} on {device}:"
        + "".join(f"\n  {item}" for item in refusals)
    )


def _entries(key: Key, device_table: DeviceTable) -> Iterator[tuple[str, Entry]]:
    """The entries that may answer, nearest first, at most one a layer."""
    family = key.family
    m_values = device_table.m_values(family, key.n, key.k)
    if key.m in m_values:
        yield "exact", device_table.entry(family, key.n, key.k, key.m)
    others = [m for m in m_values if m != key.m]
    if others:
        m = min(others, key=lambda m: (abs(math.log(m / key.m)), -m))
        yield "nearest m", device_table.entry(family, key.n, key.k, m)
    shapes = [shape for shape in device_table.shapes(family) if shape[:2] != (key.n, key.k)]
    if shapes:
        n, k, m = min(shapes, key=lambda shape: (_distance(key, shape), shape))
        yield "nearest shape", device_table.entry(family, n, k, m)


def _distance(key: Key, shape: tuple[int, int, int]) -> float:
    n, k, m = shape
    return math.hypot(math.log(n / key.n), math.log(k / key.k), math.log(m / key.m))


def _from_entry(
    key: Key, layer: str, entry: Entry, chosen: Choice, device_table: DeviceTable,
    is_same_device: bool, refusals: tuple[Refusal, ...],
) -> Decision:
    grades = [layer]
    notes = [f"{chosen.median_us:.2f} us on {device_table.fingerprint.name}, run {chosen.run}"]
    if layer != "exact":
        notes.append(f"measured at {entry.key.shape}")
    notes.append(entry.rule if chosen is entry.choices[0] else "the choices before it were refused")
    if entry.measured_out_dtype != key.out_dtype:
        grades.append("16-bit output")
        notes.append(f"measured with {entry.measured_out_dtype} output, {key.out_dtype} asked")
    if chosen.is_drifted:
        grades.append("drifted kernel")
        notes.append("the kernel was rebuilt with other bytes since")
    if not is_same_device:
        grades.append("other device")
        notes.append("the nearest device that was measured")
    return Decision(
        config=chosen.config, layer=layer, grade=max(grades, key=GRADES.index),
        reason="; ".join(notes), chosen=chosen,
        runners_up=tuple(choice for choice in entry.choices if choice is not chosen),
        refusals=refusals,
    )
