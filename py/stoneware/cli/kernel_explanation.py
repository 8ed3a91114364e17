"""What is known of a decorated kernel, from tables and stores alone: its module is not imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stoneware.kernels.key import KernelKey, Value, check_value
from stoneware.runtime.device import DeviceFingerprint, cuda_device, names_match
from stoneware.tuning import lookup, sources as table_sources
from stoneware.tuning.lookup import Found
from stoneware.tuning.sources import Source
from stoneware.tuning.table_entry import Choice


@dataclass(frozen=True, kw_only=True)
class KernelAnswer:
    """What a look-up finds for one key on one device.

    Attributes:
      key: the key arguments, with the dtypes of a family that was measured.
      device: where it would run.
      found: the entry that answers.
    """

    key: KernelKey
    device: DeviceFingerprint
    found: Found

    def as_dict(self) -> dict[str, Any]:
        found = self.found
        chosen, *runners_up = found.entry.choices
        return {
            "key": self.key.to_json(), "device": self.device.to_json(), "source": found.source,
            "layer": found.layer, "grade": found.grade, "rule": found.entry.rule,
            "answered_by": found.entry.key.to_json(), "chosen": _as_dict(chosen),
            "runners_up": [_as_dict(choice) for choice in runners_up],
        }

    def __str__(self) -> str:
        found = self.found
        chosen, *runners_up = found.entry.choices
        dtypes = ", ".join(f"{name}: {dtype}" for name, dtype in self.key.dtypes)
        lines = [
            f"{self.key.op} {self.key.shape}" + (f" ({dtypes})" if dtypes else ""),
            f"  on        {self.device}",
            f"  config    {chosen.config}",
            f"  layer     {found.layer}, from the {found.source} (grade: {found.grade})",
            f"  why       {chosen.median_us:.2f} us at {found.entry.key.shape}, run {chosen.run}; "
            f"{found.entry.rule}",
        ]
        if runners_up:
            lines.append("  runners-up")
            lines += [f"    {choice.median_us:9.2f} us  {choice.config}" for choice in runners_up]
        return "\n".join(lines)


def explain(op: str, arguments: Sequence[str], device: str | None) -> list[KernelAnswer]:
    """Asks the look-up for a decorated kernel, for every combination of dtypes that was measured.

    Args:
      op: "package.module:function".
      arguments: each "NAME=VALUE"; a VALUE is JSON, as 128 or true, else text.
      device: name or alias of a device in the tables, or "cuda" or "cuda:1"; None for each device
        in the tables.

    Raises:
      ValueError: an argument breaks its rule, or nothing is known of the kernel or of such a key.
      DriverError, UnsupportedError: `device` is a GPU that this machine does not have.
    """
    values = dict(map(_argument, arguments))
    sources = table_sources.sources(op)
    families = sorted({
        family for source in sources for entries in source.table.devices
        for family in entries.families
    })
    if not families:
        raise ValueError(
            f"op={op!r} must be a kernel that was measured, and no table or store knows it; run it "
            'under stoneware.tuning("on_miss"), or check the spelling: package.module:function'
        )
    names = sorted({", ".join(family.names) for family in families})
    if not any(set(family.names) == set(values) for family in families):
        raise ValueError(
            f"{' '.join(arguments) or 'no KEY=VALUE'} must give each key argument of {op} once: "
            f"{' or '.join(names)}; pass each as NAME=VALUE"
        )
    devices = _devices(sources, device)
    answers = list(_answers(op, values, families, devices, sources))
    if not answers:
        raise ValueError(
            f"{' '.join(arguments)} must be of a kind that was measured, and {op} was not with "
            "such values; sizes may be any integers, other values must be known ones"
        )
    return answers


def _answers(
    op: str, values: dict[str, Value], families: Sequence[KernelKey],
    devices: Sequence[DeviceFingerprint], sources: Sequence[Source],
) -> Iterator[KernelAnswer]:
    for fingerprint in devices:
        for family in families:
            if set(family.names) != set(values):
                continue
            key = KernelKey(
                op=op, names=family.names, dtypes=family.dtypes,
                values=tuple(values[name] for name in family.names),
            )
            if key.family != family:
                continue
            found = lookup.find(key, fingerprint, sources)
            if found is not None:
                yield KernelAnswer(key=key, device=fingerprint, found=found)


def _argument(text: str) -> tuple[str, Value]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"{text!r} must be KEY=VALUE, as M=4096; the keys are the kernel's key=")
    try:
        parsed = json.loads(value)
        check_value(name, parsed)
    except (ValueError, TypeError):
        parsed = value
    return name, parsed


def _devices(sources: Sequence[Source], name: str | None) -> list[DeviceFingerprint]:
    if name is not None and (match := re.fullmatch(r"cuda(?::([0-9]{1,9}))?", name)):
        return [cuda_device(int(match[1] or 0)).fingerprint]
    known = [entries for source in sources for entries in source.table.devices]
    chosen = [entries for entries in known if name is None or names_match(name, entries.names)]
    if not chosen:
        names = sorted({other for entries in known for other in entries.names})
        raise ValueError(
            f"--device={name!r} must be a device that was measured, one of {', '.join(names)}, or "
            "'cuda' or 'cuda:1'"
        )
    found: list[DeviceFingerprint] = []
    for entries in chosen:
        if not any(entries.fingerprint.same_hardware(other) for other in found):
            found.append(entries.fingerprint)
    return found


def _as_dict(choice: Choice) -> dict[str, Any]:
    return {
        "config": choice.config.to_json(), "median_us": choice.median_us,
        "spread_us": choice.spread_us, "run": choice.run, "is_drifted": choice.is_drifted,
    }
