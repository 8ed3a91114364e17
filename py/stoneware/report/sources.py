"""Loads the measurements of a report: sample folders, stores, tables, this installation."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoneware.kernels import manifest
from stoneware.kernels.key import is_kernel
from stoneware.report import measures
from stoneware.report.measures import MeasuredProblem
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.specs import OPS
from stoneware.tuning import entries, merge, sources, table_file
from stoneware.tuning.samples import STATUSES, Run, Sample
from stoneware.tuning.table import RUN_FIELDS, Table
from stoneware.tuning.table_entry import Entry

_LOG = logging.getLogger("stoneware.tuning")


@dataclasses.dataclass(kw_only=True)
class DeviceMeasurements:
    """All measurements of one device.

    Attributes:
      fingerprint, aliases: the device.
      samples: of folders and stores, each with its run.
      entries: those of tables.
      runs: run id -> RUN_FIELDS and, for samples, "clocks".
      origins: the sources with measurements of the device.
      digests: op -> digest of the table that was read.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...] = ()
    samples: list[tuple[Run, Sample]] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    origins: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def problems(self) -> list[MeasuredProblem]:
        """The entries that a bake makes of the samples, and those of the tables at other problems."""
        baked = entries.entries(self.samples, manifest.installed(), self.fingerprint.compute_capability)
        return measures.problems([*baked, *self.entries])

    @property
    def statuses(self) -> dict[str, int]:
        """Status -> number of measurements; every status, "ok" first."""
        counts = Counter(sample.status for _, sample in self.samples)
        counts["ok"] += sum(len(entry.choices) for entry in self.entries)
        return {status: counts[status] for status in STATUSES}

    @property
    def runs_in_use(self) -> list[dict[str, Any]]:
        """The runs that took any measurement, with their id and "num_samples"; oldest first."""
        counts = Counter(run.id for run, _ in self.samples)
        counts.update(choice.run for entry in self.entries for choice in entry.choices)
        unknown = dict.fromkeys(RUN_FIELDS, "unknown")
        runs = [
            {**unknown, "id": run_id, **self.runs.get(run_id, {}), "num_samples": count}
            for run_id, count in counts.items()
        ]
        return sorted(runs, key=lambda run: (run["date"], run["id"]))


def load(paths: Sequence[str | Path], *, ops: Sequence[str] = ()) -> list[DeviceMeasurements]:
    """Reads the measurements of a report.

    Args:
      paths: sample folders (of one device or of several), stores (.sqlite3) and tables (.table);
        empty for this installation's: its tables, the user's store and installed packages' tables.
        At a problem that several have, samples come before tables, and the first table counts.
      ops: the ops to keep; empty for all.

    Returns:
      One or more devices that have measurements, in the order in which they were read. Those of
      the same hardware are one, whatever their names.

    Raises:
      ValueError: nothing is left.
      TableError: a path is of another kind, or a file is damaged.
    """
    parts = [part for path in paths for part in _read(Path(path))] if paths else list(_installation(ops))
    for part in parts:
        part.samples = [(run, sample) for run, sample in part.samples if not ops or sample.op in ops]
        part.entries = [entry for entry in part.entries if not ops or entry.key.op in ops]
    devices = _join([part for part in parts if part.samples or part.entries])
    if not devices:
        names = f" of {', '.join(ops)}" if ops else ""
        raise ValueError(
            f"a report needs measurements{names}, and the sources have none; pass sample folders "
            "or stores, or measure with `stoneware tune`"
        )
    return devices


def _installation(ops: Sequence[str]) -> Iterator[DeviceMeasurements]:
    # Tables are found by the op's name, and those of decorated kernels only if the caller gives it.
    for op in (*OPS, *(op for op in ops if is_kernel(op))):
        for source in sources.sources(op):
            if source.name != sources.STORE:  # its samples, read below, have more detail than its table
                yield from _table(source.table, source.name)
    store = sources.existing_store()
    if store is not None:
        yield from _samples(store.path)


def _read(path: Path) -> Iterator[DeviceMeasurements]:
    if path.suffix == table_file.SUFFIX and path.is_file():
        yield from _table(table_file.read(path, None), str(path))
    else:
        yield from _samples(path)


def _samples(path: Path) -> Iterator[DeviceMeasurements]:
    source = merge.read_source(path)
    for problem in source.problems:
        _LOG.warning("%s", problem)
    for record, samples in source.devices:
        yield DeviceMeasurements(
            fingerprint=record.fingerprint,
            aliases=tuple(record.aliases),
            samples=samples,
            runs={
                run.id: {
                    **{name: getattr(run, name) for name in RUN_FIELDS},
                    "clocks": f"{run.sm_clock_mhz_before} to {run.sm_clock_mhz_after}",
                }
                for run in {run.id: run for run, _ in samples}.values()
            },
            origins=[str(path)],
        )


def _table(table: Table, origin: str) -> Iterator[DeviceMeasurements]:
    for device in table.devices:
        yield DeviceMeasurements(
            fingerprint=device.fingerprint,
            aliases=tuple(device.aliases),
            entries=list(device.entries()),
            runs={run_id: dict(run) for run_id, run in table.runs.items()},
            origins=[origin],
            digests={table.op: table.digest},
        )


def _join(parts: Sequence[DeviceMeasurements]) -> list[DeviceMeasurements]:
    """Joins the parts of each device; like in tables, devices are equal by `by_hardware`."""
    device_of = by_hardware(part.fingerprint for part in parts)
    devices: dict[DeviceFingerprint, DeviceMeasurements] = {}
    for part in parts:
        fingerprint = device_of[part.fingerprint]
        device = devices.setdefault(fingerprint, DeviceMeasurements(fingerprint=fingerprint))
        device.aliases = tuple(sorted({*device.aliases, *part.aliases, part.fingerprint.name} - {fingerprint.name}))
        device.origins += [origin for origin in part.origins if origin not in device.origins]
        device.samples += part.samples
        device.entries += part.entries
        device.runs.update(part.runs)
        device.digests.update(part.digests)
    return list(devices.values())
