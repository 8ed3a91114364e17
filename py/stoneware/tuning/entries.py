"""From samples to a table, in the bake and of the user's store.

At each problem the newest sample of each candidate counts, and only if its status is "ok"; a sample
of the kernel as it is built now comes before a newer one of other bytes. `choose` orders them.

An entry has the exact dtypes and scales that were measured, and the kernels. Which entries have comparable
times is their family (`key.py`): its models are fitted to the measurements of all its kinds.

Times have four digits, spreads two, since tunes differ by 1 %.

Samples of a decorated kernel stay apart by the digest of its source: two checkouts that share a
store each find their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoneware.kernels import manifest as kernel_manifest
from stoneware.kernels.config import BACKENDS_WITHOUT_KERNELS, AnyConfig, Config
from stoneware.kernels.key import AnyFamily, AnyKey, KernelKey, is_kernel
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.specs import OPS, spec_of
from stoneware.tuning import samples as samples_format
from stoneware.tuning import table_file, time_fit
from stoneware.tuning.choose import choose
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.table import Table
from stoneware.tuning.table_entry import Choice, Entry
from stoneware.tuning.table_file import Measured
from stoneware.tuning.time_model import TimeModel


def is_known(config: AnyConfig, manifest: Manifest | None) -> bool:
    """Whether a config of an op of ours is torch's, or of a kernel in the manifest; of a decorated kernel
    nobody knows."""
    if not isinstance(config, Config) or config.backend in BACKENDS_WITHOUT_KERNELS:
        return True
    return kernel_of(config, manifest) is not None


def is_current(sample: Sample, manifest: Manifest | None) -> bool:
    """Whether the kernel has the code with which it was measured. What a decorated kernel is now
    is known at the look-up only."""
    kernel = kernel_of(sample.config, manifest)
    return kernel is None or kernel.measured_sha256 == sample.kernel_sha256


def kernel_of(config: AnyConfig, manifest: Manifest | None) -> KernelRecord | None:
    """The manifest's kernel that a config runs, if there is one."""
    if manifest is None or not isinstance(config, Config):
        return None
    kernel = manifest.kernels.get(config.kernel)
    return kernel if kernel is not None and kernel.backend == config.backend else None


def table_of_samples(
    op: str, samples: Iterable[tuple[Run, Sample]], wheel: Table | None = None, records: Iterable[DeviceRecord] = ()
) -> Table:
    """The table that `bake_here` makes, opened."""
    return table_file.decode(bake_here(op, samples, wheel, records), op, op)


def bake_here(
    op: str,
    samples: Iterable[tuple[Run, Sample]],
    wheel: Table | None = None,
    records: Iterable[DeviceRecord] = (),
    basis: Mapping[str, Any] | None = None,
) -> bytes:
    """The table of the samples of the kernels that this installation has; see `bake_samples`."""
    kernels = None if is_kernel(op) else kernel_manifest.packaged()
    usable = [(run, sample) for run, sample in samples if is_known(sample.config, kernels)]
    return bake_samples(op, usable, kernels, records, wheel, basis)


def bake_samples(
    op: str,
    samples: Iterable[tuple[Run, Sample]],
    manifest: Manifest | None,
    records: Iterable[DeviceRecord] = (),
    wheel: Table | None = None,
    basis: Mapping[str, Any] | None = None,
) -> bytes:
    """The bytes of the table of samples, of any number of devices, in whatever order they come.

    Args:
      op: an op of ours, or a decorated kernel as "module:function".
      samples: with the run that took each.
      manifest: the kernels as they are now; None for a decorated kernel.
      records: names of some of the devices.
      wheel: the table of the wheel, whose models are taken for the candidates that it has on the device: few further
        measurements correct them, and would spoil a fit.
      basis: of the table of a store (`store_table.py`).
    """
    taken, records = list(samples), list(records)
    runs = {run.id: run for run, _ in taken}
    device_of = by_hardware({*(run.device for run, _ in taken), *(record.fingerprint for record in records)})
    by_device: dict[DeviceFingerprint, list[tuple[Run, Sample]]] = {}
    for run, sample in taken:
        by_device.setdefault(device_of[run.device], []).append((run, sample))
    devices: list[Measured] = []
    for fingerprint in sorted(by_device, key=lambda device: canonical_json(device.to_json())):
        names = {name for record in records if device_of[record.fingerprint] == fingerprint for name in record.names}
        measured = entries(by_device[fingerprint], manifest, fingerprint.compute_capability)
        models: dict[AnyFamily, dict[AnyConfig, TimeModel]] = {}
        for _, device in wheel.near(fingerprint)[0][:1] if wheel is not None else ():
            for block in device.blocks.values():
                models.setdefault(block.kind.family, {}).update(block.models)
        if measured:
            fitted = time_fit.models(measured, manifest, fingerprint.num_sms, models)
            devices.append(Measured(fingerprint, sorted(names - {fingerprint.name}), measured, fitted))
    return table_file.encode(op, devices, {id: run.in_table for id, run in sorted(runs.items())}, basis)


def entries(
    samples: Iterable[tuple[Run, Sample]],
    manifest: Manifest | None,
    compute_capability: tuple[int, int],
    older: Iterable[Entry] = (),
) -> list[Entry]:
    """The entries of one device, from samples that all belong there.

    Args:
      samples: with the run that took each; in any order.
      manifest: the kernels as they are now. None for a decorated kernel, and where they are not known;
        then no heuristic settles a tie.
      compute_capability: of the device.
      older: entries whose choices count where no sample replaces them.

    Returns:
      The entries; of several with one key, that of the newest source first.
    """
    newest = samples_format.newest(
        samples,
        lambda run, sample: (sample.key, _source(sample), sample.config),
        lambda sample: is_current(sample, manifest),
    )
    choices_before = {
        (entry.key, entry.kernel_sha256, choice.config): choice for entry in older for choice in entry.choices
    }
    measured: dict[tuple[AnyKey, str], list[Choice]] = {}
    for place, sample in newest.items():
        is_stale = not is_current(sample, manifest)
        if place in choices_before and is_stale and not choices_before[place].is_stale:
            continue
        choices_before.pop(place, None)
        if sample.status == "ok":
            choice = Choice(
                config=sample.config,
                median_us=float(f"{sample.median_us:.4g}"),
                spread_us=float(f"{sample.spread_us:.2g}"),
                run=sample.run,
                is_stale=is_stale,
            )
            measured.setdefault(place[:2], []).append(choice)
    for (key, source, _), choice in choices_before.items():
        measured.setdefault((key, source), []).append(choice)
    made = []
    for (key, source), choices in measured.items():
        ordered, rule = choose(choices, _preferred(key, manifest, compute_capability))
        made.append(Entry(key=key, choices=ordered, rule=rule, kernel_sha256=source))
    return made


def _source(sample: Sample) -> str:
    """By what samples of a decorated kernel stay apart."""
    return sample.kernel_sha256 if isinstance(sample.key, KernelKey) else ""


def _preferred(key: AnyKey, manifest: Manifest | None, compute_capability: tuple[int, int]) -> Sequence[AnyConfig]:
    """The configs of an op of ours by its heuristic, best first."""
    if manifest is None or key.op not in OPS:
        return ()
    return spec_of(key.op).preferred(key, compute_capability, manifest)
