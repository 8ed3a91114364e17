"""Where timings of a decorated kernel come from: tables, the user's store, memory.

The one place where the decorator meets the layers of the look-up.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from stoneware.kernels.config import KernelConfig
from stoneware.kernels.key import KernelKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import lookup, policy as tuning, sources as table_sources
from stoneware.tuning.lookup import Found
from stoneware.tuning.samples import Sample


class Taken(NamedTuple):
    """A sample, when its run was, and the name of the source that has it."""

    sample: Sample
    date: str
    source: str


def find(
    key: KernelKey,
    device: DeviceFingerprint,
    ordinal: int | None,
    kernel_sha256: str,
    configs: Collection[KernelConfig],
    *,
    has_store: bool,
) -> Found | None:
    """The nearest entry that has one of `configs`; None without one.

    Args:
      key: of the call.
      device: where it runs.
      ordinal: torch's number of it.
      kernel_sha256: digest of the kernel as it is now.
      configs: of the list; entries of other configs alone are passed over.
      has_store: whether the user's store is asked.
    """
    found = None
    # Other packages' tables take 15 ms to find, and an exact answer needs none of them.
    for has_packages in (False, True):
        sources = [
            source for source in table_sources.sources(key.op, has_packages=has_packages)
            if has_store or source.name != table_sources.STORE
        ]
        where = table_sources.with_power_limit(device, ordinal, sources)
        found = next(
            (
                answer for answer in lookup.answers(key, where, sources, kernel_sha256)
                if any(choice.config in configs for choice in answer.entry.choices)
            ),
            None,
        )
        if found is not None and is_exact(found):
            break
    return found


def is_exact(found: Any) -> bool:
    """Whether an answer is of this very key, kernel and device; any other is a miss."""
    return found.layer == "exact" and found.grade in ("exact", "argument")


def samples(
    key: KernelKey, device: DeviceFingerprint, ordinal: int | None, kernel_sha256: str, *,
    has_store: bool,
) -> list[Taken]:
    """Samples taken here of this kernel at this key on such a device, newest last; arguments as
    for `find`."""
    taken = [(table_sources.MEMORY, item) for item in tuning.memory(key.op)]
    store = table_sources.existing_store() if has_store and not tuning.wheel_only() else None
    if store is not None:
        of_store = table_sources.samples_of_store(store, key.op)
        taken = [*((table_sources.STORE, item) for item in of_store), *taken]
    where = table_sources.with_power_limit(
        device, ordinal, table_sources.sources(key.op, has_packages=False)
    )
    fitting = [
        Taken(sample, run.date, source)
        for source, (run, sample) in taken
        if sample.kernel_sha256 == kernel_sha256
        and sample.key == key
        and run.device.same_hardware(where)
    ]
    return sorted(fitting, key=lambda one: (one.date, one.sample.run))
