"""The tuning table: what the bake distilled from the samples, as the wheel carries it.

One file per op, lines of canonical JSON, so that a look-up parses what it needs and nothing else:

    header   schema, op, digest, configs, runs, rules; each device with, for each of its families,
             the key, its configs (positions among all), where its block is (offset from the end of
             the header) and how many entries it has
    block    a line with the groups of the family's entries: for each, the sizes that its entries
             share, which are all but the last (m), and how many bytes it has; a line with the
             models of its configs, [config, the fields of its TimeModel]; then the groups
    group    a line with the last sizes of its entries, ascending; then a line for each of these:
             its variants, each [rule, choices, measured out dtype, kernel digest] with choices
             [config, median_us, spread_us, run, is_drifted], or, predicted, [rule, choices] with
             choices [config, us]; then, if there are models, another line for each: [measured out
             dtype, corrections], each [config, ratio, fullness, is_drifted]; runs and rules are
             positions in the header, configs among those of the family, so that the block of the
             other 16-bit output, which says the same of other kernels, is the same one

A look-up reads the groups of its family, one group, and one entry of it: of 30 weights with 26 m each
it parses 30 + 26 items in place of 780. One at a shape that was not measured reads the models and
the corrections of some entries.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoneware.autotune import regular_file
from stoneware.autotune.canonical import canonical_json
from stoneware.autotune.config import AnyConfig, Config, config_from_json
from stoneware.autotune.key import AnyKey, Key, is_kernel, key_from_json, unchecked
from stoneware.autotune.table_entry import PREDICTED_RUN, Choice, DeviceEntries, Entry
from stoneware.autotune.time_model import Correction, TimeModel, corrections_of
from stoneware.errors import TableError
from stoneware.runtime import package_files
from stoneware.runtime.device import DeviceFingerprint, names_match

SCHEMA = 4

RUN_FIELDS = ("id", "driver", "cuda", "torch", "triton", "date", "commit")
"""What a table keeps of a run."""


class _Content:
    """What the blocks of all devices share: the bytes after the header, and the header's lists."""

    def __init__(self, header: Mapping[str, Any], body: str) -> None:
        self.op = header["op"]
        self.is_kernel = is_kernel(self.op)
        self.rules = header["rules"]
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
        return key_from_json(data, is_family=True) if self.is_kernel else Key(**data)


def size_log(size: int) -> float:
    """By what sizes are compared; that of a decorated kernel's key may be 0 or less."""
    return math.log(size) if size > 0 else size - 1.0


Corrections = tuple[str, list[Correction]]
"""The output dtype that was measured at an entry, and what its choices say at other sizes."""


