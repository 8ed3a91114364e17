"""The file of a tuning table, as the wheel carries it: one per op.

A look-up reads what it needs and nothing else: a header, one line of canonical JSON, then for each
kind of each device a block of little-endian columns:

    header   schema, op, digest, configs, runs, rules; the basis of the table of a store
             (`store_table.py`), which others do not have; each device with, for each kind that was
             measured there, the key, its configs (positions among all), where its block begins (offset
             from the end of the header), and how many groups, entries and corrections it has

    block    first sizes     i64 each, all sizes but the last (m) of each group; ascending
             ends of groups  u32, 0 and then how many entries there are up to the end of each group
             last sizes      i64, of each entry; ascending in a group
             ends of texts   u32, 0 and then bytes of the texts up to the end of each entry's
    only if there are corrections, which a block has that has models:
             ends of these   u32, 0 and then how many there are up to the end of each entry's
             models          of each config the fields of its candidate's TimeModel; slots is 0
                             without one
             corrections     config, whether it is stale, ratio, fullness; both as f16
    always
             texts           JSON, of each entry its variants, each [rule, run, choices, kernel digest]
                             with choices [config, median_us, spread_us], and then [.., run] if it is
                             of another run, [.., run, 1] if it is stale

Runs and rules are positions in the header, configs among those of the kind.

`digest` is the sha256 of the file with an empty digest, so that two ranks compare 64 characters,
and a damaged or edited table is refused whole. The header is checked when a table is opened, all
else when it is read (`table_view.py`); `check` reads everything.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoneware.errors import TableError
from stoneware.kernels.candidate import candidate_of
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyFamily, AnyKey, is_kernel
from stoneware.runtime import package_files, regular_file
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.table import Sizes, Table
from stoneware.tuning.table_entry import Entry
from stoneware.tuning.table_view import CORRECTION, DAMAGES, MODEL, Content, device_table

if TYPE_CHECKING:
    from stoneware.tuning.time_model import TimeModel

SCHEMA = 12
SUFFIX = ".table"

MOST_BYTES = 2**28
"""What a larger file is refused for, unread: some hundred times as much as a table has."""

_LONGEST_NAME = 150
"""Characters of a file's name before the digest that distinguishes names with the same start."""

REMEDY = "bake it anew with `stoneware bake`, or take a whole copy"
"""What to do about a table that is damaged, where it is not this installation's."""


@dataclass(frozen=True)
class Measured:
    """What a table has of one device.

    Attributes:
      fingerprint, aliases: the device.
      entries: of a kernel that was measured with several sources the newest first.
      models: family -> candidate -> model, of the candidates that were measured often enough.
    """

    fingerprint: DeviceFingerprint
    aliases: Sequence[str]
    entries: Sequence[Entry]
    models: Mapping[AnyFamily, Mapping[AnyConfig, TimeModel]]


def encode(
    op: str, measured: Sequence[Measured], runs: Mapping[str, Mapping[str, Any]], basis: Mapping[str, Any] | None = None
) -> bytes:
    """The bytes of a table.

    Args:
      op: whose table.
      measured: each device, sorted by fingerprint.
      runs: id of each run -> its RUN_FIELDS.
      basis: of the table of a store.
    """
    writer = _Writer([entry for device in measured for entry in device.entries])
    header = {
        "schema": SCHEMA,
        "op": op,
        "configs": [config.to_json() for config in writer.configs],
        "runs": [runs[run_id] for run_id in writer.runs],
        "rules": list(writer.rules),
        "devices": [
            {
                "fingerprint": device.fingerprint.to_json(),
                "aliases": sorted(device.aliases),
                "kinds": writer.add(device),
            }
            for device in measured
        ],
        **({"basis": basis} if basis else {}),
    }
    empty = canonical_json({**header, "digest": ""}) + "\n"
    digest = hashlib.sha256(empty.encode("ascii") + writer.body).hexdigest()
    line = canonical_json({**header, "digest": digest}) + "\n"
    return line.encode("ascii") + writer.body


def _positions(items: Iterable[Any]) -> dict[Any, int]:
    """Each item, once and sorted, with its position."""
    return {item: position for position, item in enumerate(sorted(set(items)))}


