"""Comparing what two sources or tables choose, and verifying them.

Measurements differ from run to run; what counts is whether another config is chosen, and its cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoneware.errors import TableError
from stoneware.kernels import manifest
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey
from stoneware.runtime import regular_file
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import entries, merge, table_file
from stoneware.tuning import samples as sample_format
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.table_entry import Entry

_Chosen = dict[tuple[str, str, AnyKey], tuple[AnyConfig, float]]
"""(device, op, key) -> chosen config, its median in microseconds."""


@dataclass(frozen=True)
class Difference:
    """A problem at which two sources differ.

    Attributes:
      device: its numbers and name.
      key: the problem.
      config_a, config_b: what each chooses; None where it has no entry.
      median_us_a, median_us_b: as each measured its own choice; 0 where it has no entry.
    """

    device: str
    key: AnyKey
    config_a: AnyConfig | None
    median_us_a: float
    config_b: AnyConfig | None
    median_us_b: float

    def as_dict(self) -> dict[str, Any]:
        return {name: value.to_json() if hasattr(value, "to_json") else value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How two sources differ.

    Attributes:
      only_a, only_b: problems that one of them has.
      changed: problems at which another config is chosen.
      num_common: problems that both have.
      skipped: what could not be read, each with its place; the other fields ignore it.
    """

    only_a: tuple[Difference, ...]
    only_b: tuple[Difference, ...]
    changed: tuple[Difference, ...]
    num_common: int
    skipped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed or self.skipped)

    @property
    def fraction(self) -> float:
        """The part of the common problems at which another config is chosen; 0 without any."""
        return len(self.changed) / self.num_common if self.num_common else 0.0

    def as_dict(self) -> dict[str, Any]:
        listed = {
            name: [difference.as_dict() for difference in getattr(self, name)]
            for name in ("only_a", "only_b", "changed")
        }
        return {"num_common": self.num_common, "fraction": self.fraction, **listed, "skipped": list(self.skipped)}


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Differences:
    """Compares what two paths choose; each is a table (.table), a sample folder or a store.

    Samples choose what a table baked from them would; without a manifest in this installation no
    heuristic settles a tie.

    Raises:
      TableError: a path is not one of these, or a table or the manifest is damaged.
    """
    skipped: list[str] = []
    chosen_a, chosen_b = (_chosen(Path(path), skipped) for path in (a, b))
    nothing = None, 0.0
    sides = [
        Difference(device, key, *chosen_a.get((device, op, key), nothing), *chosen_b.get((device, op, key), nothing))
        for device, op, key in sorted(chosen_a | chosen_b)
    ]
    return Differences(
        only_a=tuple(side for side in sides if side.config_b is None),
        only_b=tuple(side for side in sides if side.config_a is None),
        changed=tuple(side for side in sides if side.config_a and side.config_b and side.config_a != side.config_b),
        num_common=len(chosen_a.keys() & chosen_b.keys()),
        skipped=tuple(dict.fromkeys(skipped)),
    )


def verify(path: str | os.PathLike[str], remedy: str = table_file.REMEDY) -> list[str]:
    """What is wrong with a table (.table), sample folders or a store, each with its place.

    Args:
      path: which.
      remedy: what to do about a damaged table.

    Raises:
      TableError: `path` is not one of these.
    """
    path = Path(path)
    if _is_table(path):
        try:
            table_file.check(table_file.read(path, None, remedy))
        except TableError as error:
            return [str(error)]
        return []
    source = merge.read_source(path)
    problems = list(source.problems)
    for file in source.files:
        if file.suffix == ".jsonl":
            problems += _problems_of_file(file)
    for record, taken in source.devices:
        runs = {run.id: run for run, _ in taken}
        problems += sample_format.foreign_runs(source.path, record, runs.values())
    return problems


def _problems_of_file(file: Path) -> list[str]:
    bad: list[str] = []
    samples = [sample for _, sample in sample_format.read_samples(file, bad)]
    problems = []
    strangers = sorted({sample.op for sample in samples if merge.file_name(sample.op) != file.name})
    if strangers:
        problems.append(
            f"{file}: holds samples of {', '.join(strangers)}, which belong in "
            f"{', '.join(map(merge.file_name, strangers))}"
        )
    text = sample_format.samples_text(dict.fromkeys(samples))
    if not bad and regular_file.read(file) != text.encode("ascii"):
        problems.append(f"{file}: not sorted, not canonical JSON, or a sample is there twice; merge it into itself")
    return problems


def _is_table(path: Path) -> bool:
    return path.suffix == table_file.SUFFIX and not path.is_dir()


def _chosen(path: Path, skipped: list[str]) -> _Chosen:
    """What a path chooses; what could not be read there is added to `skipped`."""
    devices: list[tuple[DeviceFingerprint, Iterable[Entry]]] = []
    if _is_table(path):
        devices += [(device.fingerprint, device.entries()) for device in table_file.read(path, None).devices]
    else:
        source = merge.read_source(path)
        skipped += source.problems
        by_device: dict[tuple[Any, ...], list[tuple[Run, Sample]]] = {}
        for _, taken in source.devices:
            for run, sample in taken:
                by_device.setdefault((run.device.name, run.device.numbers), []).append((run, sample))
        for taken in by_device.values():
            device = taken[0][0].device
            devices.append((device, entries.entries(taken, manifest.installed(), device.compute_capability)))
    chosen: _Chosen = {}
    for fingerprint, entries_there in devices:
        # Without the power limit, which one of two sources may not know.
        name = str(replace(fingerprint, power_limit_w=0))
        for entry in entries_there:
            first = entry.choices[0]
            # Each source has an entry of a decorated kernel, the newest first.
            chosen.setdefault((name, entry.key.op, entry.key), (first.config, first.median_us))
    return chosen