class Block:
    """The entries of one family on one device, as a look-up asks for them.

    Attributes:
      family: their key without sizes.
      sizes: those of each entry, sorted.
      models: of the configs that were measured often enough.
      has_models: whether there are any.
    """

    family: AnyKey
    sizes: Sequence[tuple[int, ...]]
    models: Mapping[AnyConfig, TimeModel] = {}

    @property
    def has_models(self) -> bool:
        return bool(self.models)

    @functools.cached_property
    def _by_first(self) -> dict[tuple[int, ...], list[int]]:
        by_first: dict[tuple[int, ...], list[int]] = {}
        for sizes in self.sizes:
            by_first.setdefault(sizes[:-1], []).extend(sizes[-1:])
        return by_first

    @property
    def first_sizes(self) -> Collection[tuple[int, ...]]:
        """All sizes but the last, of each group of entries that share them."""
        return self._by_first.keys()

    @functools.cached_property
    def first_logs(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Each of `first_sizes` with the logarithms by which shapes are compared."""
        return [(first, tuple(map(size_log, first))) for first in self.first_sizes]

    def last_sizes(self, first: tuple[int, ...]) -> Sequence[int]:
        """Every last size (m) that has an entry with these first ones, ascending."""
        return self._by_first.get(first, ())

    def __contains__(self, sizes: tuple[int, ...]) -> bool:
        first, last = sizes[:-1], sizes[-1:]
        return last[0] in self.last_sizes(first) if last else first in self.first_sizes

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
        self, all_sizes: Sequence[tuple[int, ...]], models: Mapping[AnyConfig, TimeModel]
    ) -> list[Corrections]:
        """What entries of an op of ours say at other sizes.

        Args:
          all_sizes: of each entry.
          models: of another table, which come before `self.models`.
        """
        entries = map(self.entry, all_sizes)
        return [
            (entry.measured_out_dtype, corrections_of(entry, {**self.models, **models}))
            for entry in entries
        ]


class _ParsedBlock(Block):
    """A block of a table's bytes, of which each part is parsed when it is asked for."""

    def __init__(self, family: AnyKey, content: _Content, header: Mapping[str, Any]) -> None:
        self.family = family
        self._content = content
        self._configs = header["configs"]
        self._offset = header["offset"]
        self._last_sizes: dict[tuple[int, ...], list[int]] = {}
        self._corrections: dict[tuple[int, ...], list[str]] = {}
        self._candidates = _Candidates(self._candidate)

    @functools.cached_property
    def _places(self) -> dict[tuple[int, ...], tuple[int, int]]:
        """First sizes -> where their group begins and ends."""
        groups, _, start = self._heads
        rows = _parsed(groups)
        ends = list(itertools.accumulate((row.pop() for row in rows), initial=start))
        return dict(zip(map(tuple, rows), itertools.pairwise(ends)))

    @functools.cached_property
    def _heads(self) -> tuple[str, str, int]:
        """The line of the groups, the line of the models, and where the first group begins."""
        body = self._content.body
        models = body.index("\n", self._offset) + 1
        start = body.index("\n", models) + 1
        return body[self._offset:models], body[models:start], start

    def _config(self, position: int) -> AnyConfig:
        return self._content.config(self._configs[position])

    def _candidate(self, position: int) -> tuple[AnyConfig, TimeModel | None]:
        line = self._heads[1]
        start = line.find(f"[{position},")  # no other list within the line begins with it
        model = None if start < 0 else TimeModel._make(_parsed(line, start)[1:])
        return self._config(position), model

    @functools.cached_property
    def models(self) -> dict[AnyConfig, TimeModel]:
        return dict(self._candidates[model[0]] for model in _parsed(self._heads[1]))

    @property
    def has_models(self) -> bool:
        return self._heads[1] != "[]\n"

    def _correction_lines(self, first: tuple[int, ...]) -> list[str]:
        """Of a block with models what each entry of a group says at other sizes."""
        lines = self._corrections.get(first)
        if lines is None:
            start, end = self._places[first]
            lines = self._corrections[first] = self._content.body[start:end].rsplit(
                "\n", len(self.last_sizes(first)) + 1)[1:]
        return lines

    @functools.cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        return [
            (*first, *last) for first in self._places
            for last in ([[size] for size in self.last_sizes(first)] or [[]])
        ]

    @property
    def first_sizes(self) -> Collection[tuple[int, ...]]:
        return self._places.keys()

    def last_sizes(self, first: tuple[int, ...]) -> Sequence[int]:
        last = self._last_sizes.get(first)
        if last is None:
            place = self._places.get(first)
            if place is None:
                return ()
            last = self._last_sizes[first] = _parsed(self._content.body, place[0])
        return last

    def entry(
        self, sizes: tuple[int, ...], kernel_sha256: str = "", key: AnyKey | None = None
    ) -> Entry:
        content = self._content
        first = sizes[:-1]
        position = self.last_sizes(first).index(sizes[-1]) if sizes else 0
        body = self._content.body
        start = body.index("\n", self._places[first][0])
        for _ in range(position):
            start = body.index("\n", start + 1)
        variants = _parsed(body, start + 1)
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
        return Choice(
            config=self._config(position), median_us=median_us, spread_us=spread_us,
            run=self._content.runs[run], is_drifted=is_other or bool(is_drifted),
            kernel_sha256=sha256,
        )

    def corrections(
        self, all_sizes: Sequence[tuple[int, ...]], models: Mapping[AnyConfig, TimeModel]
    ) -> list[Corrections]:
        if models or not self.has_models:
            return super().corrections(all_sizes, models)
        candidates = self._candidates
        found = []
        for sizes in all_sizes:
            first = sizes[:-1]
            position = self.last_sizes(first).index(sizes[-1])
            found.append(self._correction_lines(first)[position])
        return [
            (measured_out_dtype, [
                (*candidates[position], ratio, fullness, is_drifted)
                for position, ratio, fullness, is_drifted in rows
            ])
            for measured_out_dtype, rows in _parsed(f"[{','.join(found)}]")
        ]


class _Candidates(dict[int, tuple[AnyConfig, "TimeModel | None"]]):
    """Position of a config -> it and its model, made once: the same objects each time."""

    def __init__(self, make: Callable[[int], tuple[AnyConfig, TimeModel | None]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, position: int) -> tuple[AnyConfig, TimeModel | None]:
        found = self[position] = self._make(position)
        return found


_DECODER = json.JSONDecoder()


def _parsed(text: str, start: int = 0) -> Any:
    """The JSON that begins at `start`, whatever follows it."""
    return _DECODER.raw_decode(text, start)[0]


class DeviceBlocks:
    """The entries of one device by family, as a look-up asks for them.

    Attributes:
      fingerprint: the device.
      is_predicted: whether nothing was measured there.
    """

    def __init__(self, fingerprint: DeviceFingerprint, is_predicted: bool) -> None:
        self.fingerprint = fingerprint
        self.is_predicted = is_predicted

    def block(self, family: AnyKey) -> Block | None:
        """The entries of a family; None if there are none."""
        raise NotImplementedError


class DeviceTable(DeviceBlocks):
    """The entries of one device in a table.

    Attributes:
      aliases: further names of the device.
      num_entries: how many there are.
    """

    def __init__(self, header: Mapping[str, Any], content: _Content) -> None:
        super().__init__(
            DeviceFingerprint.from_json(header["fingerprint"]), header["is_predicted"]
        )
        self.aliases = tuple(header["aliases"])
        self.num_entries = sum(family["entries"] for family in header["families"])
        self._header = header
        self._content = content
        self._blocks: dict[AnyKey, Block] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

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
            block = self._blocks[family] = _ParsedBlock(family, self._content, header)
        return block

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


NearDevices = tuple[tuple[float, DeviceTable], ...]
"""(distance, device), nearest first."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of one op.

    Attributes:
      op: whose table.
      digest: sha256 of the content.
      devices: those that were measured by fingerprint, then those that were predicted; the look-up
        asks of them what a DeviceBlocks has.
      runs: id of each run -> its versions, date and commit.
    """

    op: str
    digest: str
    devices: tuple[DeviceTable, ...]
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

    def device_named(self, name: str) -> DeviceTable | None:
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
    places = _Places(
        configs={config: position for position, config in enumerate(configs)},
        runs={run["id"]: position for position, run in enumerate(kept_runs)},
        rules={rule: position for position, rule in enumerate(rules)},
    )
    body = bytearray()
    blocks: dict[bytes, int] = {}
    header = {
        "schema": SCHEMA,
        "op": op,
        "configs": [config.to_json() for config in configs],
        "runs": kept_runs,
        "rules": rules,
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


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where runs and rules stand in the header, and configs, there or among those of a family."""

    configs: Mapping[AnyConfig, int]
    runs: Mapping[str, int]
    rules: Mapping[str, int]

    def variant(self, entry: Entry) -> list[Any]:
        variant = [self.rules[entry.rule], [self._row(choice) for choice in entry.choices]]
        if entry.choices[0].run != PREDICTED_RUN:
            variant += [entry.measured_out_dtype, entry.kernel_sha256]
        return variant

    def corrections(self, entry: Entry, models: Mapping[AnyConfig, TimeModel]) -> list[Any]:
        return [entry.measured_out_dtype, [
            [self.configs[config], ratio, fullness, int(is_drifted)]
            for config, _, ratio, fullness, is_drifted in corrections_of(entry, models)
        ]]

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
        configs = sorted({
            choice.config for entries in families[family].values() for entry in entries
            for choice in entry.choices
        })
        local = replace(places, configs={
            config: position for position, config in enumerate(configs)
        })
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for sizes in sorted(families[family]):
            groups.setdefault(sizes[:-1], []).append(sizes)
        models = device.models.get(family, {})
        texts = [
            _lines([
                [sizes[-1] for sizes in members if sizes],
                *(list(map(local.variant, families[family][sizes])) for sizes in members),
                *(local.corrections(families[family][sizes][0], models)
                  for sizes in members if models),
            ])
            for members in groups.values()
        ]
        block = _lines([
            [[*first, len(text)] for first, text in zip(groups, texts)],
            [[local.configs[config], *models[config]] for config in sorted(models)],
        ]) + b"".join(texts)
        headers.append({
            "key": family.to_json(), "configs": [places.configs[config] for config in configs],
            "offset": blocks.setdefault(block, len(body)), "entries": len(families[family]),
        })
        if blocks[block] == len(body):
            body += block
    return headers


def _lines(items: Iterable[Any]) -> bytes:
    return "".join(canonical_json(item) + "\n" for item in items).encode("ascii")


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
    digest = header.get("digest")
    hashed = hashlib.sha256(line.replace(f'"digest":"{digest}"'.encode(), b'"digest":""', 1))
    hashed.update(newline)
    hashed.update(body)
    if hashed.hexdigest() != digest:
        raise _error(
            path, f"content with the digest {digest}", f"content with {hashed.hexdigest()}", remedy
        )
    if op is not None and header["op"] != op:
        raise _error(path, f"the table of {op}", f"that of {header['op']!r}", remedy)
    content = _Content(header, body.decode("ascii"))
    return Table(
        op=header["op"],
        digest=digest,
        devices=tuple(DeviceTable(device, content) for device in header["devices"]),
        runs={run["id"]: run for run in header["runs"]},
    )


def file_name(op: str) -> str:
    """The name of the table's file: a colon stands in no file name on Windows."""
    return f"{op.replace(':', '.')}.json"


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
