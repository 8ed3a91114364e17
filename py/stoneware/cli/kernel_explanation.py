"""Explains a decorated kernel from tables and stores; its module is not imported."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stoneware.explanation import Explanation, device_named
from stoneware.kernels.key import KernelKey, Value, check_value
from stoneware.runtime import gpu_models
from stoneware.runtime.device import Device, DeviceFingerprint, by_hardware, cuda_device
from stoneware.tuning import lookup
from stoneware.tuning import sources as table_sources
from stoneware.tuning.sources import Source


def explain(op: str, arguments: Sequence[str], device: str | None) -> list[Explanation]:
    """Looks up a decorated kernel, for every combination of dtypes that was measured.

    Args:
      op: "package.module:function".
      arguments: each "NAME=VALUE"; a VALUE is JSON, such as 128 or true, otherwise text.
      device: name or alias of a device in the tables, a compute capability such as "sm_90", or "cuda" or
        "cuda:1"; None for each device in the tables.

    Returns:
      The choice for each device on which it would run.

    Raises:
      ValueError: an argument breaks its rule, or no table has the kernel or such a key.
      DriverError, UnsupportedError: `device` is a GPU that this machine does not have.
    """
    values = dict(map(_argument, arguments))
    sources = table_sources.sources(op)
    blocks = {kind for source in sources for device_table in source.table.devices for kind in device_table.blocks}
    kinds = sorted(kind for kind in blocks if isinstance(kind, KernelKey))
    if not kinds:
        raise ValueError(
            f"op={op!r} must be a kernel that was measured, and no table or store has it; run it "
            'under stoneware.tuning("on_miss"), or check the spelling: package.module:function'
        )
    kinds_with_names = [kind for kind in kinds if set(kind.names) == set(values)]
    if not kinds_with_names:
        names = sorted({", ".join(kind.names) for kind in kinds})
        raise ValueError(
            f"{' '.join(arguments) or 'no KEY=VALUE'} must give each key argument of {op} once: "
            f"{' or '.join(names)}; pass each as NAME=VALUE"
        )
    keys = [
        key
        for kind in kinds_with_names
        if (key := replace(kind, values=tuple(values[name] for name in kind.names))).kind == kind
    ]
    explanations = [
        Explanation(op=op, problem=key, device=Device(fingerprint=fingerprint), decision=lookup.decision(answer))
        for fingerprint, key in itertools.product(_devices(sources, device), keys)
        if (answer := lookup.find(key, fingerprint, sources)) is not None
    ]
    if not explanations:
        raise ValueError(
            f"{' '.join(arguments)} must be of a kind that was measured, and {op} was not "
            "measured with such values; sizes may be any integers, other values must have been measured"
        )
    return explanations


def _argument(text: str) -> tuple[str, Value]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"{text!r} must be KEY=VALUE, such as M=4096, with a key argument of the kernel as KEY")
    try:
        decoded = json.loads(value)
        check_value(name, decoded)
    except (ValueError, TypeError, RecursionError):  # the last from JSON that is nested too deeply
        return name, value
    return name, decoded


def _devices(sources: Iterable[Source], name: str | None) -> list[DeviceFingerprint]:
    if name is not None and (match := re.fullmatch(r"cuda(?::([0-9]{1,9}))?", name)):
        fingerprint = cuda_device(int(match[1] or 0)).fingerprint
        return [fingerprint] if fingerprint else []
    devices = [device for source in sources for device in source.table.devices]
    hardware = by_hardware(device.fingerprint for device in devices)
    if name is not None and (capability := gpu_models.compute_capability(name)):
        devices = [device for device in devices if device.fingerprint.compute_capability == capability]
        if not devices:
            names = ", ".join(sorted({one.name for one in hardware.values()}))
            raise ValueError(f"device={name!r} must be that of a measured device; pass one of {names}")
    elif name is not None:
        devices = [device_named(name, devices, "the set of measurements", ", 'cuda' or 'cuda:1'")]
    return list(dict.fromkeys(hardware[device.fingerprint] for device in devices))
