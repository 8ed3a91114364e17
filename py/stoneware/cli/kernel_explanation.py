"""What is known of a decorated kernel, from tables and stores; its module is not imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stoneware.explanation import candidates_as_dict, candidates_as_text, device_named, fitted, problem_in_words
from stoneware.kernels.key import KernelKey, Value, check_value
from stoneware.runtime.device import DeviceFingerprint, by_hardware, cuda_device
from stoneware.tuning import lookup
from stoneware.tuning import sources as table_sources
from stoneware.tuning.lookup import Found
from stoneware.tuning.sources import Source


def explain(op: str, arguments: Sequence[str], device: str | None) -> list[tuple[DeviceFingerprint, Found]]:
    """Looks up a decorated kernel, for every combination of dtypes that was measured.

    Args:
      op: "package.module:function".
      arguments: each "NAME=VALUE"; a VALUE is JSON, such as 128 or true, else text.
      device: name or alias of a device in the tables, or "cuda" or "cuda:1"; None for each device
        in the tables.

    Returns:
      Each device on which it would run, with the entry that answers there.

    Raises:
      ValueError: an argument breaks its rule, or nothing is known of the kernel or of such a key.
      DriverError, UnsupportedError: `device` is a GPU that this machine does not have.
    """
    values = dict(map(_argument, arguments))
    sources = table_sources.sources(op)
    measured = {family for source in sources for entries in source.table.devices for family in entries.blocks}
    families = sorted(family for family in measured if isinstance(family, KernelKey))
    if not families:
        raise ValueError(
            f"op={op!r} must be a kernel that was measured, and no table or store knows it; run it "
            'under stoneware.tuning("on_miss"), or check the spelling: package.module:function'
        )
    named = [family for family in families if set(family.names) == set(values)]
    if not named:
        names = sorted({", ".join(family.names) for family in families})
        raise ValueError(
            f"{' '.join(arguments) or 'no KEY=VALUE'} must give each key argument of {op} once: "
            f"{' or '.join(names)}; pass each as NAME=VALUE"
        )
    asked = [replace(family, values=tuple(values[name] for name in family.names)) for family in named]
    keys = [key for key, family in zip(asked, named) if key.family == family]
    answers = [
        (fingerprint, found)
        for fingerprint in _devices(sources, device)
        for key in keys
        if (found := lookup.find(key, fingerprint, sources)) is not None
    ]
    if not answers:
        raise ValueError(
            f"{' '.join(arguments)} must be of a kind that was measured, and {op} was not "
            "measured with such values; sizes may be any integers, other values must be known ones"
        )
    return answers


def as_text(device: DeviceFingerprint, found: Found) -> str:
    """An answer in lines of at most COLUMNS."""
    chosen = found.choice
    reason = f"{chosen.median_us:.2f} us at {found.entry.key.shape}, run {chosen.run}; {found.entry.rule}"
    lines = [
        *fitted("", problem_in_words(found.key)),
        *fitted("device", str(device)),
        *fitted("config", str(chosen.config)),
        *fitted("layer", f"{found.layer}, from the {found.source} (grade: {found.grade})"),
        *fitted("why", reason),
        *candidates_as_text(chosen, found.entry.choices[1:]),
    ]
    return "\n".join(lines)


def as_dict(device: DeviceFingerprint, found: Found) -> dict[str, Any]:
    """An answer as JSON values."""
    return {
        "key": found.key.to_json(),
        "device": device.to_json(),
        "source": found.source,
        "layer": found.layer,
        "grade": found.grade,
        "rule": found.entry.rule,
        "answered_by": found.entry.key.to_json(),
        **candidates_as_dict(found.choice, found.entry.choices[1:]),
    }


def _argument(text: str) -> tuple[str, Value]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"{text!r} must be KEY=VALUE, such as M=4096, with a key argument of the kernel as KEY")
    try:
        parsed = json.loads(value)
        check_value(name, parsed)
    except (ValueError, TypeError):
        parsed = value
    return name, parsed


def _devices(sources: Iterable[Source], name: str | None) -> list[DeviceFingerprint]:
    if name is not None and (match := re.fullmatch(r"cuda(?::([0-9]{1,9}))?", name)):
        fingerprint = cuda_device(int(match[1] or 0)).fingerprint
        return [fingerprint] if fingerprint else []
    known = [entries for source in sources for entries in source.table.devices]
    device_of = by_hardware(entries.fingerprint for entries in known)
    if name is not None:
        known = [device_named(name, known, "the set of measurements", ", 'cuda' or 'cuda:1'")]
    return list(dict.fromkeys(device_of[entries.fingerprint] for entries in known))
