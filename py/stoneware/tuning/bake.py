"""The bake: committed samples and the kernel manifest in, the bytes of a tuning table out.

Pure: the same files give the same bytes on any machine, in any locale, in any order, and no GPU is
needed. Which samples count is `entries.py`, which candidate is chosen `choose.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stoneware.errors import TableError, quoted
from stoneware.kernels.config import BACKENDS_WITHOUT_KERNELS
from stoneware.kernels.key import is_kernel
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.tile_rule import check_config
from stoneware.runtime.device import by_hardware
from stoneware.specs import OPS
from stoneware.tuning import entries as entry_rules
from stoneware.tuning import samples as samples_format
from stoneware.tuning.merge import file_name
from stoneware.tuning.samples import DeviceRecord, Run, Sample

Located = tuple[str, Run, Sample]
"""A sample with its file and line, and its run."""

_LOG = logging.getLogger("stoneware.tuning")


def bake(op: str, sample_files: Iterable[str | os.PathLike[str]], manifest: Manifest | None = None) -> bytes:
    """Makes the table of one op.

    Args:
      op: one of OPS, or a decorated kernel as "module:function".
      sample_files: of any number of devices, each in its own folder: the samples of the
        op (`merge.file_name`), runs.json and device.json. Files of other ops are left alone.
      manifest: the kernels of this build; needed for an op of ours.

    Returns:
      The bytes of the table; a valid table without devices if there are no samples.

    Raises:
      TableError: a file is damaged; a sample is of a kernel that is not in the manifest (unless as
        left out or removed: such a sample is skipped), of a run that runs.json lacks, or of another
        device; the message has the file, the line and the remedy.
      ValueError: `op` is unknown, a file is of no known kind, a config of a Triton kernel is invalid, or `op` is a
        decorated kernel and all samples are of other ops.
    """
    if is_kernel(op):
        manifest = None
    elif op not in OPS:
        raise ValueError(f"op={quoted(op)} must be one of {', '.join(OPS)}, or a decorated kernel as 'module:function'")
    elif manifest is None:
        raise ValueError(f"manifest=None of op={op!r} must be the kernel manifest of the build")
    else:
        for kernel in manifest.select(op=op, backend="triton_aot"):
            check_config(kernel)
    records: list[DeviceRecord] = []
    taken: list[tuple[Run, Sample]] = []
    folder_of: dict[str, Path] = {}
    for folder in _folders(op, sample_files):
        record, located = samples_format.read_folder(folder, file_name(op))
        for place, _, sample in located:
            if sample.op != op:
                raise TableError(
                    f"{place}: op={sample.op!r} in a file of {op}; move the sample to {file_name(sample.op)}"
                )
        if manifest is not None:
            located = _of_this_build(op, record, located, manifest)
        _check(located, manifest)
        runs = {run.id: run for _, run, _ in located}
        for problem in samples_format.foreign_runs(folder, record, runs.values()):
            raise TableError(problem)
        for id in runs:
            if folder_of.setdefault(id, folder) != folder:
                raise TableError(f"{folder}: run id {id!r} is also of {folder_of[id]}; give each run its own id")
        folder_runs = {id: replace(run, device=record.fingerprint) for id, run in runs.items()}
        records.append(record)
        taken += [(folder_runs[run.id], sample) for _, run, sample in located]
    if len({*by_hardware([record.fingerprint for record in records]).values()}) < len(records):
        raise TableError(f"two folders hold samples of {op} of one device; merge them into one")
    return entry_rules.bake_samples(op, taken, manifest, records)


def _folders(op: str, sample_files: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The folders that have samples of the op, in the order of the files."""
    paths = dict.fromkeys(map(Path, sample_files))
    for path in paths:
        if path.name not in ("runs.json", "device.json") and path.suffix != ".jsonl":
            raise ValueError(
                f"{path}: a sample file is <op>.jsonl, runs.json or device.json; pass these, or a folder that is there"
            )
    folders = [path.parent for path in paths if path.name == file_name(op)]
    if is_kernel(op) and not folders:  # the name is probably misspelt
        path_of: dict[str, Path] = {}
        for path in paths:
            if path.suffix == ".jsonl":
                path_of.update((sample.op, path) for _, sample in samples_format.read_samples(path))
        if op in path_of:
            raise TableError(f"{path_of[op]}: has samples of op={op!r}; move them to {file_name(op)}")
        if ops := sorted(path_of):
            raise ValueError(
                f"op={quoted(op)} must be an op that the samples have, which are {', '.join(ops)}; correct the name, "
                f"or give the folder with its {file_name(op)}"
            )
    for folder in folders:
        for name in ("runs.json", "device.json"):
            if folder / name not in paths:
                raise TableError(f"{folder}: {name} of its folder was not given; give the whole folder")
    return folders


def _of_this_build(op: str, record: DeviceRecord, located: Sequence[Located], manifest: Manifest) -> list[Located]:
    """The samples without those of kernels that this build leaves out.

    The manifest lists what a small kernel set leaves out, and what backward = off removes. A build for fewer archs
    (`--//:cuda_archs=sm_90`, say, without the kernels of sm_90a) has no kernel of some
    backend; if it has none at all for the device, no sample counts.
    """
    name, capability = record.fingerprint.name, record.fingerprint.compute_capability
    built = {
        kernel.backend
        for kernel in manifest.kernels.values()
        if kernel.op == op and kernel.compute_capability == capability
    }
    left_out = {sample.config.backend for _, _, sample in located} - built - set(BACKENDS_WITHOUT_KERNELS)
    for backend in sorted(left_out):
        _LOG.warning(
            "samples of %s on %s are left out: this build has none of its kernels for that arch", backend, name
        )
    if left_out and not built:
        return []
    return [
        (place, run, sample)
        for place, run, sample in located
        if sample.config.backend not in left_out and not manifest.lacks(sample.config.kernel)
    ]


def _check(located: Sequence[Located], manifest: Manifest | None) -> None:
    """Refuses samples of kernels that are not known, and measurements that are there twice."""
    seen: dict[Hashable, str] = {}
    for place, _, sample in located:
        if not entry_rules.is_known(sample.config, manifest):
            raise TableError(
                f"{place}: kernel {sample.config.kernel!r} of {sample.config.backend} is not in "
                "the kernel manifest; build the kernel, or drop the samples of removed kernels with `stoneware "
                "merge FOLDER --out FOLDER --keep current`"
            )
        first = seen.setdefault(sample.identity, place)
        if first is not place:
            raise TableError(f"{place}: the same measurement as {first}; delete one of them")
