"""The tuning table: what the bake distilled from the samples, as the wheel carries it.

One JSON document per op, in canonical form. `digest` is the sha256 of the document with an empty
digest, so that two ranks compare 64 characters, and a damaged or edited table is refused whole
instead of half believed. Past that check the content is trusted and read entry by entry at need.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoneware.autotune.canonical import canonical_json
from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.errors import TableError
from stoneware.runtime import package_files
from stoneware.runtime.device import DeviceFingerprint, names_match

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate at a shape, with its measurement.

    Attributes:
      config: the candidate.
      median_us, spread_us: median and interquartile range.
      run: id of the run that measured it.
      is_drifted: whether the kernel was rebuilt, with other bytes, since it was measured.
    """

    config: Config
    median_us: float
    spread_us: float
    run: str
    is_drifted: bool


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The candidates at one shape.

    Attributes:
      key: the shape and its family.
      choices: the chosen candidate first, then the runners-up from fast to slow.
      rule: why the first was chosen.
      measured_out_dtype: differs from the key's where the other 16-bit output was measured.
    """

    key: Key
    choices: tuple[Choice, ...]
    rule: str
    measured_out_dtype: str


class DeviceTable:
    """The entries of one device; `shapes[family][n, k]` is sorted by m."""

    def __init__(self, document: Mapping[str, Any], configs: list[Config], runs: list[str]) -> None:
        self.fingerprint = DeviceFingerprint.from_json(document["fingerprint"])
        self.aliases = tuple(document["aliases"])
        self._configs = configs
        self._runs = runs
        self._shapes: dict[Key, dict[tuple[int, int], list[dict[str, Any]]]] = {}
        self.num_entries = 0
        for family in document["families"]:
            shapes = self._shapes.setdefault(Key(**family["key"], n=0, k=0, m=0), {})
            for entry in family["entries"]:
                shapes.setdefault((entry["n"], entry["k"]), []).append(entry)
                self.num_entries += 1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    def shapes(self, family: Key) -> list[tuple[int, int, int]]:
        """Every (n, k, m) that has an entry in the family."""
        by_weight = self._shapes.get(family, {})
        return [(n, k, entry["m"]) for (n, k), entries in by_weight.items() for entry in entries]

    def m_values(self, family: Key, n: int, k: int) -> list[int]:
        """The m that have an entry for (n, k), ascending."""
        return [entry["m"] for entry in self._shapes.get(family, {}).get((n, k), [])]

    def entry(self, family: Key, n: int, k: int, m: int) -> Entry:
        """The entry at a shape that `shapes` or `m_values` gave."""
        raw = next(entry for entry in self._shapes[family][n, k] if entry["m"] == m)
        return Entry(
            key=Key(
                op=family.op, a_dtype=family.a_dtype, b_dtype=family.b_dtype,
                out_dtype=family.out_dtype, scales=family.scales, layout=family.layout,
                n=n, k=k, m=m,
            ),
            choices=tuple(
                Choice(
                    config=self._configs[config_idx], median_us=median_us, spread_us=spread_us,
                    run=self._runs[run_idx], is_drifted=bool(is_drifted),
                )
                for config_idx, median_us, spread_us, run_idx, is_drifted in raw["choices"]
            ),
            rule=raw["rule"],
            measured_out_dtype=raw["measured_out_dtype"],
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of one op.

    Attributes:
      op: whose table.
      digest: sha256 of the content.
      devices: those that were measured.
      runs: id of each run -> its versions, date and commit.
    """

    op: str
    digest: str
    devices: tuple[DeviceTable, ...]
    runs: Mapping[str, Mapping[str, Any]]

    def device(self, fingerprint: DeviceFingerprint) -> tuple[DeviceTable, bool] | None:
        """The entries of the same hardware and True, else of the nearest device and False.

        None if no device of this compute capability was measured.
        """
        near = [
            (fingerprint.distance(device.fingerprint), device.fingerprint.name, device)
            for device in self.devices
            if device.fingerprint.compute_capability == fingerprint.compute_capability
        ]
        if not near:
            return None
        nearest = min(near, key=lambda item: item[:2])[2]
        return nearest, nearest.fingerprint.same_hardware(fingerprint)

    def device_named(self, name: str) -> DeviceTable | None:
        """The device with this name or alias."""
        return next((device for device in self.devices if names_match(name, device.names)), None)


def encode(document: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a table document (without "digest"), with its digest put in."""
    empty = canonical_json({**document, "digest": ""})
    digest = hashlib.sha256(empty.encode("ascii")).hexdigest()
    return (canonical_json({**document, "digest": digest}) + "\n").encode("ascii")


def decode(data: bytes, path: str | os.PathLike[str], op: str) -> Table:
    """Reads the bytes that `encode` made.

    Raises:
      TableError: naming `path`, what was expected, what was found, and the remedy.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        found = f"{len(data)} bytes that are none: {error}"
        raise _error(path, "a JSON document", found) from error
    if not isinstance(document, dict) or "schema" not in document:
        raise _error(path, "a table with the key 'schema'", "none")
    if document["schema"] != SCHEMA:
        raise _error(path, f"schema {SCHEMA}", f"schema {document['schema']!r}")
    digest = document.get("digest")
    found = hashlib.sha256(
        data.rstrip(b"\n").replace(f'"digest":"{digest}"'.encode(), b'"digest":""', 1)
    ).hexdigest()
    if found != digest:
        raise _error(path, f"content with the digest {digest}", f"content with {found}")
    if document["op"] != op:
        raise _error(path, f"the table of {op}", f"that of {document['op']!r}")
    configs = [Config.from_json(config) for config in document["configs"]]
    runs = document["runs"]
    return Table(
        op=op,
        digest=digest,
        devices=tuple(
            DeviceTable(device, configs, [run["id"] for run in runs])
            for device in document["devices"]
        ),
        runs={run["id"]: run for run in runs},
    )


def packaged_path(op: str) -> Path:
    """The file of the table that this installation carries for `op`."""
    return package_files.path("tables", f"{op}.json")


@functools.cache
def packaged(op: str) -> Table:
    """The table of this installation, read once at its first use.

    Raises:
      TableError: the file is missing, damaged, edited, or of another schema.
    """
    path = packaged_path(op)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _error(path, f"the tuning table of {op}", f"no readable file: {error}") from error
    return decode(data, path, op)


def _error(path: str | os.PathLike[str], expected: str, found: str) -> TableError:
    return TableError(f"{path}: expected {expected}, found {found}; {package_files.REMEDY}")
