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
from typing import Any

from stoneware.errors import TableError
from stoneware.kernels.candidate import candidate_of
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import is_kernel
from stoneware.runtime import package_files, regular_file
from stoneware.runtime.canonical import canonical_json
from stoneware.tuning.table import Block, Table
from stoneware.tuning.table_entry import Entry
from stoneware.tuning.table_view import CORRECTION, DAMAGES, MODEL, Content, device_table

SCHEMA = 10
SUFFIX = ".table"

MOST_BYTES = 2**28
"""What a larger file is refused for, unread: some hundred times as much as a table has."""

_LONGEST_NAME = 150
"""Characters of a file's name before the digest that distinguishes names with the same start."""

REMEDY = "bake it anew with `stoneware bake`, or take a whole copy"
"""What to do about a table that is damaged, where it is not this installation's."""


def digest(table: Table) -> str:
    """The digest that the table's file would have."""
    line, _, _ = encode(table).partition(b"\n")
    return json.loads(line)["digest"]


def encode(table: Table, basis: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of a table; `basis` is that of the table of a store."""
    writer = _Writer(table)
    header = {
        "schema": SCHEMA,
        "op": table.op,
        "configs": [config.to_json() for config in writer.configs],
        "runs": [table.runs[run_id] for run_id in writer.runs],
        "rules": list(writer.rules),
        "devices": [
            {
                "fingerprint": device.fingerprint.to_json(),
                "aliases": sorted(device.aliases),
                "kinds": [writer.add(device.blocks[kind]) for kind in sorted(device.blocks)],
            }
            for device in table.devices
        ],
        **({"basis": basis} if basis else {}),
    }
    empty = canonical_json({**header, "digest": ""}) + "\n"
    found = hashlib.sha256(empty.encode("ascii") + writer.body).hexdigest()
    line = canonical_json({**header, "digest": found}) + "\n"
    return line.encode("ascii") + writer.body


def _positions(items: Iterable[Any]) -> dict[Any, int]:
    """Each item, once and sorted, with its position."""
    return {item: position for position, item in enumerate(sorted(set(items)))}


class _Writer:
    """The body of a file as it grows, and where configs, runs and rules stand in the header."""

    def __init__(self, table: Table) -> None:
        blocks = [block for device in table.devices for block in device.blocks.values()]
        entries = [entry for block in blocks for sizes in block.sizes for entry in block.variants(sizes)]
        choices = [choice for entry in entries for choice in entry.choices]
        self.configs = _positions(choice.config for choice in choices)
        self.runs = _positions(choice.run for choice in choices)
        self.rules = _positions(entry.rule for entry in entries)
        self.body = bytearray()

    def add(self, block: Block) -> dict[str, Any]:
        """Appends a block, and returns its part of the header."""
        entries = itertools.chain.from_iterable(map(block.variants, block.sizes))
        configs = _positions(choice.config for entry in entries for choice in entry.choices)
        data, numbers = self._block(block, configs)
        offset = len(self.body)
        self.body += data
        return {
            "key": block.kind.to_json(),
            "configs": [self.configs[one] for one in configs],
            "offset": offset,
            **numbers,
        }

    def _block(self, block: Block, configs: Mapping[AnyConfig, int]) -> tuple[bytes, dict[str, int]]:
        """The bytes of a block, and the lengths in the header; `configs` of the kind, with their positions."""
        sizes = block.sizes
        groups = [list(members) for _, members in itertools.groupby(sizes, lambda one: one[:-1])]
        texts = [canonical_json([self._variant(entry, configs) for entry in block.variants(one)]) for one in sizes]
        columns = [
            _column("q", [size for members in groups for size in members[0][:-1]]),
            _column("I", _ends(groups)),
            _column("q", [size for one in sizes for size in one[-1:]]),
            _column("I", _ends(texts)),
        ]
        corrections: list[bytes] = []
        if block.has_models:
            of_entries = [block.corrections(one) for one in sizes]
            from stoneware.tuning.time_model import TimeModel

            no_model = TimeModel(*[0] * len(TimeModel._fields))
            candidates = [candidate_of(config, block.kind) for config in configs]
            position_of = {one: position for position, one in enumerate(candidates)}
            columns += [
                _column("I", _ends([one.corrections for one in of_entries])),
                *(MODEL.pack(*block.models.get(one, no_model)) for one in candidates),
            ]
            corrections = [
                CORRECTION.pack(position_of[one.candidates[at][0]], is_stale, *factors)
                for one in of_entries
                for at, is_stale, *factors in one.corrections
            ]
        numbers = {"groups": len(groups), "entries": len(sizes), "corrections": len(corrections)}
        return b"".join([*columns, *corrections, "".join(texts).encode("ascii")]), numbers

    def _variant(self, entry: Entry, configs: Mapping[AnyConfig, int]) -> list[Any]:
        times = collections.Counter(one.run for one in entry.choices)
        run = max(sorted(times), key=times.__getitem__)
        choices = []
        for one in entry.choices:
            rest = [self.runs[one.run], 1] if one.is_stale else [self.runs[one.run]] if one.run != run else []
            choices.append([configs[one.config], one.median_us, one.spread_us, *rest])
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
    said = str(header.get("digest")).encode("ascii", "backslashreplace").decode("ascii")
    hashed = hashlib.sha256(line.replace(f'"digest":"{said}"'.encode(), b'"digest":""', 1))
    hashed.update(rest)
    if hashed.hexdigest() != said:
        raise error(f"content with the digest {said}", f"content with {hashed.hexdigest()}")
    try:
        found = header["op"]
        if not isinstance(found, str) or not found:
            raise ValueError("op must be a text")
        content = Content(header, rest[1:], damaged)
        devices = [device_table(device, content) for device in header["devices"]]
    except DAMAGES as cause:
        raise damaged(cause) from cause
    if op is not None and found != op:
        raise error(f"the table of {op}", f"that of {found!r:.80}")
    return Table(op=found, digest=said, devices=devices, runs=content.runs, basis=header.get("basis"))


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


def _error(path: str | os.PathLike[str], remedy: str, expected: str, found: str) -> TableError:
    found = found.encode("ascii", "backslashreplace").decode("ascii")
    return TableError(f"{path}: expected {expected}, found {found}; {remedy}")
