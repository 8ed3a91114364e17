"""Merging samples: folders of devices and stores of users into folders of devices.

Merging is a union: the files are the same to the byte, however sources are ordered, grouped or
repeated. A device's folder is named after the device, its files after the ops:

    nvidia_h200/scaled_mm.jsonl                   an op of ours
    nvidia_h200/package.module.function.jsonl     a decorated kernel, "package.module:function"

A file has the name of its op with "." for the colon, and %XX for characters that are unsafe in a
file name. The bake expects these names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoneware.errors import TableError, quoted
from stoneware.kernels import manifest
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.tuning import entries, store, store_file, table_file
from stoneware.tuning import samples as sample_format
from stoneware.tuning.samples import DeviceRecord, Run, Sample

KEEP = ("all", "newest", "current")
"""Every sample; or of each key, config and kernel digest on a device, that of the newest run; or of
these only those of kernels that this installation has, with the bytes that they have now."""


@dataclass
class Source:
    """The samples of one place.

    Attributes:
      path: a folder of a device, a folder of such folders, or a store.
      devices: the record of each device, and its samples with their runs.
      problems: what was skipped, each with its place.
      files: the files that were read, of a folder.
      damage: why nothing of a store can be read; empty if something can.
    """

    path: Path
    devices: list[tuple[DeviceRecord, list[tuple[Run, Sample]]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    damage: str = ""


@dataclass
class Merged:
    """What `merge` did.

    Attributes:
      folders: the folder of each device that was written.
      num_samples: how many samples they hold.
      problems: what was skipped in the sources, each with its place.
    """

    folders: list[Path]
    num_samples: int
    problems: list[str]


def read_source(path: str | os.PathLike[str]) -> Source:
    """Reads what is good in a folder of a device, a folder of such folders, or a store.

    Raises:
      TableError: `path` is not one of these.
    """
    source = Source(Path(path))
    stores = [file for file in (source.path, source.path / store.FILE_NAME) if _is_store(file)]
    if _files(source.path):
        _read_device_folder(source, source.path)
    elif stores:
        _read_store(source, stores[0])
    else:
        for folder in sorted(source.path.iterdir()) if source.path.is_dir() else ():
            _read_device_folder(source, folder)
        if not source.files:
            what = "no samples" if source.path.exists() else "no such file or folder"
            raise TableError(
                f"{path}: {what}: a source is a folder with <op>.jsonl, runs.json and "
                f"device.json, a folder of such folders, or a store ({store.FILE_NAME}); where a baked "
                "table is accepted, that is a file *.table; give the path of one"
            )
    return source


def merge(sources: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, keep: str = "all") -> Merged:
    """Writes the samples of all sources into a folder per device under `out`.

    Devices of the same hardware share a folder and their names. A run that has no sample is left
    out. Each file is replaced whole, so that a kill leaves the old one or the new one.

    Args:
      sources: paths, as of `read_source`.
      out: a folder that is new, empty, or one of the sources.
      keep: one of KEEP.

    Raises:
      ValueError: `keep` or `out` breaks its rule.
      TableError: a path is not a source, two runs differ under one id, or `out` is a source with
        bad entries, which would be lost.
    """
    if keep not in KEEP:
        raise ValueError(f"keep={quoted(keep)} must be one of {', '.join(KEEP)}")
    out = Path(out)
    read = [read_source(path) for path in sources]
    for source in read:
        if source.damage:
            raise TableError(
                f"{source.path} must be a store, and is none or is damaged: {source.damage}; pass a .sqlite3 of "
                "`stoneware tune` or a folder of samples, or leave it out"
            )
    replaced = _files_to_replace(read, out)
    runs = _united_runs(read)
    devices = _devices(read, runs, keep)
    names = Counter(_folder_name(record.fingerprint) for record, _ in devices)
    folders, written = [], set()
    for record, samples in devices:
        name = _folder_name(record.fingerprint)
        if names[name] > 1:
            name += f"_{_sha256(canonical_json(record.fingerprint.to_json()))[:8]}"
        written |= _write_device_folder(out / name, record, samples, runs)
        folders.append(out / name)
    for file in replaced - written:
        file.unlink()
        if not any(file.parent.iterdir()):
            file.parent.rmdir()
    return Merged(
        folders=sorted(folders),
        num_samples=sum(len(samples) for _, samples in devices),
        problems=[problem for source in read for problem in source.problems],
    )


def file_name(op: str) -> str:
    """The name of the file with the samples of `op`; never a path to another folder."""
    return f"{table_file.safe_name(op)}.jsonl"


def _is_store(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix == store.SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def files(folder: Path) -> list[Path]:
    """The files of a device's folder, or of the folders of devices in a folder."""
    return sorted(file for place in (folder, *folder.iterdir()) for file in _files(place))


def _files(folder: Path) -> list[Path]:
    """Those files of samples, runs.json and device.json that a folder has."""
    return sorted(file for pattern in ("*.jsonl", "runs.json", "device.json") for file in folder.glob(pattern))


def _read_store(source: Source, path: Path) -> None:
    reading = store_file.read(path)
    source.damage = "" if reading.rows else reading.damage
    taken, source.problems = store_file.decoded(path, reading, None)
    by_device: dict[DeviceFingerprint, list[tuple[Run, Sample]]] = {}
    for run, sample in taken:
        by_device.setdefault(run.device, []).append((run, sample))
    source.devices = [(DeviceRecord(fingerprint=device), samples) for device, samples in by_device.items()]


