"""Where a report's measurements come from: sample folders, stores, tables, this installation."""

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
from stoneware.report.measures import Problem
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.specs import OPS
from stoneware.tuning import entries, merge, sources, table_file
from stoneware.tuning.samples import STATUSES, Run, Sample
from stoneware.tuning.table import RUN_FIELDS, Table
from stoneware.tuning.table_entry import Entry

_LOG = logging.getLogger("stoneware.tuning")


@dataclasses.dataclass(kw_only=True)
class DeviceMeasurements:
    """All that was measured on one device.

    Attributes:
      fingerprint, aliases: the device.
      taken: samples of folders and stores, each with its run.
      entries: those of tables.
      runs: run id -> RUN_FIELDS and, where known, "clocks".
      origins: the sources that had something of the device.
      digests: op -> digest of the table that was read.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...] = ()
    taken: list[tuple[Run, Sample]] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    origins: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def problems(self) -> list[Problem]:
        """What a table of the samples would have, and what the tables have at other problems."""
        kernels = manifest.installed()
        made = entries.entries(self.taken, kernels, self.fingerprint.compute_capability)
        return measures.problems([*made, *self.entries])

    @property
    def statuses(self) -> dict[str, int]:
        """Status -> number of measurements; every status, "ok" first."""
        found = Counter(sample.status for _, sample in self.taken)
        found["ok"] += sum(len(entry.choices) for entry in self.entries)
        return {status: found[status] for status in STATUSES}

    @property
    def runs_in_use(self) -> list[dict[str, Any]]:
        """The runs that took any measurement, with their id and "num_samples"; oldest first."""
        counts = Counter(run.id for run, _ in self.taken)
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
      One or more devices that have measurements, in the order in which they were found. Those of
      the same hardware are one, whatever their names.

    Raises:
      ValueError: nothing is left.
      TableError: a path is of no known kind, or a file is damaged.
    """
    parts = [part for path in paths for part in _of_path(Path(path))] if paths else list(_of_installation(ops))
    for part in parts:
        part.taken = [(run, sample) for run, sample in part.taken if not ops or sample.op in ops]
        part.entries = [entry for entry in part.entries if not ops or entry.key.op in ops]
    known = _joined([part for part in parts if part.taken or part.entries])
    if not known:
        of = f" of {', '.join(ops)}" if ops else ""
        raise ValueError(
            f"a report needs measurements{of}, and the sources have none; pass sample folders "
            "or stores, or measure with `stoneware tune`"
        )
    return known


def _of_installation(ops: Sequence[str]) -> Iterator[DeviceMeasurements]:
    # Tables of decorated kernels are found by name only.
    for op in (*OPS, *(op for op in ops if is_kernel(op))):
        for source in sources.sources(op):
            if source.name != sources.STORE:  # its samples have more detail than its table
                yield from _of_table(source.table, source.name)
    store = sources.existing_store()
    if store is not None:
        yield from _of_samples(store.path)


def _of_path(path: Path) -> Iterator[DeviceMeasurements]:
    if path.suffix == table_file.SUFFIX and path.is_file():
        yield from _of_table(table_file.read(path, None), str(path))
    else:
        yield from _of_samples(path)


def _of_samples(path: Path) -> Iterator[DeviceMeasurements]:
    source = merge.read_source(path)
    for problem in source.problems:
        _LOG.warning("%s", problem)
    for record, taken in source.devices:
        yield DeviceMeasurements(
            fingerprint=record.fingerprint,
            aliases=tuple(record.aliases),
            taken=taken,
            runs={
                run.id: {
                    **{name: getattr(run, name) for name in RUN_FIELDS},
                    "clocks": f"{run.sm_clock_mhz_before} to {run.sm_clock_mhz_after}",
                }
                for run in {run.id: run for run, _ in taken}.values()
            },
            origins=[str(path)],
        )


def _of_table(found: Table, origin: str) -> Iterator[DeviceMeasurements]:
    """The entries of a table."""
    for one in found.devices:
        yield DeviceMeasurements(
            fingerprint=one.fingerprint,
            aliases=tuple(one.aliases),
            entries=list(measures.problems(one.entries())),
            runs={run_id: dict(run) for run_id, run in found.runs.items()},
            origins=[origin],
            digests={found.op: found.digest},
        )


def _joined(parts: Sequence[DeviceMeasurements]) -> list[DeviceMeasurements]:
    """The parts of each device as one, by the identity that tables use (`by_hardware`)."""
    device_of = by_hardware(part.fingerprint for part in parts)
    devices: dict[DeviceFingerprint, DeviceMeasurements] = {}
    for part in parts:
        fingerprint = device_of[part.fingerprint]
        device = devices.setdefault(fingerprint, DeviceMeasurements(fingerprint=fingerprint))
        device.aliases = tuple(sorted({*device.aliases, *part.aliases, part.fingerprint.name} - {fingerprint.name}))
        device.origins += [origin for origin in part.origins if origin not in device.origins]
        device.taken += part.taken
        device.entries += part.entries
        device.runs.update(part.runs)
        device.digests.update(part.digests)
    return list(devices.values())
