"""The bake: committed samples and the kernel manifest in, the bytes of a tuning table out.

Pure: the same files give the same bytes on any machine, in any locale, in any order, and no GPU is
needed. Which samples count is `entries.py`, which candidate is chosen `choose.py`.

A sample of a kernel that is not known is refused, with its file and line: of an op of ours one that
the manifest lacks, of a decorated kernel one of a kernel that is not named to the bake. A sample of a
kernel that the manifest lists as left out or removed is skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey, is_kernel
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.registry import BACKENDS_WITHOUT_KERNELS, OPS
from stoneware.runtime.device import by_hardware
from stoneware.tuning import entries as entry_rules
from stoneware.tuning import samples as sample_files_format
from stoneware.tuning import table_file
from stoneware.tuning.merge import file_name
from stoneware.tuning.samples import DeviceRecord, Run, Sample

_LOG = logging.getLogger("stoneware.tuning")


@dataclass(frozen=True, kw_only=True)
class _DeviceSamples:
    record: DeviceRecord
    runs: Mapping[str, Run]
    located: Sequence[tuple[str, Sample]]


def bake(
    op: str,
    sample_files: Iterable[str | os.PathLike[str]],
    manifest: Manifest | None = None,
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
    for read in _read_devices(op, sample_files):
        if (device := _without_backends_left_out(op, read, manifest)) is not None:
            _check(op, device, manifest, kernels)
            devices.append(device)
    _check_runs(devices)
    samples = []
    for device in devices:
        runs = {run.id: replace(run, device=device.record.fingerprint) for run in device.runs.values()}
        samples += [(runs[sample.run], sample) for _, sample in device.located]
    return table_file.encode(
        entry_rules.make_table(op, samples, None if is_kernel(op) else manifest, [device.record for device in devices])
    )


def _check_op(op: str, manifest: Manifest | None) -> None:
    if is_kernel(op):
        return
    if op not in OPS:
        raise ValueError(f"op={op!r} must be one of {', '.join(OPS)}, or a decorated kernel as 'module:function'")
    if manifest is None:
        raise ValueError(f"manifest=None of op={op!r} must be the kernel manifest of the build")


def _read_devices(op: str, sample_files: Iterable[str | os.PathLike[str]]) -> list[_DeviceSamples]:
    folders: dict[Path, dict[str, Path]] = {}
    for path in map(Path, sample_files):
        if path.name not in ("runs.json", "device.json") and path.suffix != ".jsonl":
            raise ValueError(
                f"{path}: a sample file is <op>.jsonl, runs.json or device.json; pass these, or a folder that is there"
            )
        folders.setdefault(path.parent, {})[path.name] = path
    devices = []
    for files in folders.values():
        samples_path = files.get(file_name(op))
        if samples_path is None:
            continue
        for name in ("runs.json", "device.json"):
            if name not in files:
                raise TableError(f"{samples_path}: {name} of its folder was not given; give the whole folder")
        devices.append(
            _DeviceSamples(
                record=sample_files_format.read_device(files["device.json"]),
                runs=sample_files_format.read_runs(files["runs.json"]),
                located=[
                    (f"{samples_path}:{line_number}", sample)
                    for line_number, sample in sample_files_format.read_samples(samples_path)
                ],
            )
        )
    device_of = by_hardware([device.record.fingerprint for device in devices])
    seen = set()
    for device in devices:
        found = device_of[device.record.fingerprint]
        if found in seen:
            raise TableError(f"two folders hold samples of {found}; merge them into one")
        seen.add(found)
    return devices


def _without_backends_left_out(op: str, device: _DeviceSamples, manifest: Manifest | None) -> _DeviceSamples | None:
    """The samples without those of kernels that this build leaves out.

    The manifest lists what a small kernel set leaves out, and what backward = off removes. A build for fewer archs
    (`--//:cuda_archs=sm_90`, say, without the CUTLASS kernels of sm_90a) has no kernel of some
    backend; None if it has none at all for the device.
    """
    if is_kernel(op):
        return device
    name = device.record.fingerprint.name
    capability = device.record.fingerprint.compute_capability
    built = {
        kernel.backend
        for kernel in manifest.kernels.values()
        if kernel.op == op and kernel.compute_capability == capability
    }
    sampled = {sample.config.backend for _, sample in device.located if not is_kernel(sample.op)}
    left_out = sampled - built - set(BACKENDS_WITHOUT_KERNELS)
    if left_out and not built:
        _LOG.warning("samples of %s are left out: this build has no kernel of %s for its arch", name, op)
        return None
    for backend in sorted(left_out):
        _LOG.warning(
            "samples of %s on %s are left out: this build has none of its kernels for that arch", backend, name
        )
    return replace(
        device,
        located=[
            (place, sample)
            for place, sample in device.located
            if is_kernel(sample.op)
            or (sample.config.backend not in left_out and not manifest.lacks(sample.config.kernel))
        ],
    )


def _check(op: str, device: _DeviceSamples, manifest: Manifest | None, kernels: frozenset[str]) -> None:
    """Refuses samples that cannot be what they claim to be."""
    seen: dict[tuple[AnyKey, AnyConfig, str, str], str] = {}
    for place, sample in device.located:
        if sample.op != op:
            raise TableError(f"{place}: op={sample.op!r} in a file of {op}; move the sample to {file_name(sample.op)}")
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
                "the kernel manifest; build the kernel, or drop the samples of removed kernels with `stoneware "
                "merge FOLDER --out FOLDER --keep current`"
            )
        mark = (*sample.sort_key, sample.kernel_sha256)
        if mark in seen:
            raise TableError(f"{place}: the same measurement as {seen[mark]}; delete one of them")
        seen[mark] = place


def _check_runs(devices: Sequence[_DeviceSamples]) -> None:
    seen: set[str] = set()
    for device in devices:
        used = {sample.run for _, sample in device.located}
        for run_id in sorted(used & seen):
            raise TableError(f"run id {run_id!r} is used by two devices; give each run its own id")
        seen |= used
