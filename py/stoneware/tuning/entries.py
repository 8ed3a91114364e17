"""From samples to a table, in the bake and of the user's store.

At each problem the newest sample of each candidate counts, and only if its status is "ok"; a sample
of the kernel as it is built now comes before a newer one of other bytes. `choose` orders them.

A kernel's time does not depend on which 16-bit dtype it reads or writes, so a shape measured with one
output only also gives the entry of the other, and one of bf16 operands that of fp16, marked by
`measured_out_dtype`. Not the reverse: some kernels are built for bf16 alone.

Times have four digits, spreads two, since tunes differ by 1 %.

Samples of a decorated kernel stay apart by the digest of its source: two checkouts that share a
store each find their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stoneware.kernels import registry
from stoneware.kernels.config import AnyConfig, Config
from stoneware.kernels.key import AnyKey, KernelKey, Key
from stoneware.kernels.manifest import KernelRecord, Manifest
from stoneware.kernels.registry import BACKENDS_WITHOUT_KERNELS, OPS
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.tuning import samples as samples_format
from stoneware.tuning import table_file, time_fit
from stoneware.tuning.choose import choose, is_vendor
from stoneware.tuning.samples import DeviceRecord, Run, Sample
from stoneware.tuning.table import RUN_FIELDS, Block, DeviceTable, Table
from stoneware.tuning.table_entry import Choice, Entry
from stoneware.tuning.time_model import TimeModel

OTHER_16_BIT = {"bf16": "fp16", "fp16": "bf16"}


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


def make_table(
    op: str,
    samples: Iterable[tuple[Run, Sample]],
    manifest: Manifest | None,
    records: Iterable[DeviceRecord] = (),
    known: Table | None = None,
) -> Table:
    """The table of samples, of any number of devices, in whatever order they come.

    Args:
      op: an op of ours, or a decorated kernel as "module:function".
      samples: with the run that took each.
      manifest: the kernels as they are now; None for a decorated kernel.
      records: names of some of the devices.
      known: a table whose models are taken where it has more (`_blocks`).
    """
    taken, records = list(samples), list(records)
    runs = {run.id: run for run, _ in taken}
    device_of = by_hardware({*(run.device for run, _ in taken), *(record.fingerprint for record in records)})
    by_device: dict[DeviceFingerprint, list[tuple[Run, Sample]]] = {}
    for run, sample in taken:
        by_device.setdefault(device_of[run.device], []).append((run, sample))
    devices: list[DeviceTable] = []

    def place(fingerprint: DeviceFingerprint) -> str:
        return canonical_json(fingerprint.to_json())

    def table(digest: str | Callable[[Table], str]) -> Table:
        return Table(
            op=op,
            devices=sorted(devices, key=lambda one: place(one.fingerprint)),
            digest=digest,
            runs={id: {field: getattr(run, field) for field in RUN_FIELDS} for id, run in sorted(runs.items())},
        )

    # That with the most samples first: the others are told in its models.
    for fingerprint in sorted(by_device, key=lambda one: (-len(by_device[one]), place(one))):
        names = {name for record in records if device_of[record.fingerprint] == fingerprint for name in record.names}
        lenders = [one for one in (known, table("")) if one is not None]
        blocks = _blocks(fingerprint, by_device[fingerprint], manifest, lenders)
        if blocks:
            devices.append(DeviceTable(fingerprint, sorted(names - {fingerprint.name}), blocks))
    return table(table_file.digest)


def _blocks(
    fingerprint: DeviceFingerprint,
    samples: Iterable[tuple[Run, Sample]],
    manifest: Manifest | None,
    lenders: Sequence[Table],
) -> dict[AnyKey, Block]:
    """What a table holds of one device, by family: the entries of its samples, and their models.

    Models are taken from a block of `lenders` (`_lenders`), so that a look-up finds the measurements of both
    told in them; else, of families that are kin (`Key.kin`), the one with fewer (n, k) takes those that the
    other one has of our kernels.
    """
    found = entries(samples, manifest, fingerprint.compute_capability)
    families: dict[AnyKey, dict[tuple[int, ...], list[Entry]]] = {}
    for entry in found:
        families.setdefault(entry.key.family, {}).setdefault(entry.key.sizes, []).append(entry)
    num_weights = {family: len({sizes[:-1] for sizes in by_sizes}) for family, by_sizes in families.items()}
    smaller = {
        family: kin
        for family in families
        if isinstance(family, Key) and (kin := family.kin) is not None and num_weights.get(kin, 0) > num_weights[family]
    }
    made: dict[AnyKey, Block] = {}
    for some in (families.keys() - smaller.keys(), smaller):
        lent: dict[AnyKey, Block] = {}
        for family in some:
            blocks = _lenders(family, num_weights[family], len(families[family]), fingerprint, lenders)
            if not blocks and family in smaller and made[smaller[family]].has_models:
                blocks = [made[smaller[family]]]
            if blocks:
                lent[family] = max(blocks, key=lambda block: len(block.first_sizes))
        models = time_fit.models(
            [entry for entry in found if entry.key.family in some],
            manifest,
            fingerprint.num_sms,
            {family: _models_for(family, lender) for family, lender in lent.items()},
        )
        for family in some:
            fitted = models.get(family, {})
            names = time_fit.names_of(fitted)
            if family in lent:
                lenders_names = lent[family].models_names
                of_vendor = lenders_names[1] if lent[family].family == family else names[1]
                names = lenders_names[0] if names[0] else "", of_vendor if names[1] else ""
            made[family] = Block(family, families[family], fitted, names)
    return {family: made[family] for family in sorted(made)}


def _lenders(
    family: AnyKey, num_weights: int, num_entries: int, fingerprint: DeviceFingerprint, tables: Iterable[Table]
) -> list[Block]:
    """The family's blocks with models that have at least as many (n, k) of the device as are given, or of another
    one more entries, too."""
    return [
        block
        for table in tables
        for is_other_device, near in enumerate(table.near(fingerprint))
        for _, device in near[:1]
        if (block := device.block(family)) and block.has_models and len(block.first_sizes) >= num_weights
        if not is_other_device or block.num_entries > num_entries
    ]


def _models_for(family: AnyKey, lender: Block) -> dict[AnyConfig, TimeModel]:
    """What a block lends: of its kin only our kernels, whose times do not depend on the scales."""
    return {
        config: model for config, model in lender.models.items() if lender.family == family or not is_vendor(config)
    }


def entries(
    samples: Iterable[tuple[Run, Sample]],
    manifest: Manifest | None,
    compute_capability: tuple[int, int],
    *,
    has_other_16_bit: bool = True,
) -> list[Entry]:
    """The entries of one device, from samples that all belong there.

    Args:
      samples: with the run that took each; in any order.
      manifest: the kernels as they are now. None for a decorated kernel, and where they are not known;
        then no heuristic settles a tie.
      compute_capability: of the device.
      has_other_16_bit: whether a measurement gives the entry of the other 16-bit dtype, too.

    Returns:
      The entries; of several with one key, that of the newest source first.
    """
    newest = samples_format.newest(
        samples,
        lambda run, sample: (sample.key, _source(sample), sample.config),
        lambda sample: is_current(sample, manifest),
    )
    measured: dict[tuple[AnyKey, str], list[Choice]] = {}
    for sample in newest.values():
        if sample.status == "ok":
            choice = Choice(
                config=sample.config,
                median_us=float(f"{sample.median_us:.4g}"),
                spread_us=float(f"{sample.spread_us:.2g}"),
                run=sample.run,
                is_stale=not is_current(sample, manifest),
                kernel_sha256=_source(sample),
            )
            measured.setdefault((sample.key, choice.kernel_sha256), []).append(choice)
    listed = [(key, getattr(key, "out_dtype", ""), choices) for (key, _), choices in measured.items()]
    for (key, source), choices in measured.items() if has_other_16_bit else ():
        other = _other_16_bit(key)
        if other is None or (other, source) in measured:
            continue
        derived = [
            replace(choice, config=config)
            for choice in choices
            if (config := _config_of(other, choice.config, manifest)) is not None
        ]
        # Of the vendor library alone there is nothing to choose.
        if not all(is_vendor(choice.config) for choice in derived):
            listed.append((other, key.out_dtype, derived))
    found = []
    for key, measured_out_dtype, choices in listed:
        ordered, rule = choose(choices, _preferred(key, manifest, compute_capability))
        source = ordered[0].kernel_sha256
        found.append(
            Entry(key=key, choices=ordered, rule=rule, measured_out_dtype=measured_out_dtype, kernel_sha256=source)
        )
    return found


def _source(sample: Sample) -> str:
    """By what samples of a decorated kernel stay apart."""
    return sample.kernel_sha256 if isinstance(sample.key, KernelKey) else ""


def _preferred(key: AnyKey, manifest: Manifest | None, compute_capability: tuple[int, int]) -> Sequence[AnyConfig]:
    """The configs of an op of ours by its heuristic, best first."""
    if manifest is None or key.op not in OPS:
        return ()
    return registry.spec(key.op).preferred(key, compute_capability, manifest)


def _other_16_bit(key: AnyKey) -> Key | None:
    """The problem that takes the same time: with the other 16-bit output, or with fp16 for bf16 throughout; None of
    another one."""
    if not isinstance(key, Key) or key.out_dtype not in OTHER_16_BIT or key.a_dtype == "fp16":
        return None
    a, b, out = (OTHER_16_BIT.get(dtype, dtype) for dtype in (key.a_dtype, key.b_dtype, key.out_dtype))
    return replace(key, a_dtype=a, b_dtype=b, out_dtype=out)


def _config_of(key: Key, config: AnyConfig, manifest: Manifest | None) -> AnyConfig | None:
    """The config whose kernel differs in its dtypes only, which are the key's; None if it is not built."""
    kernel = kernel_of(config, manifest)
    if kernel is None:
        return config
    wanted = {**kernel.config, "a": key.a_dtype, "b": key.b_dtype, "out": key.out_dtype}
    for other in manifest.select(op=kernel.op, backend=kernel.backend):
        if other.arch == kernel.arch and other.config == wanted:
            return replace(config, kernel=other.id)
    return None
