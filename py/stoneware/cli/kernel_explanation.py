"""Explains a decorated kernel from tables and stores; its module is not imported."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stoneware.explanation import Explanation, device_named
from stoneware.kernels.key import KernelKey, Value, check_value
from stoneware.runtime.device import Device, DeviceFingerprint, by_hardware, cuda_device
from stoneware.tuning import lookup
from stoneware.tuning import sources as table_sources
from stoneware.tuning.sources import Source


def explain(op: str, arguments: Sequence[str], device: str | None) -> list[Explanation]:
    """Looks up a decorated kernel, for every combination of dtypes that was measured.

    Args:
      op: "package.module:function".
      arguments: each "NAME=VALUE"; a VALUE is JSON, such as 128 or true, otherwise text.
      device: name or alias of a device in the tables, or "cuda" or "cuda:1"; None for each device
        in the tables.

    Returns:
      The choice for each device on which it would run.

    Raises:
      ValueError: an argument breaks its rule, or no table has the kernel or such a key.
      DriverError, UnsupportedError: `device` is a GPU that this machine does not have.
    """
    values = dict(map(_argument, arguments))
    sources = table_sources.sources(op)
    measured = {family for source in sources for entries in source.table.devices for family in entries.blocks}
    families = sorted(family for family in measured if isinstance(family, KernelKey))
    if not families:
        raise ValueError(
            f"op={op!r} must be a kernel that was measured, and no table or store has it; run it "
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
    keys = [key for key, family in zip(asked, named) if key.kind == family]
    answers = []
    for fingerprint, key in itertools.product(_devices(sources, device), keys):
        if (found := lookup.find(key, fingerprint, sources)) is not None:
            where, decision = Device(fingerprint=fingerprint), lookup.decision(found)
            run = dict(decision.run) or None
            answers.append(Explanation(op=op, problem=key, device=where, decision=decision, run=run))
    if not answers:
        raise ValueError(
            f"{' '.join(arguments)} must be of a kind that was measured, and {op} was not "
            "measured with such values; sizes may be any integers, other values must have been measured"
        )
    return answers


def _argument(text: str) -> tuple[str, Value]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"{text!r} must be KEY=VALUE, such as M=4096, with a key argument of the kernel as KEY")
    try:
        parsed = json.loads(value)
        check_value(name, parsed)
    except (ValueError, TypeError, RecursionError):  # the last from JSON that is nested too deeply
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