def _read_device_folder(source: Source, path: Path) -> None:
    """Adds what a folder has; nothing if it is not that of a device."""
    own = _files(path)
    source.files += own
    if own and (content := sample_format.read_folder(path, problems=source.problems)) is not None:
        record, located = content
        source.devices.append((record, [(run, sample) for _, run, sample in located]))


def _files_to_replace(sources: Iterable[Source], out: Path) -> set[Path]:
    """The files under `out`, which must all be part of a source."""
    if not out.exists():
        return set()
    there = {file.resolve(): file for file in files(out)}
    unread = set(there)
    for source in sources:
        own = {file.resolve() for file in source.files} & there.keys()
        if own and source.problems:
            raise TableError(
                f"{out} is also a source, and what cannot be read of it would be lost: "
                f"{'; '.join(source.problems)}; fix it first, or merge into another folder"
            )
        unread -= own
    if unread:
        raise ValueError(
            f"out={out} holds {there[min(unread)]}, which is in none of the sources and would be "
            "overwritten; add it to the sources, or give an empty folder"
        )
    return set(there.values())


def _united_runs(sources: Iterable[Source]) -> dict[str, Run]:
    """The runs that have samples, by id: one of those that differ in whether the end and the command are known."""
    united: dict[str, Run] = {}
    path_of: dict[str, Path] = {}
    for source in sources:
        for _, taken in source.devices:
            for id, other in {run.id: run for run, _ in taken}.items():
                path, run = path_of.setdefault(id, source.path), united.get(id, other)
                ends: dict[str, Any] = {
                    name: max(vars(run)[name], vars(other)[name])
                    for name in vars(run)
                    if name == "command" or name.endswith("_after")
                    if not (vars(run)[name] and vars(other)[name])
                }
                united[id] = replace(run, **ends)
                if united[id] != replace(other, **ends):
                    raise TableError(
                        f"a run has one id, and run {id} of {path} differs from that of {source.path}: "
                        f"{run} and {other}; rename one of the two, in runs.json and in its samples"
                    )
    return united


def _devices(sources: Iterable[Source], runs: dict[str, Run], keep: str) -> list[tuple[DeviceRecord, list[Sample]]]:
    """The devices that the runs name, each with its samples.

    Devices with the same numbers share their names; `by_hardware` tells them apart by power limit. The
    runs decide, not the folder of a sample: otherwise merging twice would differ from once.
    """
    union: dict[Sample, None] = {}
    names: dict[tuple[Any, ...], set[str]] = {}
    aliases: dict[tuple[Any, ...], set[str]] = {}
    for source in sources:
        for record, taken in source.devices:
            union.update(dict.fromkeys(sample for _, sample in taken))
            for device in {runs[run.id].device for run, _ in taken}:
                names.setdefault(device.numbers, set()).add(device.name)
                if device.numbers == record.fingerprint.numbers:
                    names[device.numbers].add(record.fingerprint.name)
                    aliases.setdefault(device.numbers, set()).update(record.aliases)
    kept = list(union)
    if keep == "current":
        kernels = manifest.packaged()
        kept = [
            sample
            for sample in kept
            if entries.is_known(sample.config, kernels) and entries.is_current(sample, kernels)
        ]
    if keep != "all":
        kept = list(sample_format.newest(((runs[sample.run], sample) for sample in kept), _place).values())
    device_of = by_hardware({runs[sample.run].device for sample in kept})
    by_device: dict[DeviceFingerprint, list[Sample]] = {}
    for sample in kept:
        by_device.setdefault(device_of[runs[sample.run].device], []).append(sample)
    devices = []
    for device, samples in by_device.items():
        name = min(names[device.numbers])
        others = (names[device.numbers] | aliases.get(device.numbers, set())) - {name}
        devices.append((DeviceRecord(fingerprint=replace(device, name=name), aliases=tuple(sorted(others))), samples))
    return devices


def _place(run: Run, sample: Sample) -> tuple[Any, ...]:
    """What a sample measured, and where; the newest of each is kept."""
    return run.device.numbers, run.device.power_limit_w, sample.key, sample.config, sample.kernel_sha256


def _folder_name(device: DeviceFingerprint) -> str:
    """ "nvidia_h200"; devices that share it get a digest of theirs behind it."""
    return re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_") or "device"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write_device_folder(folder: Path, record: DeviceRecord, samples: list[Sample], runs: dict[str, Run]) -> set[Path]:
    """Writes a folder; returns its files."""
    folder.mkdir(parents=True, exist_ok=True)
    by_op: dict[str, list[Sample]] = {}
    for sample in samples:
        by_op.setdefault(file_name(sample.op), []).append(sample)
    used = {sample.run: runs[sample.run] for sample in samples}
    runs_file = folder / "runs.json"
    # While old and new files of samples are mixed, all their runs are there.
    before = sample_format.read_runs(runs_file, []) if runs_file.exists() else {}
    sample_format.write_runs(runs_file, {**before, **used}.values())
    sample_format.write_device(folder / "device.json", record)
    for name, group in by_op.items():
        sample_format.write_samples(folder / name, group)
    sample_format.write_runs(runs_file, used.values())
    return {runs_file, folder / "device.json", *(folder / name for name in by_op)}
