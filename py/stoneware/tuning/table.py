"""The tuning table: what the bake distilled from the samples, as the wheel carries it.

One file per op, of which a look-up reads what it needs and nothing else: a header, one line of
canonical JSON, then for each family of each device a block of little-endian columns:

    header   schema, op, digest, configs, runs, rules, out dtypes; each device with, for each of its
             families, the key, its configs (positions among all), where its block begins (offset
             from the end of the header), how many groups, entries and corrections it has, and, if
             its models are those of another table, the digest of that one

    block    first sizes     i64 each, all sizes but the last (m) of each group; ascending
             ends of groups  u32, 0 and then how many entries there are up to the end of each group
             last sizes      i64, of each entry; ascending in a group
             ends of texts   u32, 0 and then bytes of the texts up to the end of each entry's
    only if there are corrections, which a block has that has models:
             ends of these   u32, 0 and then how many there are up to the end of each entry's
             out dtypes      u8, what was measured at each entry, a position in the header
             models          of each config the fields of its TimeModel; slots is 0 where there is none
             corrections     config, whether it is drifted, ratio, fullness
    always
             texts           JSON, of each entry its variants, each [rule, choices, measured out
                             dtype, kernel digest] with choices [config, median_us, spread_us, run,
                             is_drifted], or, predicted, [rule, choices] with choices [config, us]

Runs and rules are positions in the header, configs among those of the family, so that the block of
the other 16-bit output, which says the same of other kernels, is the same one. Numbers that a look-up
takes by the dozen are columns because `struct` reads them in a tenth of the time that JSON takes.

`digest` is the sha256 of the file with an empty digest, so that two ranks compare 64 characters,
and a damaged or edited table is refused whole instead of half believed. Past that check the content
is trusted.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stoneware.errors import TableError
from stoneware.kernels.config import AnyConfig, Config, config_from_json
from stoneware.kernels.key import AnyKey, Key, is_kernel, key_from_json, unchecked
from stoneware.runtime import package_files, regular_file
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint, names_match
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.table_entry import PREDICTED_RUN, Choice, DeviceEntries, Entry
from stoneware.tuning.time_model import Candidate, Corrections, TimeModel, corrections_of

SCHEMA = 5
SUFFIX = ".table"

_MODEL = struct.Struct("<11I6d")
_CORRECTION = struct.Struct("<IBdd")

RUN_FIELDS = ("id", "driver", "cuda", "torch", "triton", "date", "commit")
"""What a table keeps of a run."""


class _Content:
    """What the blocks of all devices share: the bytes after the header, and the header's lists."""

    def __init__(self, header: Mapping[str, Any], body: bytes) -> None:
        self.op = header["op"]
        self.digest = header["digest"]
        self.is_kernel = is_kernel(self.op)
        self.rules = header["rules"]
        self.out_dtypes = header["out_dtypes"]
        self.runs = [run["id"] for run in header["runs"]]
        self.body = body
        self._configs: list[Any] = header["configs"]

    def config(self, position: int) -> AnyConfig:
        config = self._configs[position]
        if isinstance(config, dict):
            # Past the digest the content is trusted, and its checks take longer than all else.
            config = (
                config_from_json(self.op, config) if self.is_kernel else unchecked(Config, config)
            )
            self._configs[position] = config
        return config

    def family(self, data: Mapping[str, Any]) -> AnyKey:
        if self.is_kernel:
            return key_from_json(data, is_family=True)
        return unchecked(Key, {"accumulation": "fast", "num_groups": 0, **data})


def size_log(size: int) -> float:
    """By what sizes are compared; that of a decorated kernel's key may be 0 or less."""
    return math.log(size) if size > 0 else size - 1.0


