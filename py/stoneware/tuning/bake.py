"""The bake: committed samples and the kernel manifest in, the bytes of a tuning table out.

Pure: the same files give the same bytes on any machine, in any locale, in any order, and no GPU is
needed. Which samples count is `entries.py`, which candidate is chosen `choose.py`.

A sample of a kernel that is not known is refused, with its file and line: of an op of ours one that
the manifest lacks, of a decorated kernel one of a kernel that is not named to the bake.

Devices that nobody measured get predicted entries (`predict.py`) at the shapes that were measured
elsewhere. They hold kernels of ours alone, since nothing is predicted of the vendor library: a
look-up takes them as the order of our kernels among themselves, and lets the rule of thumb say
whether the vendor library comes first, because a user there loses more by a kernel of ours that
nobody raced than by the library that everybody runs. A predicted device of a compute capability
that was measured on another device has its names alone: those measurements come first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey, is_kernel
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.registry import BACKENDS_WITHOUT_KERNELS, OPS
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning import entries as entry_rules, predict, samples as sample_files_format, table
from stoneware.tuning.merge import file_name
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.table import PREDICTED_RUN, Choice, DeviceEntries, Entry

PREDICTED_RULE = "the fastest of our kernels as predicted"

_LOG = logging.getLogger("stoneware.tuning")


@dataclass(frozen=True, kw_only=True)
class _DeviceSamples:
    record: DeviceRecord
    runs: Mapping[str, Run]
    located: Sequence[tuple[str, Sample]]


def bake(
    op: str, sample_files: Iterable[str | os.PathLike[str]], manifest: Manifest | None = None,
    kernels: Iterable[str] = (),
) -> bytes:
    """Makes the table of one op.

    Args:
      op: one of OPS, or a decorated kernel as "module:function".
      sample_files: of any number of devices, each in its own folder: the samples of the
        op (`merge.file_name`), runs.json and device.json. Files of other ops are left alone.
      manifest: the kernels of this build; needed for an op of ours.
      kernels: the decorated kernels that there are, as "module:function".

    Returns:
      The bytes of the table; a valid table without devices if there is no sample.

    Raises:
      TableError: a file is damaged; a sample names a kernel that is not known, a run that runs.json
        lacks, or another device; the message has file, line and remedy.
      ValueError: `op` is unknown, or a file is of no known kind.
    """
    _check_op(op, manifest)
    kernels = frozenset(kernels)
    devices = []
    for device in _read_devices(op, sample_files):
        device = _without_backends_left_out(op, device, manifest)
        if device is not None:
            _check(op, device, manifest, kernels)
            devices.append(device)
    measured = [
        entry_rules.device_entries(
            op, device.record.fingerprint, device.record.aliases,
            [(device.runs[sample.run], sample) for _, sample in device.located],
            None if is_kernel(op) else manifest,
        )
        for device in devices
    ]
    predicted = [] if is_kernel(op) else _predicted(measured, manifest)
    return table.encode(op, [*measured, *predicted], _runs(devices))


def _check_op(op: str, manifest: Manifest | None) -> None:
    if is_kernel(op):
        return
    if op not in OPS:
        raise ValueError(
            f"op={op!r} must be one of {', '.join(OPS)}, or a decorated kernel as 'module:function'"
        )
    if manifest is None:
        raise ValueError(f"manifest=None of op={op!r} must be the kernel manifest of the build")


def _read_devices(
    op: str, sample_files: Iterable[str | os.PathLike[str]]
) -> list[_DeviceSamples]:
    folders: dict[Path, dict[str, Path]] = {}
    for path in map(Path, sample_files):
        if path.name not in ("runs.json", "device.json") and path.suffix != ".jsonl":
            raise ValueError(f"{path}: a sample file is <op>.jsonl, runs.json or device.json")
        folders.setdefault(path.parent, {})[path.name] = path
    devices = []
    for folder, files in folders.items():
        samples_path = files.get(file_name(op))
        if samples_path is None:
            continue
        for name in ("runs.json", "device.json"):
            if name not in files:
                raise TableError(
                    f"{samples_path}: {name} of its folder was not given; give the whole folder"
                )
        devices.append(_DeviceSamples(
            record=sample_files_format.read_device(files["device.json"]),
            runs=sample_files_format.read_runs(files["runs.json"]),
            located=[
                (f"{samples_path}:{line_number}", sample)
                for line_number, sample in sample_files_format.read_samples(samples_path)
            ],
        ))
    devices.sort(key=lambda device: canonical_json(device.record.to_json()))
    for position, first in enumerate(devices):
        for second in devices[position + 1:]:
            if first.record.fingerprint.same_hardware(second.record.fingerprint):
                raise TableError(
                    f"two folders hold samples of {first.record.fingerprint}; merge them into one"
                )
    return devices


def _without_backends_left_out(
    op: str, device: _DeviceSamples, manifest: Manifest | None
) -> _DeviceSamples | None:
    """The samples without those of backends that this build leaves out for the device's arch.

    A build for fewer archs (`--//:cuda_archs=sm_90`, say, without the CUTLASS kernels of sm_90a) has
    no kernel of some backend; None if it has none at all for the device.
    """
    if is_kernel(op):
        return device
    name = device.record.fingerprint.name
    capability = device.record.fingerprint.compute_capability
    built = {
        kernel.backend for kernel in manifest.kernels.values()
        if kernel.op == op and kernel.compute_capability == capability
    }
    if not built:
        _LOG.warning("samples of %s are left out: this build has no kernel for its arch", name)
        return None
    sampled = {
        sample.config.backend for _, sample in device.located if not is_kernel(sample.op)
    }
    left_out = sampled - built - set(BACKENDS_WITHOUT_KERNELS)
    for backend in sorted(left_out):
        _LOG.warning(
            "samples of %s on %s are left out: this build has none of its kernels for that arch",
            backend, name,
        )
    return replace(device, located=[
        (place, sample) for place, sample in device.located
        if is_kernel(sample.op) or sample.config.backend not in left_out
    ])


def _check(
    op: str, device: _DeviceSamples, manifest: Manifest | None, kernels: frozenset[str]
) -> None:
    """Refuses samples that cannot be what they claim to be."""
    seen: dict[tuple[AnyKey, AnyConfig, str, str], str] = {}
    for place, sample in device.located:
        if sample.op != op:
            raise TableError(
                f"{place}: op={sample.op!r} in a file of {op}; move the sample to "
                f"{file_name(sample.op)}"
            )
        run = device.runs.get(sample.run)
        if run is None:
            raise TableError(
                f"{place}: run={sample.run!r} is not in runs.json, which has "
                f"{sorted(device.runs)}; add the run or delete its samples"
            )
        if not run.device.same_hardware(device.record.fingerprint):
            raise TableError(
                f"{place}: run {sample.run!r} was taken on {run.device}, the folder is of "
                f"{device.record.fingerprint}; move the sample to the folder of its device"
            )
        if is_kernel(op) and op not in kernels:
            raise TableError(
                f"{place}: kernel {op!r} is none of those that are named to the bake, "
                f"{', '.join(sorted(kernels)) or 'none'}; delete the samples of a removed kernel, "
                "or name it"
            )
        if not is_kernel(op) and not entry_rules.is_known(sample.config, manifest):
            raise TableError(
                f"{place}: kernel {sample.config.kernel!r} of {sample.config.backend} is not in "
                "the kernel manifest; delete the samples of a removed kernel, or build the kernel"
            )
        earlier = seen.setdefault((*sample.sort_key, sample.kernel_sha256), place)
        if earlier != place:
            raise TableError(f"{place}: the same measurement as {earlier}; delete one of them")


def _runs(devices: Sequence[_DeviceSamples]) -> list[dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for device in devices:
        used = {sample.run for _, sample in device.located}
        for run in device.runs.values():
            if run.id not in used:
                continue
            if run.id in runs:
                raise TableError(
                    f"run id {run.id!r} is used by two devices; give each run its own id"
                )
            runs[run.id] = {field: getattr(run, field) for field in table.RUN_FIELDS}
    return list(runs.values())


def _predicted(measured: Sequence[DeviceEntries], manifest: Manifest) -> list[DeviceEntries]:
    """Entries of the devices that nobody measured, at the problems of those that were."""
    keys = sorted({entry.key for device in measured for entry in device.entries})
    if not keys:
        return []
    capabilities = {device.fingerprint.compute_capability for device in measured}
    found = []
    for device in predict.PREDICTED_DEVICES:
        if any(other.fingerprint.same_hardware(device.fingerprint) for other in measured):
            continue
        is_near_another = device.fingerprint.compute_capability in capabilities
        entries = [] if is_near_another else [
            Entry(
                key=key, rule=PREDICTED_RULE, measured_out_dtype="",
                choices=tuple(
                    Choice(
                        # No prediction is better than three digits, and a table is read often.
                        config=config, median_us=float(f"{time_us:.3g}"), spread_us=0.0,
                        run=PREDICTED_RUN,
                    )
                    for config, time_us in times
                ),
            )
            for key in keys
            if (times := predict.predict(key, device, manifest.kernels.values()))
        ]
        if entries or is_near_another:
            found.append(DeviceEntries(
                fingerprint=device.fingerprint, aliases=device.aliases, is_predicted=True,
                entries=entries,
            ))
    return sorted(found, key=lambda device: canonical_json(device.fingerprint.to_json()))
