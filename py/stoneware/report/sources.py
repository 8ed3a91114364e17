"""Where a report's measurements come from: sample folders, stores, tables, this installation."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoneware.kernels import manifest
from stoneware.kernels.key import AnyKey, is_kernel
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.registry import OPS
from stoneware.report import measures, regret
from stoneware.report.measures import Measurement, Problem
from stoneware.report.regret import Regret
from stoneware.runtime.device import DeviceFingerprint, by_hardware, names_match
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning import entries, merge, sources, table_file, time_fit
from stoneware.tuning.samples import STATUSES
from stoneware.tuning.table import RUN_FIELDS, Table
from stoneware.tuning.table_entry import Choice


@dataclass(frozen=True, kw_only=True)
class TableMeasurement(Choice):
    """A choice of a table's entry: a sample without what the bake leaves out."""

    key: AnyKey
    status: str = "ok"


@dataclasses.dataclass(kw_only=True)
class DeviceMeasurements:
    """All that was measured on one device.

    Attributes:
      fingerprint, aliases: the device.
      measurements: samples, and choices of tables.
      runs: run id -> RUN_FIELDS and, where known, "clocks".
      origins: the sources that had something of the device.
      digests: op -> digest of the table that was read.
      manifest: the kernels of this installation; None if it has none.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...] = ()
    measurements: list[Measurement] = dataclasses.field(default_factory=list)
    runs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    origins: list[str] = dataclasses.field(default_factory=list)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    manifest: Manifest | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    @property
    def dates(self) -> dict[str, str]:
        return {run_id: run["date"] for run_id, run in self.runs.items()}

    @functools.cached_property
    def problems(self) -> list[Problem]:
        """What the table would choose, see `measures.problems`."""
        capability = self.fingerprint.compute_capability
        return measures.problems(
            self.measurements,
            self.dates,
            lambda key: entries.heuristic(key.op, capability, self.manifest)(key),
            None if self.manifest is None else self._is_current,
        )

    def _is_current(self, item: Measurement) -> bool:
        if isinstance(item, TableMeasurement):
            return not item.is_stale
        kernel = entries.kernel_of(item.config, self.manifest)
        return kernel is None or kernel.measured_sha256 == item.kernel_sha256

    @property
    def statuses(self) -> dict[str, int]:
        """Status -> number of measurements; every status, "ok" first."""
        found = Counter(item.status for item in self.measurements)
        return {status: found[status] for status in STATUSES}

    @property
    def is_from_tables_alone(self) -> bool:
        return all(isinstance(item, TableMeasurement) for item in self.measurements)

    @property
    def runs_in_use(self) -> list[dict[str, Any]]:
        """The runs that took any measurement, with their id and "num_samples"; oldest first."""
        counts = Counter(item.run for item in self.measurements)
        unknown = dict.fromkeys(RUN_FIELDS, "unknown")
        return [
            {**unknown, "id": run_id, **self.runs.get(run_id, {}), "num_samples": counts[run_id]}
            for run_id in sorted(counts, key=lambda run_id: (self.dates.get(run_id, ""), run_id))
        ]

    @functools.cached_property
    def regrets(self) -> dict[str, list[Regret]]:
        """What was left out -> regrets, see `regret.of_problems`."""
        models = time_fit.models(self.problems, self.manifest, self.fingerprint.num_sms)
        return {left_out: regret.of_problems(self.problems, left_out, models) for left_out in regret.LEFT_OUT}


def load(
    paths: Sequence[str | Path], *, device: str | None = None, ops: Sequence[str] = ()
) -> list[DeviceMeasurements]:
    """Reads the measurements of a report.

    Args:
      paths: sample folders (of one device or of several), stores (.sqlite3) and tables (.table);
        empty for this installation's: its tables, the user's store and installed packages' tables.
      device: name or alias of the one device to keep.
      ops: the ops to keep; empty for all.

    Returns:
      One or more devices that have measurements, in the order in which they were found. Those of
      the same hardware are one, whatever their names.

    Raises:
      ValueError: a path is of no known kind, or nothing is left.
      TableError: a file is damaged.
    """
    parts = (part for path in paths for part in _of_path(Path(path))) if paths else _of_installation(ops)
    devices = _joined([part for part in parts if part.measurements])
    for item in devices:
        item.manifest = manifest.installed()
        if ops:
            item.measurements = [one for one in item.measurements if one.key.op in ops]
    known = [item for item in devices if item.measurements]
    if not known:
        of = f" of {', '.join(ops)}" if ops else ""
        raise ValueError(
            f"a report needs measurements{of}, and the sources have none; pass sample folders "
            "or stores, or measure with `stoneware tune`"
        )
    chosen = [item for item in known if device is None or names_match(device, item.names)]
    if not chosen:
        names = sorted(name for item in known for name in item.names)
        raise ValueError(f"--device={device!r} must be a device that was measured, one of {', '.join(names)}")
    return chosen


def _of_installation(ops: Sequence[str]) -> Iterator[DeviceMeasurements]:
    # Tables of decorated kernels are found by name only.
    for op in (*OPS, *(op for op in ops if is_kernel(op))):
        for source in sources.sources(op):
            if source.name != sources.STORE:  # its samples say more than its table
                yield from _of_table(source.table, source.name)
    store = sources.existing_store()
    if store is not None:
        yield from _of_samples(store.path)


def _of_path(path: Path) -> Iterator[DeviceMeasurements]:
    if path.suffix == table_file.SUFFIX and path.is_file():
        yield from _of_table(table_file.read(path, None), str(path))
    elif path.exists():
        yield from _of_samples(path)
    else:
        raise ValueError(
            f"{path} must be a sample folder, a store (.sqlite3) or a table ({table_file.SUFFIX}), and "
            "is none that exists; pass one of those, or nothing for this installation's own"
        )


def _of_samples(path: Path) -> Iterator[DeviceMeasurements]:
    for record, runs, samples in merge.read_folder(path):
        yield DeviceMeasurements(
            fingerprint=record.fingerprint,
            aliases=tuple(record.aliases),
            measurements=list(samples),
            runs={
                run.id: {
                    **{name: getattr(run, name) for name in RUN_FIELDS},
                    "clocks": f"{run.sm_clock_mhz_before} to {run.sm_clock_mhz_after}",
                }
                for run in runs.values()
            },
            origins=[str(path)],
        )


def _of_table(found: Table, origin: str) -> Iterator[DeviceMeasurements]:
    """The measured entries of a table; what it derived is left out."""
    runs = {run_id: {name: run.get(name, "unknown") for name in RUN_FIELDS} for run_id, run in found.runs.items()}
    for one in found.devices:
        yield DeviceMeasurements(
            fingerprint=one.fingerprint,
            aliases=tuple(one.aliases),
            measurements=[
                TableMeasurement(key=entry.key, **vars(choice))
                for entry in one.entries()
                if entry.measured_out_dtype in ("", getattr(entry.key, "out_dtype", ""))
                for choice in entry.choices
            ],
            runs=runs,
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
        device.aliases = tuple(sorted({*device.aliases, *part.names} - {fingerprint.name}))
        device.origins += [origin for origin in part.origins if origin not in device.origins]
        device.measurements += part.measurements
        device.runs.update(part.runs)
        device.digests.update(part.digests)
    return list(devices.values())