class Block:
    """The entries of one family on one device, as a look-up asks for them.

    Attributes:
      family: their key without sizes.
      sizes: those of each entry, ascending.
      models: of the configs that were measured often enough.
      has_models: whether there are any.
      fitted_by: digest of the table with the measurements that the models were fitted to, its own
        or another; empty if nobody else has them.
    """

    family: AnyKey
    sizes: Sequence[tuple[int, ...]]
    models: Mapping[AnyConfig, TimeModel] = {}
    fitted_by: str = ""

    @property
    def has_models(self) -> bool:
        return bool(self.models)

    @functools.cached_property
    def first_logs(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Each of `first_sizes` with the logarithms by which shapes are compared."""
        return [(first, tuple(map(size_log, first))) for first in self.first_sizes]

    @functools.cached_property
    def _by_first(self) -> dict[tuple[int, ...], list[int]]:
        by_first: dict[tuple[int, ...], list[int]] = {}
        for sizes in self.sizes:
            by_first.setdefault(sizes[:-1], []).extend(sizes[-1:])
        return by_first

    @functools.cached_property
    def first_sizes(self) -> Sequence[tuple[int, ...]]:
        """All sizes but the last (m), of each group of entries that share them; ascending."""
        return list(self._by_first)

    def last_sizes(self, first: tuple[int, ...]) -> Sequence[int]:
        """Every last size (m) that has an entry with these first ones, ascending."""
        return self._by_first.get(first, ())

    def __contains__(self, sizes: tuple[int, ...]) -> bool:
        return sizes[-1] in self.last_sizes(sizes[:-1]) if sizes else bool(self.first_sizes)

    def entry(
        self, sizes: tuple[int, ...], kernel_sha256: str = "", key: AnyKey | None = None
    ) -> Entry:
        """The entry at `sizes`, which must be one of `self.sizes`.

        Args:
          sizes: where.
          kernel_sha256: of a decorated kernel, as it is now: the entry that was measured with it is
            preferred, and the choices of another one are drifted.
          key: that of the entry, if the caller has it.
        """
        raise NotImplementedError

    def corrections(
        self, first: tuple[int, ...], last_sizes: Sequence[int],
        models: Mapping[AnyConfig, TimeModel] | None = None,
    ) -> list[Corrections]:
        """What entries of an op of ours say at other sizes.

        Args:
          first: the sizes that they share.
          last_sizes: that of each entry.
          models: of another block, which come before `self.models`.
        """
        made = self._made
        if made is None or made[0] is not models:
            made = self._made = models, {}
        found = []
        for last in last_sizes:
            sizes = *first, last
            if sizes not in made[1]:
                made[1][sizes] = corrections_of(
                    self.entry(sizes), *(() if models is None else (models,)), self.models)
            found.append(made[1][sizes])
        return found

    _made: tuple[
        Mapping[AnyConfig, TimeModel] | None, dict[tuple[int, ...], Corrections]] | None = None
    """The models that `corrections` was given, and what it gave at which sizes."""


class _StoredBlock(Block):
    """A block of a table's bytes, of which each part is read when it is asked for."""

    def __init__(self, family: AnyKey, content: _Content, header: Mapping[str, Any]) -> None:
        self.family = family
        self._content = content
        self._configs = header["configs"]
        self.fitted_by = header.get("fitted_by", content.digest)
        self._num_groups, entries = header["groups"], header["entries"]
        self._num_sizes = num_sizes = len(family.sizes)
        self._last_sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._candidates: dict[int, Candidate] = _Candidates(self)
        # Where each column begins.
        self._first_sizes_at = at = header["offset"]
        self._group_ends_at = at = at + 8 * max(num_sizes - 1, 0) * self._num_groups
        self._last_sizes_at = at = at + 4 * (self._num_groups + 1)
        self._text_ends_at = at = at + 8 * min(num_sizes, 1) * entries
        at += 4 * (entries + 1)
        self._has_models = header["corrections"] > 0
        if self._has_models:
            self._correction_ends_at = at
            self._out_dtypes_at = at = at + 4 * (entries + 1)
            self._models_at = at = at + entries
            self._corrections_at = at = at + _MODEL.size * len(self._configs)
            at += _CORRECTION.size * header["corrections"]
        self._texts_at = at

    @functools.cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        return [
            (*first, *last) for first in self.first_sizes
            for last in ([[size] for size in self.last_sizes(first)] or [[]])
        ]

    @functools.cached_property
    def first_sizes(self) -> list[tuple[int, ...]]:
        if self._num_sizes < 2:
            return [()]
        columns = self._content.body[self._first_sizes_at:self._group_ends_at]
        return list(struct.iter_unpack(f"<{self._num_sizes - 1}q", columns))

    @functools.cached_property
    def _group_ends(self) -> tuple[int, ...]:
        return struct.unpack_from(
            f"<{self._num_groups + 1}I", self._content.body, self._group_ends_at)

    @functools.cached_property
    def _groups(self) -> dict[tuple[int, ...], int]:
        """First sizes -> the position of their group."""
        return dict(zip(self.first_sizes, itertools.count()))

    def _start(self, first: tuple[int, ...]) -> int:
        """The position of the first entry of a group that there is."""
        return self._group_ends[self._groups[first]]

    def last_sizes(self, first: tuple[int, ...]) -> Sequence[int]:
        found = self._last_sizes.get(first)
        if found is None:
            group = self._groups.get(first)
            if group is None or not self._num_sizes:
                return ()
            start, end = self._group_ends[group:group + 2]
            found = self._last_sizes[first] = struct.unpack_from(
                f"<{end - start}q", self._content.body, self._last_sizes_at + 8 * start)
        return found

    def entry(
        self, sizes: tuple[int, ...], kernel_sha256: str = "", key: AnyKey | None = None
    ) -> Entry:
        content = self._content
        position = 0
        if sizes:
            first = sizes[:-1]
            position = self._start(first) + self.last_sizes(first).index(sizes[-1])
        start, end = _ENDS.unpack_from(content.body, self._text_ends_at + 4 * position)
        variants = _parsed(content.body[self._texts_at + start:self._texts_at + end])
        variant = variants[0]
        if len(variants) > 1:
            variant = next((one for one in variants if one[3] == kernel_sha256), variant)
        rule, choices, measured_out_dtype, sha256 = variant if len(variant) == 4 else (
            *variant, "", "")
        is_other = sha256 != kernel_sha256 and kernel_sha256 != ""
        return Entry(
            key=self.family.with_sizes(sizes) if key is None else key,
            choices=tuple(self._choice(row, sha256, is_other) for row in choices),
            rule=content.rules[rule], measured_out_dtype=measured_out_dtype, kernel_sha256=sha256,
        )

    def _choice(self, row: Sequence[Any], sha256: str, is_other: bool) -> Choice:
        if len(row) == 2:
            return Choice(
                config=self._config(row[0]), median_us=row[1], spread_us=0.0, run=PREDICTED_RUN
            )
        position, median_us, spread_us, run, is_drifted = row
        return unchecked(Choice, {
            "config": self._config(position), "median_us": median_us, "spread_us": spread_us,
            "run": self._content.runs[run], "is_drifted": is_other or bool(is_drifted),
            "kernel_sha256": sha256,
        })

    def _config(self, position: int) -> AnyConfig:
        return self._content.config(self._configs[position])

    @property
    def has_models(self) -> bool:
        return self._has_models

    @functools.cached_property
    def models(self) -> dict[AnyConfig, TimeModel]:
        if not self._has_models:
            return {}
        candidates = map(self.candidate, range(len(self._configs)))
        return {config: model for config, model in candidates if model is not None}

    def candidate(self, position: int) -> Candidate:
        """A config of a block with models, and its model."""
        # Not TimeModel._make, which takes twice as long.
        model = tuple.__new__(TimeModel, _MODEL.unpack_from(
            self._content.body, self._models_at + _MODEL.size * position))
        return self._config(position), model if model.slots else None

    def corrections(
        self, first: tuple[int, ...], last_sizes: Sequence[int],
        models: Mapping[AnyConfig, TimeModel] | None = None,
    ) -> list[Corrections]:
        if models is not None or not self._has_models:
            return super().corrections(first, last_sizes, models)
        body, columns, out_dtypes = self._content.body, self._corrections_at, self._content.out_dtypes
        of_group, start = self.last_sizes(first), self._start(first)
        found = []
        for last in last_sizes:
            position = start + of_group.index(last)
            begin, end = _ENDS.unpack_from(body, self._correction_ends_at + 4 * position)
            rows = body[columns + _CORRECTION.size * begin:columns + _CORRECTION.size * end]
            found.append(Corrections(
                out_dtypes[body[self._out_dtypes_at + position]], self._candidates,
                list(_CORRECTION.iter_unpack(rows)),
            ))
        return found


_ENDS = struct.Struct("<2I")
"""Two neighbours of a column of ends: where what is asked for begins and ends."""


class _Candidates(dict[int, Candidate]):
    """Position of a config -> it and its model, made once: the same objects each time."""

    def __init__(self, block: _StoredBlock) -> None:
        super().__init__()
        self._block = block

    def __missing__(self, position: int) -> Candidate:
        found = self[position] = self._block.candidate(position)
        return found


_DECODER = json.JSONDecoder()


def _parsed(text: bytes) -> Any:
    """What JSON of this module's own says."""
    return _DECODER.raw_decode(text.decode("ascii"))[0]


class DeviceBlocks:
    """The entries of one device by family, as a look-up asks for them.

    Attributes:
      fingerprint: the device.
      is_predicted: whether nothing was measured there.
      aliases: further names of the device.
    """

    def __init__(
        self, fingerprint: DeviceFingerprint, is_predicted: bool, aliases: Iterable[str] = ()
    ) -> None:
        self.fingerprint = fingerprint
        self.is_predicted = is_predicted
        self.aliases = tuple(aliases)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    @property
    def families(self) -> tuple[AnyKey, ...]:
        """Those that have entries, sorted."""
        raise NotImplementedError

    def block(self, family: AnyKey) -> Block | None:
        """The entries of a family; None if there are none."""
        raise NotImplementedError

    @functools.cached_property
    def num_entries(self) -> int:
        return sum(len(self.block(family).sizes) for family in self.families)

    def entry(self, key: AnyKey, kernel_sha256: str = "") -> Entry | None:
        """The entry at exactly this key; `kernel_sha256` as for `Block.entry`."""
        block = self.block(key.family)
        if block is None or key.sizes not in block:
            return None
        return block.entry(key.sizes, kernel_sha256)

    def entries(self) -> Iterator[Entry]:
        """Every entry; of a kernel measured with several sources the newest."""
        for family in self.families:
            block = self.block(family)
            yield from (block.entry(sizes) for sizes in block.sizes)


class StoredDevice(DeviceBlocks):
    """The entries of one device in a table's bytes."""

    def __init__(self, header: Mapping[str, Any], content: _Content) -> None:
        super().__init__(
            DeviceFingerprint.from_json(header["fingerprint"]), header["is_predicted"],
            header["aliases"],
        )
        self._header = header
        self._content = content
        self._blocks: dict[AnyKey, Block] = {}

    @functools.cached_property
    def num_entries(self) -> int:
        return sum(family["entries"] for family in self._header["families"])

    @functools.cached_property
    def _families(self) -> dict[AnyKey, Mapping[str, Any]]:
        return {
            self._content.family(family["key"]): family for family in self._header["families"]
        }

    @property
    def families(self) -> tuple[AnyKey, ...]:
        return tuple(self._families)

    def block(self, family: AnyKey) -> Block | None:
        block = self._blocks.get(family)
        if block is None and (header := self._families.get(family)) is not None:
            block = self._blocks[family] = _StoredBlock(family, self._content, header)
        return block


NearDevices = tuple[tuple[float, DeviceBlocks], ...]
"""(distance, device), nearest first."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of one op.

    Attributes:
      op: whose table.
      digest: sha256 of the content.
      devices: those that were measured by fingerprint, then those that were predicted.
      runs: id of each run -> its versions, date and commit.
    """

    op: str
    digest: str
    devices: tuple[DeviceBlocks, ...]
    runs: Mapping[str, Mapping[str, Any]]

    def near(self, device: DeviceFingerprint) -> tuple[NearDevices, NearDevices, NearDevices]:
        """The devices of its compute capability, nearest first, each with its distance: those that
        were measured and are the same hardware, other ones, and those that were predicted."""
        near = self._near.get(device)
        if near is None:
            groups: tuple[list[tuple[float, str, int]], ...] = ([], [], [])
            for idx, other in enumerate(self.devices):
                if other.fingerprint.compute_capability == device.compute_capability:
                    group = (
                        2 if other.is_predicted
                        else 0 if other.fingerprint.same_hardware(device) else 1
                    )
                    distance = device.distance(other.fingerprint)
                    groups[group].append((distance, other.fingerprint.name, idx))
            near = self._near[device] = tuple(
                tuple((distance, self.devices[idx]) for distance, _, idx in sorted(group))
                for group in groups
            )
        return near

    @functools.cached_property
    def _near(self) -> dict[DeviceFingerprint, tuple[NearDevices, NearDevices, NearDevices]]:
        return {}

    def device_named(self, name: str) -> DeviceBlocks | None:
        """The device with this name or alias."""
        return next((device for device in self.devices if names_match(name, device.names)), None)


def encode(op: str, devices: Iterable[DeviceEntries], runs: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a table.

    Args:
      op: whose.
      devices: what it holds, in the order in which it will be read.
      runs: "id" of each run and what else is to be known of it; those that no choice names are
        left out.
    """
    devices = list(devices)
    all_entries = [entry for device in devices for entry in device.entries]
    choices = [choice for entry in all_entries for choice in entry.choices]
    configs = sorted({choice.config for choice in choices})
    used = {choice.run for choice in choices}
    kept_runs = sorted((run for run in runs if run["id"] in used), key=lambda run: run["id"])
    rules = sorted({entry.rule for entry in all_entries})
    out_dtypes = sorted({entry.measured_out_dtype for entry in all_entries})
    places = _Places(
        configs=_positions(configs), runs=_positions([run["id"] for run in kept_runs]),
        rules=_positions(rules), out_dtypes=_positions(out_dtypes),
    )
    body = bytearray()
    blocks: dict[bytes, int] = {}
    header = {
        "schema": SCHEMA,
        "op": op,
        "configs": [config.to_json() for config in configs],
        "runs": kept_runs,
        "rules": rules,
        "out_dtypes": out_dtypes,
        "devices": [
            {
                "fingerprint": device.fingerprint.to_json(), "aliases": sorted(device.aliases),
                "is_predicted": device.is_predicted,
                "families": _write_families(device, places, body, blocks),
            }
            for device in devices
        ],
    }
    empty = canonical_json({**header, "digest": ""}) + "\n"
    digest = hashlib.sha256(empty.encode("ascii") + body).hexdigest()
    return (canonical_json({**header, "digest": digest}) + "\n").encode("ascii") + bytes(body)


T = TypeVar("T")


def _positions(items: Iterable[T]) -> dict[T, int]:
    return {item: position for position, item in enumerate(items)}


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where runs, rules and out dtypes stand in the header, and configs, there or among those of a
    family."""

    configs: Mapping[AnyConfig, int]
    runs: Mapping[str, int]
    rules: Mapping[str, int]
    out_dtypes: Mapping[str, int]

    def variant(self, entry: Entry) -> list[Any]:
        variant = [self.rules[entry.rule], [self._row(choice) for choice in entry.choices]]
        if entry.choices[0].run != PREDICTED_RUN:
            variant += [entry.measured_out_dtype, entry.kernel_sha256]
        return variant

    def _row(self, choice: Choice) -> list[Any]:
        if choice.run == PREDICTED_RUN:
            return [self.configs[choice.config], choice.median_us]
        return [
            self.configs[choice.config], choice.median_us, choice.spread_us, self.runs[choice.run],
            int(choice.is_drifted),
        ]


def _write_families(
    device: DeviceEntries, places: _Places, body: bytearray, blocks: dict[bytes, int]
) -> list[dict[str, Any]]:
    """Appends the blocks of a device to `body`, of equal ones the first; returns what the header
    says of them."""
    families: dict[AnyKey, dict[tuple[int, ...], list[Entry]]] = {}
    for entry in device.entries:
        family = families.setdefault(entry.key.family, {})
        family.setdefault(entry.key.sizes, []).append(entry)
    headers = []
    for family in sorted(families):
        entries = families[family]
        configs = sorted({
            choice.config for same in entries.values() for entry in same for choice in entry.choices
        })
        local = replace(places, configs=_positions(configs))
        block, numbers = _write_block(entries, device.models.get(family, {}), configs, local)
        if family in device.fitted_by:
            numbers["fitted_by"] = device.fitted_by[family]
        headers.append({
            "key": family.to_json(), "configs": [places.configs[config] for config in configs],
            "offset": blocks.setdefault(block, len(body)), **numbers,
        })
        if blocks[block] == len(body):
            body += block
    return headers


def _write_block(
    entries: Mapping[tuple[int, ...], Sequence[Entry]], models: Mapping[AnyConfig, TimeModel],
    configs: Sequence[AnyConfig], places: _Places,
) -> tuple[bytes, dict[str, Any]]:
    """The block of a family, and what the header says of its length.

    Args:
      entries: by sizes.
      models: of some of the configs.
      configs: of the family, as they stand in the header.
      places: where they and all else stand.
    """
    ordered = sorted(entries)
    groups = [list(members) for _, members in itertools.groupby(ordered, lambda sizes: sizes[:-1])]
    texts = [
        canonical_json(list(map(places.variant, entries[sizes]))).encode("ascii")
        for sizes in ordered
    ]
    columns = [
        _column("q", [size for members in groups for size in members[0][:-1]]),
        _column("I", _ends(groups)),
        _column("q", [size for sizes in ordered for size in sizes[-1:]]),
        _column("I", _ends(texts)),
    ]
    corrections = []
    if models:
        of_entries = [corrections_of(entries[sizes][0], models) for sizes in ordered]
        columns += [
            _column("I", _ends([one.corrections for one in of_entries])),
            _column("B", [places.out_dtypes[one.measured_out_dtype] for one in of_entries]),
        ]
        no_model = TimeModel(*[0] * len(TimeModel._fields))
        columns += [_MODEL.pack(*models.get(config, no_model)) for config in configs]
        corrections = [
            _CORRECTION.pack(places.configs[one.candidates[position][0]], is_drifted, *factors)
            for one in of_entries for position, is_drifted, *factors in one.corrections
        ]
    numbers = {
        "groups": len(groups), "entries": len(ordered), "corrections": len(corrections),
    }
    return b"".join([*columns, *corrections, *texts]), numbers


def _column(kind: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def _ends(items: Iterable[Sequence[Any]]) -> list[int]:
    """0, and then the lengths up to the end of each item."""
    return list(itertools.accumulate(map(len, items), initial=0))


REMEDY = "bake it anew with `stoneware bake`, or take a whole copy"
"""What to do about a table that is damaged, where it is not this installation's."""


def decode(
    data: bytes, path: str | os.PathLike[str], op: str | None, remedy: str = REMEDY
) -> Table:
    """Reads the bytes that `encode` made.

    Args:
      data: the bytes.
      path: named in errors.
      op: whose table it must be; None for any.
      remedy: what to do if it is damaged.

    Raises:
      TableError: naming `path`, what was expected, what was found, and the remedy.
    """
    line, newline, body = data.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        found = f"{len(data)} bytes that are none: {error}"
        raise _error(path, "a header in JSON", found, remedy) from error
    if not isinstance(header, dict) or "schema" not in header:
        raise _error(path, "a table with the key 'schema'", "none", remedy)
    if header["schema"] != SCHEMA:
        raise _error(path, f"schema {SCHEMA}", f"schema {header['schema']!r}", remedy)
    # A damaged one may be any text, also such as no encoding takes.
    digest = str(header.get("digest")).encode("ascii", "backslashreplace").decode("ascii")
    hashed = hashlib.sha256(line.replace(f'"digest":"{digest}"'.encode(), b'"digest":""', 1))
    hashed.update(newline)
    hashed.update(body)
    if hashed.hexdigest() != digest:
        raise _error(
            path, f"content with the digest {digest}", f"content with {hashed.hexdigest()}", remedy
        )
    if op is not None and header["op"] != op:
        raise _error(path, f"the table of {op}", f"that of {header['op']!r}", remedy)
    content = _Content(header, body)
    return Table(
        op=header["op"],
        digest=digest,
        devices=tuple(StoredDevice(device, content) for device in header["devices"]),
        runs={run["id"]: run for run in header["runs"]},
    )


def file_name(op: str) -> str:
    """The name of the table's file: a colon stands in no file name on Windows."""
    return f"{op.replace(':', '.')}{SUFFIX}"


def packaged_path(op: str) -> Path:
    """The file of the table that this installation carries for `op`."""
    return package_files.path("tables", file_name(op))


@functools.cache
def packaged(op: str) -> Table | None:
    """The table of this installation, read once at its first use; None for a decorated kernel that
    it has none of.

    Raises:
      TableError: the file is damaged, edited, of another schema or, for an op of ours, missing.
    """
    path = packaged_path(op)
    try:
        return read(path, op, package_files.REMEDY)
    except TableError as error:
        if is_kernel(op) and isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def read(path: str | os.PathLike[str], op: str | None, remedy: str = REMEDY) -> Table:
    """Reads a table's file; arguments as for `decode`.

    Raises:
      TableError: there is no such file, or it is damaged.
    """
    try:
        data = regular_file.read(path)
    except OSError as error:
        what = "a tuning table" if op is None else f"the tuning table of {op}"
        raise _error(path, what, f"no readable file: {error}", remedy) from error
    return decode(data, path, op, remedy)


def _error(path: str | os.PathLike[str], expected: str, found: str, remedy: str) -> TableError:
    return TableError(f"{path}: expected {expected}, found {found}; {remedy}")
