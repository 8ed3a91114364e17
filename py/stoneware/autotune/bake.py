"""The bake: committed samples and the kernel manifest in, the bytes of a tuning table out.

Pure: the same files give the same bytes on any machine, in any locale, in any order, and no GPU is
needed. At each shape of each device:

- the newest sample of each candidate counts, and only if its status is "ok";
- nothing is chosen that measured slower than the canonical config (the op's rule of thumb at that
  shape) or than the vendor library, where those were measured;
- of the candidates whose interquartile interval, median +- spread/2, overlaps that of the fastest,
  the canonical one is chosen, else the first in the order of the rule of thumb: what noise decides
  would be decided differently by the next run;
- the others are kept as runners-up with their times.

A kernel's time does not depend on which 16-bit dtype it writes, so a shape measured with one output
dtype only also gives the entry of the other, marked by `measured_out_dtype`.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoneware.autotune import samples as sample_files_format
from stoneware.autotune import table
from stoneware.autotune.canonical import canonical_json
from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.autotune.samples import DeviceRecord, Run, Sample
from stoneware.autotune.table import Choice
from stoneware.errors import TableError
from stoneware.runtime.manifest import KernelRecord, Manifest

OPS = ("scaled_mm", "matmul")
VENDOR = "vendor"
BACKENDS_WITHOUT_KERNELS = (VENDOR, "reference")
"""Backends whose kernels are torch's, and so are not in the manifest."""

OTHER_16_BIT = {"bf16": "fp16", "fp16": "bf16"}

_LOG = logging.getLogger("stoneware.autotune")


@dataclass(frozen=True, kw_only=True)
class _DeviceSamples:
    record: DeviceRecord
    runs: Mapping[str, Run]
    located: Sequence[tuple[str, Sample]]


