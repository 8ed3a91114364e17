"""Where a report's measurements come from: sample folders, stores, tables, this installation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoneware.kernels import manifest
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey, is_kernel
from stoneware.kernels.manifest import Manifest
from stoneware.kernels.registry import OPS
from stoneware.report import measures, regret
from stoneware.report.measures import Measurement, Problem
from stoneware.report.regret import Regret
from stoneware.runtime.device import DeviceFingerprint, names_match
from stoneware.tuning import entries, merge, sources, table_file, time_fit
from stoneware.tuning.samples import STATUSES, Run, Sample
from stoneware.tuning.table import RUN_FIELDS, Table

@dataclass(frozen=True, kw_only=True)
class TableMeasurement:
    """A choice of a table's entry: a sample without what the bake leaves out."""

    key: AnyKey
    config: AnyConfig
    median_us: float
    spread_us: float
    run: str
    is_drifted: bool
    kernel_sha256: str
    status: str = "ok"


@dataclass(kw_only=True)
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
    measurements: list[Measurement] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None

    @property
    def dates(self) -> dict[str, str]:
        return {run_id: run["date"] for run_id, run in self.runs.items()}

    @functools.cached_property
    def problems(self) -> list[Problem]:
        """What the table would choose, see `measures.problems`; made at the first use."""
        return measures.problems(
            self.measurements, self.dates, self._preferred,
            None if self.manifest is None else self._is_current,
        )

    def _preferred(self, key: AnyKey) -> Sequence[AnyConfig]:
        capability = self.fingerprint.compute_capability
        return entries.rule_of_thumb(key.op, capability, self.manifest)(key)

    def _is_current(self, item: Measurement) -> bool:
        if isinstance(item, TableMeasurement):
            return not item.is_drifted
        kernel = entries.kernel_of(item.config, self.manifest)
        return kernel is None or kernel.sha256 == item.kernel_sha256

    @property
    def statuses(self) -> dict[str, int]:
        """Status -> number of measurements; every status, "ok" first."""
        found = [item.status for item in self.measurements]
        return {status: found.count(status) for status in STATUSES}

    @property
    def bad(self) -> list[Measurement]:
        """The measurements that are not "ok"."""
        return [item for item in self.measurements if item.status != "ok"]

    @property
    def is_from_tables_alone(self) -> bool:
        return all(isinstance(item, TableMeasurement) for item in self.measurements)

    @property
    def runs_in_use(self) -> dict[str, dict[str, Any]]:
        """Run id -> the run with "num_samples", of the runs that took any; oldest first."""
        counts: dict[str, int] = {}
        for item in self.measurements:
            counts[item.run] = counts.get(item.run, 0) + 1
        ordered = sorted(counts, key=lambda run_id: (self.dates.get(run_id, ""), run_id))
        unknown = dict.fromkeys(RUN_FIELDS, "unknown")
        return {
            run_id: {**unknown, "id": run_id, **self.runs.get(run_id, {}),
                     "num_samples": counts[run_id]}
            for run_id in ordered
        }

    def regrets(self, left_out: str) -> list[Regret]:
        """See `regret.of_problems`; computed once."""
        if left_out not in self._regrets:
            self._regrets[left_out] = regret.of_problems(self.problems, left_out, self._models)
        return self._regrets[left_out]

    @functools.cached_property
    def _models(self) -> regret.Models:
        return time_fit.models(self.problems, self.manifest, self.fingerprint.num_sms)

    _regrets: dict[str, list[Regret]] = field(default_factory=dict)


