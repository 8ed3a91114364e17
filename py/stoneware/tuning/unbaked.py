"""Samples that no table contains yet: each is an exact entry for its own problem, at once.

Problems near them use them after the next bake, except those of decorated kernels, for which nothing is
fitted. Samples of our ops are not decoded until a look-up asks for their very key: a line begins with
the JSON of its key, so finding it is one look-up in a dict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from stoneware.kernels import manifest
from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyKey, is_kernel
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.device import DeviceFingerprint, by_hardware
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning import entries
from stoneware.tuning.samples import Run, decode
from stoneware.tuning.table import Block, DeviceTable, Sizes, Table
from stoneware.tuning.table_entry import Entry

if TYPE_CHECKING:
    pass


class Unbaked:
    """Lines of one op, on top of a table.

    Args:
      op: an op of ours, or a decorated kernel as "module:function".
      baked: the table that has the samples before them; None without.

    Attributes:
      named: the names of candidates and runs that the samples refer to.
      table: their entries; another object after each `add`.
    """

    def __init__(self, op: str, baked: Table | None = None) -> None:
        self.op = op
        self.baked = baked
        self.named: set[str] = set()
        self._all_lines: list[bytes] = []
        self._lines: dict[DeviceFingerprint, dict[str, list[bytes]]] = {}
        self._runs: dict[str, Run] = {}
        self._device_of_run: dict[str, DeviceFingerprint] = {}
        self._sizes: dict[DeviceFingerprint, dict[AnyKey, set[Sizes]]] = {}
        self._candidates: dict[str, tuple[AnyConfig, str]] = {}
        self.table = self._table()

    def add(self, samples: Sequence[bytes], named: Mapping[str, bytes]) -> None:
        """Adds lines; later ones count where a sample was stored again. Lines without a run are left out."""
        if named:
            self.named.update(named)
            decoded = decode(Path(), enumerate(named.values()), [], candidates=self._candidates)
            self._candidates = decoded.candidates
            self._runs.update(decoded.runs)
            baked = () if self.baked is None else self.baked.devices
            device_of = by_hardware(
                {run.device for run in self._runs.values()} | {device.fingerprint for device in baked}
            )
            self._device_of_run = {run.id: device_of[run.device] for run in self._runs.values()}
        for line in samples:
            head = line.partition(b',"samples":')[0]
            key, _, run_id = head.removeprefix(b'{"key":').rpartition(b',"run":')
            device = self._device_of_run.get(json.loads(run_id))
            if device is not None:
                by_key = self._lines.setdefault(device, {})
                by_key.setdefault(key.decode(), []).append(line)
                self._all_lines.append(line)
        if is_kernel(self.op):
            for _, sample in decode(Path(), enumerate(samples), [], candidates=self._candidates).samples:
                device = self._device_of_run.get(sample.run)
                if sample.status == "ok" and device is not None:
                    self._sizes.setdefault(device, {}).setdefault(sample.key.kind, set()).add(sample.key.sizes)
        self.table = self._table()

    def entries_at(self, key: AnyKey, device: DeviceFingerprint) -> list[Entry]:
        """The entries at a key, from its lines and from what the table has there; none without a line."""
        lines = self._lines[device].get(canonical_json(key.to_json()), ())
        if not lines:
            return []
        decoded = decode(Path(), enumerate(lines), [], candidates=self._candidates)
        latest = {sample.identity: sample for _, sample in decoded.samples}
        kernels = None if is_kernel(self.op) else manifest.packaged()
        samples = [sample for sample in latest.values() if entries.is_known(sample.config, kernels)]
        taken = [(self._runs[sample.run], sample) for sample in samples]
        return entries.entries(taken, kernels, device.compute_capability, self._baked_at(key, device))

    def _baked_at(self, key: AnyKey, device: DeviceFingerprint) -> Sequence[Entry]:
        for _, baked in self.baked.near(device)[0] if self.baked is not None else ():
            block = baked.block(key.kind)
            if block is not None and key.sizes in block:
                return block.variants(key.sizes)
        return ()

    def _table(self) -> Table:
        runs = {run.id: run.in_table for run in self._runs.values()}
        return Table(
            op=self.op,
            devices=[
                _Device(
                    device,
                    (),
                    {kind: _Block(kind, self, device, sizes) for kind, sizes in self._sizes.get(device, {}).items()},
                    self,
                )
                for device in sorted(self._lines, key=lambda device: canonical_json(device.to_json()))
            ],
            runs=runs if self.baked is None else {**self.baked.runs, **runs},
            digest=lambda: hashlib.sha256(b"\n".join(sorted({*self._all_lines}))).hexdigest(),
        )


@dataclass(frozen=True, eq=False)
class _Device(DeviceTable):
    """A device with a block of the key's own kind, whichever that is."""

    unbaked: Unbaked
    made: dict[AnyKey, Block] = field(default_factory=dict)

    def of_family(self, key: AnyKey) -> Sequence[Block]:
        kind = key.kind
        if kind not in self.blocks and kind not in self.made:
            self.made[kind] = _Block(kind, self.unbaked, self.fingerprint)
        return [self.blocks.get(kind) or self.made[kind]]


class _Block(Block):
    """The entries of a kind, each made at its first use."""

    def __init__(
        self, kind: AnyKey, unbaked: Unbaked, device: DeviceFingerprint, all_sizes: Collection[Sizes] = ()
    ) -> None:
        self.kind, self._unbaked, self._device = kind, unbaked, device
        self.num_entries = len(all_sizes)
        self._last_sizes: dict[Sizes, list[int]] = {}
        for sizes in sorted(all_sizes):
            self._last_sizes.setdefault(sizes[:-1], []).extend(sizes[-1:])
        self.first_sizes = list(self._last_sizes)
        self._variants: dict[Sizes, list[Entry]] = {}

    def last_sizes(self, first: Sizes) -> Sequence[int]:
        return self._last_sizes.get(first, ())

    def __contains__(self, sizes: Sizes) -> bool:
        return bool(self.variants(sizes))

    def variants(self, sizes: Sizes) -> list[Entry]:
        if sizes not in self._variants:
            self._variants[sizes] = self._unbaked.entries_at(self.kind.with_sizes(sizes), self._device)
        return self._variants[sizes]
