"""From the samples of one device to the entries of a table, in the bake and of the user's store.

At each problem the newest sample of each candidate counts, and only if its status is "ok"; a sample
of the kernel as it is built now comes before a newer one of other bytes. `choose` orders them.

A kernel's time does not depend on which 16-bit dtype it writes, so a shape measured with one output
dtype only also gives the entry of the other, marked by `measured_out_dtype`.

Samples of a decorated kernel stay apart by the digest of its source: two checkouts that share a
store each find their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from stoneware.kernels import registry
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.kernels.registry import BACKENDS_WITHOUT_KERNELS, OPS
from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning import samples as samples_format, time_fit
from stoneware.tuning.choose import choose
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.table import Choice, DeviceBlocks, DeviceEntries, Entry

OTHER_16_BIT = {"bf16": "fp16", "fp16": "bf16"}

Preferred = Callable[[AnyKey], Sequence[AnyConfig]]
"""The rule of thumb: configs for a key, best first."""


def rule_of_thumb(
    op: str, compute_capability: tuple[int, int], manifest: Manifest | None
) -> Preferred:
    """The rule of thumb of an op of ours on a device; none for any other, as a decorated kernel."""
    if op not in OPS or manifest is None:
        return lambda key: ()
    preferred = registry.spec(op).preferred
    return lambda key: preferred(key, compute_capability, manifest)


def is_known(config: AnyConfig, manifest: Manifest) -> bool:
    """Whether a config of an op of ours is torch's, or of a kernel in the manifest."""
    return config.backend in BACKENDS_WITHOUT_KERNELS or kernel_of(config, manifest) is not None


def kernel_of(config: AnyConfig, manifest: Manifest | None) -> KernelRecord | None:
    """The manifest's kernel that a config runs, if there is one."""
    if manifest is None or not isinstance(config, Config):
        return None
    kernel = manifest.kernels.get(config.kernel)
    return kernel if kernel is not None and kernel.backend == config.backend else None


def device_entries(
    op: str, fingerprint: DeviceFingerprint, aliases: tuple[str, ...],
    samples: Iterable[tuple[Run, Sample]], manifest: Manifest | None,
    known: DeviceBlocks | None = None,
) -> DeviceEntries:
    """What a table holds of one op on one device: the entries of its samples, and their models.

    Args:
      op: an op of ours, or a decorated kernel as "module:function".
      fingerprint, aliases: the device.
      samples: with the run that took each; in any order.
      manifest: the kernels as they are now; None for a decorated kernel.
      known: what another table holds of the device; its models are taken for the families of which
        it has as many weights, so that a look-up finds the measurements of both told in them.
    """
    preferred = rule_of_thumb(op, fingerprint.compute_capability, manifest)
    found = entries(samples, manifest, preferred)
    weights: dict[AnyKey, set[tuple[int, ...]]] = {}
    for entry in found:
        weights.setdefault(entry.key.family, set()).add(entry.key.sizes[:-1])
    blocks = {
        family: block for family in weights
        if known is not None and (block := known.block(family)) is not None and block.has_models
        and len(block.first_sizes) >= len(weights[family])
    }
    return DeviceEntries(
        fingerprint=fingerprint, aliases=aliases, entries=found,
        models=time_fit.models(
            found, manifest, fingerprint.num_sms,
            {family: block.models for family, block in blocks.items()},
        ),
        fitted_by={family: block.fitted_by for family, block in blocks.items()},
    )


def entries(
    samples: Iterable[tuple[Run, Sample]], manifest: Manifest | None, preferred: Preferred
) -> list[Entry]:
    """The entries of one op on one device, from samples that all belong there.

    Args:
      samples: with the run that took each; in any order.
      manifest: the kernels as they are now; None for a decorated kernel.
      preferred: the rule of thumb.

    Returns:
      The entries, sorted by key; of several with one key, that of the newest source first.
    """
    newest = samples_format.newest(
        samples, lambda run, sample: (sample.key, _source(sample), sample.config),
        lambda sample: _is_current(sample, manifest),
    )
    measured: dict[AnyKey, dict[str, list[Choice]]] = {}
    for sample in newest.values():
        choices = measured.setdefault(sample.key, {}).setdefault(_source(sample), [])
        if sample.status == "ok":
            choices.append(Choice(
                config=sample.config, median_us=sample.median_us, spread_us=sample.spread_us,
                run=sample.run, is_drifted=not _is_current(sample, manifest),
                kernel_sha256=_source(sample),
            ))
    measured = {
        key: timed for key, by_source in measured.items()
        if (timed := {source: choices for source, choices in by_source.items() if choices})
    }

    found = []
    for key in sorted(measured):
        for source, choices in measured[key].items():
            found.append(_entry(key, choices, preferred, getattr(key, "out_dtype", ""), source))
    found += _other_outputs(measured, manifest, preferred)
    return sorted(found, key=lambda entry: entry.key)


def _source(sample: Sample) -> str:
    """By what samples of a decorated kernel stay apart."""
    return sample.kernel_sha256 if isinstance(sample.key, KernelKey) else ""


def _is_current(sample: Sample, manifest: Manifest | None) -> bool:
    """Whether the kernel has the bytes with which it was measured. What a decorated kernel is now
    is known at the look-up only."""
    kernel = kernel_of(sample.config, manifest)
    return kernel is None or kernel.sha256 == sample.kernel_sha256


def _entry(
    key: AnyKey, choices: Sequence[Choice], preferred: Preferred, measured_out_dtype: str,
    source: str = "",
) -> Entry:
    ordered, rule = choose(choices, preferred(key))
    return Entry(
        key=key, choices=ordered, rule=rule, measured_out_dtype=measured_out_dtype,
        kernel_sha256=source,
    )


def _other_outputs(
    measured: Mapping[AnyKey, Mapping[str, Sequence[Choice]]], manifest: Manifest | None,
    preferred: Preferred,
) -> list[Entry]:
    found = []
    for key, by_source in measured.items():
        if (
            not isinstance(key, Key) or key.a_dtype in OTHER_16_BIT
            or key.out_dtype not in OTHER_16_BIT
        ):
            continue
        other = replace(key, out_dtype=OTHER_16_BIT[key.out_dtype])
        if other in measured:
            continue
        derived = [
            replace(choice, config=config) for choice in by_source[""]
            if (config := _other_output(choice.config, other.out_dtype, manifest)) is not None
        ]
        if derived:
            found.append(_entry(other, derived, preferred, key.out_dtype))
    return found


def _other_output(
    config: AnyConfig, out_dtype: str, manifest: Manifest | None
) -> AnyConfig | None:
    """The config whose kernel differs in its output dtype only; None if it is not built."""
    kernel = kernel_of(config, manifest)
    if kernel is None:
        return config
    wanted = {**kernel.config, "out": out_dtype}
    for other in manifest.select(op=kernel.op, backend=kernel.backend):
        if other.arch == kernel.arch and other.config == wanted:
            return replace(config, kernel=other.id)
    return None
