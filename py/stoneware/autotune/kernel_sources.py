"""Where timings of a decorated kernel come from: tables, the user's store, memory.

The one place where the decorator meets the layers of the look-up.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stoneware.autotune import layers, lookup, tuning
from stoneware.autotune.config import KernelConfig
from stoneware.autotune.key import KernelKey
from stoneware.autotune.lookup import Found
from stoneware.autotune.samples import Sample
from stoneware.runtime.device import DeviceFingerprint


def find(
    key: KernelKey,
    device: DeviceFingerprint,
    kernel_sha256: str,
    configs: Collection[KernelConfig],
    *,
    has_store: bool,
) -> Found | None:
    """The nearest entry that has one of `configs`; None without one.

    Args:
      key: of the call.
      device: where it runs.
      kernel_sha256: digest of the kernel as it is now.
      configs: of the list; entries of other configs alone are passed over.
      has_store: whether the user's store is asked.
    """
    found = None
    # Other packages' tables take 15 ms to find, and an exact answer needs none of them.
    for has_packages in (False, True):
        sources = [
            source for source in layers.sources(key.op, has_packages=has_packages)
            if has_store or source.name != layers.STORE
        ]
        found = next(
            (
                answer for answer in lookup.answers(key, device, sources, kernel_sha256)
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
    key: KernelKey, device: DeviceFingerprint, kernel_sha256: str, *, has_store: bool
) -> list[Sample]:
    """Samples taken here of this kernel at this key on such a device, newest last."""
    taken = tuning.memory(key.op)
    store = layers.existing_store() if has_store and not tuning.wheel_only() else None
    if store is not None:
        taken = [*store.samples(key.op), *taken]
    fitting = [
        (run.date, sample.run, sample)
        for run, sample in taken
        if sample.key == key
        and sample.kernel_sha256 == kernel_sha256
        and run.device.same_hardware(device)
    ]
    return [sample for _, _, sample in sorted(fitting, key=lambda item: item[:2])]