class Collection:
    """Measurements by device: those of the same hardware are one, whatever their names."""

    def __init__(self) -> None:
        self.devices: list[DeviceMeasurements] = []

    def device(
        self, fingerprint: DeviceFingerprint, aliases: Iterable[str], origin: str
    ) -> DeviceMeasurements:
        """The device with this hardware, made if there is none yet."""
        found = next(
            (item for item in self.devices if item.fingerprint.same_hardware(fingerprint)), None
        )
        if found is None:
            found = DeviceMeasurements(fingerprint=fingerprint)
            self.devices.append(found)
        found.aliases = tuple(sorted({*found.aliases, *aliases}))
        if origin not in found.origins:
            found.origins.append(origin)
        return found

    def add_samples(
        self, fingerprint: DeviceFingerprint, aliases: Iterable[str], origin: str,
        runs: Iterable[Run], samples: Iterable[Sample],
    ) -> None:
        samples = list(samples)
        if not samples:
            return
        device = self.device(fingerprint, aliases, origin)
        for run in runs:
            device.runs[run.id] = {
                **{name: getattr(run, name) for name in RUN_FIELDS},
                "clocks": f"{run.sm_clock_mhz_before} to {run.sm_clock_mhz_after}",
            }
        device.measurements += samples

    def add_table(self, found: Table, origin: str) -> None:
        """Adds the measured entries of a table; what it derived is left out."""
        for device_table in found.devices:
            measurements = [
                TableMeasurement(
                    key=entry.key, config=choice.config, median_us=choice.median_us,
                    spread_us=choice.spread_us, run=choice.run, is_drifted=choice.is_drifted,
                    kernel_sha256=choice.kernel_sha256,
                )
                for entry in device_table.entries()
                if entry.measured_out_dtype in ("", getattr(entry.key, "out_dtype", ""))
                for choice in entry.choices
            ]
            if not measurements:
                continue
            device = self.device(device_table.fingerprint, device_table.aliases, origin)
            device.digests[found.op] = found.digest
            device.runs.update({
                run_id: {name: run.get(name, "unknown") for name in RUN_FIELDS}
                for run_id, run in found.runs.items()
            })
            device.measurements += measurements

    def selected(self, device: str | None, ops: Sequence[str]) -> list[DeviceMeasurements]:
        """The devices with that name, if one is given, with the measurements of these ops, if any.

        Raises:
          ValueError: nothing is left.
        """
        for item in self.devices:
            if ops:
                item.measurements = [m for m in item.measurements if m.key.op in ops]
        known = [item for item in self.devices if item.measurements]
        if not known:
            of = f" of {', '.join(ops)}" if ops else ""
            raise ValueError(
                f"a report needs measurements{of}, and the sources have none; pass sample folders "
                "or stores, or measure with `stoneware tune`"
            )
        chosen = [
            item for item in known
            if device is None or names_match(device, (item.fingerprint.name, *item.aliases))
        ]
        if not chosen:
            names = sorted(
                name for item in known for name in (item.fingerprint.name, *item.aliases)
            )
            raise ValueError(
                f"--device={device!r} must be a device that was measured, one of {', '.join(names)}"
            )
        return chosen


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
      One or more devices that have measurements, in the order in which they were found.

    Raises:
      ValueError: a path is of no known kind, or nothing is left.
      TableError: a file is damaged.
    """
    collection = Collection()
    if not paths:
        _add_installed(collection, ops)
    for path in map(Path, paths):
        _add_path(collection, path)
    devices = collection.selected(device, ops)
    for item in devices:
        item.manifest = manifest.installed()
    return devices


def _add_path(collection: Collection, path: Path) -> None:
    if path.suffix == table_file.SUFFIX and path.is_file():
        collection.add_table(table_file.read(path, None), str(path))
        return
    if not path.exists():
        raise ValueError(
            f"{path} must be a sample folder, a store (.sqlite3) or a table ({table_file.SUFFIX}), and "
            "is none that exists; pass one of those, or nothing for this installation's own"
        )
    _add_source(collection, path)


def _add_source(collection: Collection, path: Path) -> None:
    for record, runs, samples in merge.read_folder(path):
        collection.add_samples(
            record.fingerprint, record.aliases, str(path), runs.values(), samples
        )


def _add_installed(collection: Collection, ops: Sequence[str]) -> None:
    # Tables of decorated kernels are found by name only.
    for op in (*OPS, *(op for op in ops if is_kernel(op))):
        for source in sources.sources(op):
            if source.name != sources.STORE:  # its samples say more than its table
                collection.add_table(source.table, source.name)
    store = sources.existing_store()
    if store is not None:
        _add_source(collection, store.path)