def bake(op: str, sample_files: Iterable[str | os.PathLike[str]], manifest: Manifest) -> bytes:
    """Makes the table of one op.

    Args:
      op: one of OPS.
      sample_files: of any number of devices, each in its own folder: `<op>.jsonl`, runs.json and
        device.json. Files of other ops are left alone.
      manifest: the kernels of this build.

    Returns:
      The bytes of the table; a valid table without devices if there is no sample.

    Raises:
      TableError: a file is damaged; a sample names a kernel that the manifest lacks, a run that
        runs.json lacks, or another device; the message has file, line and remedy.
      ValueError: `op` is unknown, or a file is of no known kind.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} must be one of {', '.join(OPS)}")
    heuristic = importlib.import_module(f"stoneware.ops.{op}.heuristic")
    devices = []
    for device in _read_devices(op, sample_files):
        device = _without_backends_left_out(op, device, manifest)
        if device is None:
            continue
        _check(op, device, manifest)
        devices.append((device, _entries(device, manifest, heuristic.preferred)))
    return table.encode(_document(op, devices))


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
        samples_path = files.get(f"{op}.jsonl")
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
    for first, second in zip(devices, devices[1:]):
        if first.record.fingerprint.same_hardware(second.record.fingerprint):
            raise TableError(
                f"two folders hold samples of {first.record.fingerprint}; merge them into one"
            )
    return devices


def _without_backends_left_out(
    op: str, device: _DeviceSamples, manifest: Manifest
) -> _DeviceSamples | None:
    """The samples without those of backends that this build leaves out for the device's arch.

    A build for fewer archs (`--//:cuda_archs=sm_90`, say, without the CUTLASS kernels of sm_90a) has
    no kernel of some backend; None if it has none at all for the device.
    """
    name = device.record.fingerprint.name
    capability = device.record.fingerprint.compute_capability
    built = {
        kernel.backend for kernel in manifest.kernels.values()
        if kernel.op == op and kernel.compute_capability == capability
    }
    if not built:
        _LOG.warning("samples of %s are left out: this build has no kernel for its arch", name)
        return None
    sampled = {sample.config.backend for _, sample in device.located}
    left_out = sampled - built - set(BACKENDS_WITHOUT_KERNELS)
    for backend in sorted(left_out):
        _LOG.warning(
            "samples of %s on %s are left out: this build has none of its kernels for that arch",
            backend, name,
        )
    return replace(device, located=[
        (place, sample) for place, sample in device.located
        if sample.config.backend not in left_out
    ])


def _check(op: str, device: _DeviceSamples, manifest: Manifest) -> None:
    """Refuses samples that cannot be what they claim to be."""
    seen: dict[tuple[Key, Config, str], str] = {}
    for place, sample in device.located:
        if sample.op != op:
            raise TableError(f"{place}: op={sample.op!r} in a file of {op}; move the sample")
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
        kernel = _kernel(sample.config, manifest)
        if kernel is None and sample.config.backend not in BACKENDS_WITHOUT_KERNELS:
            raise TableError(
                f"{place}: kernel {sample.config.kernel!r} of {sample.config.backend} is not in "
                "the kernel manifest; delete the samples of a removed kernel, or build the kernel"
            )
        earlier = seen.setdefault(sample.sort_key, place)
        if earlier != place:
            raise TableError(f"{place}: the same measurement as {earlier}; delete one of them")


def _kernel(config: Config, manifest: Manifest) -> KernelRecord | None:
    kernel = manifest.kernels.get(config.kernel)
    return kernel if kernel is not None and kernel.backend == config.backend else None


def _entries(
    device: _DeviceSamples, manifest: Manifest,
    preferred: Callable[[Key, tuple[int, int], Manifest], list[Config]],
) -> dict[Key, dict[str, Any]]:
    """The entries of a device by key, as `_document` writes them."""
    by_key: dict[Key, dict[Config, Sample]] = {}
    newest_first = sorted(
        (sample for _, sample in device.located),
        key=lambda sample: (device.runs[sample.run].date, sample.run), reverse=True,
    )
    for sample in newest_first:
        by_key.setdefault(sample.key, {}).setdefault(sample.config, sample)

    measured = {
        key: [_measured(sample, manifest) for sample in samples.values() if sample.status == "ok"]
        for key, samples in by_key.items()
    }
    entries = {}
    capability = device.record.fingerprint.compute_capability
    for key, candidates in measured.items():
        if candidates:
            entries[key] = _entry(candidates, preferred(key, capability, manifest), key.out_dtype)
        other = replace(key, out_dtype=OTHER_16_BIT.get(key.out_dtype, key.out_dtype))
        if key.a_dtype in OTHER_16_BIT or other in measured:
            continue
        derived = [
            replace(candidate, config=config) for candidate in candidates
            if (config := _other_output(candidate.config, other.out_dtype, manifest)) is not None
        ]
        if derived:
            entries[other] = _entry(derived, preferred(other, capability, manifest), key.out_dtype)
    return entries


def _measured(sample: Sample, manifest: Manifest) -> Choice:
    kernel = _kernel(sample.config, manifest)
    return Choice(
        config=sample.config, median_us=sample.median_us, spread_us=sample.spread_us,
        run=sample.run, is_drifted=kernel is not None and kernel.sha256 != sample.kernel_sha256,
    )


def _other_output(config: Config, out_dtype: str, manifest: Manifest) -> Config | None:
    """The config whose kernel differs in its output dtype only; None if it is not built."""
    kernel = _kernel(config, manifest)
    if kernel is None:
        return config
    wanted = {**kernel.config, "out": out_dtype}
    for other in manifest.select(op=kernel.op, backend=kernel.backend):
        if other.arch == kernel.arch and other.config == wanted:
            return replace(config, kernel=other.id)
    return None


def _entry(
    candidates: Sequence[Choice], preferred: Sequence[Config], measured_out_dtype: str
) -> dict[str, Any]:
    rank = {config: position for position, config in enumerate(preferred)}

    def order(candidate: Choice) -> tuple[int, Config]:
        return rank.get(candidate.config, len(rank)), candidate.config

    by_time = sorted(candidates, key=lambda candidate: (candidate.median_us, order(candidate)))
    fastest = by_time[0]
    canonical = preferred[0] if preferred else None
    limit_us = min(
        (
            candidate.median_us for candidate in candidates
            if candidate.config == canonical or candidate.config.backend == VENDOR
        ),
        default=math.inf,
    )
    near_ties = [
        candidate for candidate in by_time
        if candidate.median_us <= limit_us
        and candidate.median_us - fastest.median_us
        <= (candidate.spread_us + fastest.spread_us) / 2
    ]
    chosen = min(near_ties, key=order)
    if chosen is fastest:
        rule = f"the fastest of {len(by_time)}"
    elif chosen.config == canonical:
        rule = f"the canonical config, within the noise of the fastest of {len(by_time)}"
    else:
        rule = f"first in canonical order within the noise of the fastest of {len(by_time)}"
    return {
        "rule": rule,
        "measured_out_dtype": measured_out_dtype,
        "choices": [chosen, *(candidate for candidate in by_time if candidate is not chosen)],
    }


def _document(
    op: str, devices: Sequence[tuple[_DeviceSamples, Mapping[Key, Mapping[str, Any]]]]
) -> dict[str, Any]:
    choices = [
        choice for _, entries in devices for entry in entries.values()
        for choice in entry["choices"]
    ]
    configs = sorted({choice.config for choice in choices})
    config_idx = {config: position for position, config in enumerate(configs)}
    runs = _runs_in_use(devices, {choice.run for choice in choices})
    run_idx = {run["id"]: position for position, run in enumerate(runs)}
    return {
        "schema": table.SCHEMA,
        "op": op,
        "configs": [config.to_json() for config in configs],
        "runs": runs,
        "devices": [
            {**device.record.to_json(), "families": _families(entries, config_idx, run_idx)}
            for device, entries in devices
        ],
    }


def _runs_in_use(
    devices: Sequence[tuple[_DeviceSamples, Any]], used: set[str]
) -> list[dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for device, _ in devices:
        for run in device.runs.values():
            if run.id not in used:
                continue
            if run.id in runs:
                raise TableError(
                    f"run id {run.id!r} is used by two devices; give each run its own id"
                )
            runs[run.id] = {
                field: getattr(run, field)
                for field in ("id", "driver", "cuda", "torch", "triton", "date", "commit")
            }
    return [runs[run_id] for run_id in sorted(runs)]


def _families(
    entries: Mapping[Key, Mapping[str, Any]], config_idx: Mapping[Config, int],
    run_idx: Mapping[str, int],
) -> list[dict[str, Any]]:
    families: dict[Key, list[dict[str, Any]]] = {}
    for key in sorted(entries):
        entry = entries[key]
        families.setdefault(key.family, []).append({
            "n": key.n, "k": key.k, "m": key.m,
            "rule": entry["rule"],
            "measured_out_dtype": entry["measured_out_dtype"],
            "choices": [
                [
                    config_idx[choice.config], choice.median_us, choice.spread_us,
                    run_idx[choice.run], int(choice.is_drifted),
                ]
                for choice in entry["choices"]
            ],
        })
    return [
        {
            "key": {
                field: getattr(family, field)
                for field in ("op", "a_dtype", "b_dtype", "out_dtype", "scales", "layout")
            },
            "entries": members,
        }
        for family, members in families.items()
    ]