class _Writer:
    """The body of a file as it grows, and where configs, runs and rules stand in the header."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        choices = [choice for entry in entries for choice in entry.choices]
        self.configs = _positions(choice.config for choice in choices)
        self.runs = _positions(choice.run for choice in choices)
        self.rules = _positions(entry.rule for entry in entries)
        self.body = bytearray()

    def add(self, device: Measured) -> list[dict[str, Any]]:
        """Appends the blocks of a device, and returns their parts of the header."""
        kinds: dict[AnyKey, dict[Sizes, list[Entry]]] = {}
        for entry in device.entries:
            kinds.setdefault(entry.key.kind, {}).setdefault(entry.key.sizes, []).append(entry)
        return [self._add(kind, kinds[kind], device.models.get(kind.family, {})) for kind in sorted(kinds)]

    def _add(
        self, kind: AnyKey, by_sizes: Mapping[Sizes, list[Entry]], models: Mapping[AnyConfig, TimeModel]
    ) -> dict[str, Any]:
        sizes = sorted(by_sizes)
        variants = [by_sizes[at] for at in sizes]
        choices = [choice for entry in itertools.chain.from_iterable(variants) for choice in entry.choices]
        configs = _positions(choice.config for choice in choices)
        groups = [list(members) for _, members in itertools.groupby(sizes, lambda at: at[:-1])]
        texts = [canonical_json([self._variant(entry, configs) for entry in entries]) for entries in variants]
        columns = [
            _column("q", [size for members in groups for size in members[0][:-1]]),
            _column("I", _ends(groups)),
            _column("q", [size for at in sizes for size in at[-1:]]),
            _column("I", _ends(texts)),
        ]
        corrections: list[bytes] = []
        if models:
            from stoneware.tuning.time_model import TimeModel, corrections_of

            no_model = TimeModel(*[0] * len(TimeModel._fields))
            candidates = {candidate_of(config, kind): position for config, position in configs.items()}
            rows_of_entries = [corrections_of(entry, models) for entry, *_ in variants]
            columns += [
                _column("I", _ends(rows_of_entries)),
                *(MODEL.pack(*models.get(candidate, no_model)) for candidate in candidates),
            ]
            corrections = [
                CORRECTION.pack(candidates[candidate], is_stale, *factors)
                for rows in rows_of_entries
                for candidate, is_stale, *factors in rows
            ]
        offset = len(self.body)
        self.body += b"".join([*columns, *corrections, "".join(texts).encode("ascii")])
        return {
            "key": kind.to_json(),
            "configs": [self.configs[config] for config in configs],
            "offset": offset,
            "groups": len(groups),
            "entries": len(sizes),
            "corrections": len(corrections),
        }

    def _variant(self, entry: Entry, configs: Mapping[AnyConfig, int]) -> list[Any]:
        times = collections.Counter(choice.run for choice in entry.choices)
        run = max(sorted(times), key=times.__getitem__)
        choices = []
        for choice in entry.choices:
            other_run = [self.runs[choice.run]] if choice.is_stale or choice.run != run else []
            stale = [1] if choice.is_stale else []
            choices.append([configs[choice.config], choice.median_us, choice.spread_us, *other_run, *stale])
        return [self.rules[entry.rule], self.runs[run], choices, entry.kernel_sha256]


def _column(kind: str, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def _ends(items: Iterable[Sequence[Any]]) -> list[int]:
    """0, and then the lengths up to the end of each item."""
    return list(itertools.accumulate(map(len, items), initial=0))


def decode(data: bytes, path: str | os.PathLike[str], op: str | None, remedy: str = REMEDY) -> Table:
    """Opens the bytes that `encode` made.

    Args:
      data: the bytes.
      path: named in errors.
      op: whose table it must be; None for any.
      remedy: what to do if it is damaged.

    Raises:
      TableError: naming `path`, what was expected, what was found, and the remedy.
    """

    error = functools.partial(_error, path, remedy)

    def damaged(cause: Exception) -> TableError:
        return error("the contents of a table", f"what breaks its rules: {type(cause).__name__}: {cause}"[:300])

    end = data.find(b"\n") % (len(data) + 1)  # without a newline the header is all
    line, rest = data[:end], memoryview(data)[end:]
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as cause:
        raise error("a header in JSON", f"{len(data)} bytes that are not a table: {cause}") from cause
    if not isinstance(header, dict) or "schema" not in header:
        raise error("a table with the key 'schema'", "none")
    if type(header["schema"]) is not int or header["schema"] != SCHEMA:
        raise error(f"schema {SCHEMA}", f"schema {header['schema']!r:.40}")
    # A damaged one may be any text, also such as no encoding takes.
    digest = str(header.get("digest")).encode("ascii", "backslashreplace").decode("ascii")
    hashed = hashlib.sha256(line.replace(f'"digest":"{digest}"'.encode(), b'"digest":""', 1))
    hashed.update(rest)
    if hashed.hexdigest() != digest:
        raise error(f"content with the digest {digest}", f"content with {hashed.hexdigest()}")
    try:
        table_op = header["op"]
        if not isinstance(table_op, str) or not table_op:
            raise ValueError("op must be a text")
        content = Content(header, rest[1:], damaged)
        devices = [device_table(device, content) for device in header["devices"]]
    except DAMAGES as cause:
        raise damaged(cause) from cause
    if op is not None and table_op != op:
        raise error(f"the table of {op}", f"that of {table_op!r:.80}")
    return Table(op=table_op, digest=digest, devices=devices, runs=content.runs, basis=header.get("basis"))


def check(table: Table) -> None:
    """Reads everything that a table holds.

    Raises:
      TableError: something of it breaks a rule.
    """
    for device in table.devices:
        for block in device.blocks.values():
            for sizes in block.sizes:
                block.variants(sizes)
                if block.has_models:
                    block.corrections(sizes)
            _ = block.models  # reading checks it


def file_name(op: str) -> str:
    """The name of the table's file: a colon stands in no file name on Windows."""
    return f"{op.replace(':', '.')}{SUFFIX}"


def safe_name(op: str) -> str:
    """A file name for an op, without suffix; never a path to another folder."""
    if op.isidentifier():
        return op
    from urllib.parse import quote

    name = quote(op.replace(":", "."), safe="<>")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(op.encode()).hexdigest()[:32]}"
    return name


def packaged_path(op: str) -> Path:
    """The file of the table that this installation carries for `op`."""
    return package_files.path("tables", file_name(op))


@functools.cache
def packaged(op: str) -> Table | None:
    """The table of this installation, opened once at its first use; None for a decorated kernel
    that it has none of.

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
    """Opens a table's file; arguments as for `decode`.

    Raises:
      TableError: the file is missing, too large, or it is damaged.
    """
    try:
        data = regular_file.read(path, MOST_BYTES)
    except OSError as error:
        what = "a tuning table" if op is None else f"the tuning table of {op}"
        raise _error(path, remedy, what, f"no readable file: {error}") from error
    return decode(data, path, op, remedy)


def _error(path: str | os.PathLike[str], remedy: str, expected: str, content: str) -> TableError:
    content = content.encode("ascii", "backslashreplace").decode("ascii")
    return TableError(f"{path}: expected {expected}, found {content}; {remedy}")
