"""The tuning table of an op, as look-ups read it: devices, the kinds measured there, the entries of these.

Samples become the bytes of a table (`entries.bake_samples`), and every table is opened from such bytes
(`table_file.decode`). Only samples that are not baked yet are entries without (`unbaked.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.key import AnyFamily, AnyKey
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning.table_entry import Entry

if TYPE_CHECKING:
    from stoneware.tuning.time_model import Corrections, TimeModel

RUN_FIELDS = ("id", "driver", "cuda", "torch", "triton", "date", "commit")
"""What a table keeps of a run."""

Sizes = tuple[int, ...]


def size_log(size: int) -> float:
    """By what sizes are compared; a size of a decorated kernel's key may be 0 or less."""
    return math.log(size) if size > 0 else size - 1.0


class Block:
    """The entries of one kind on one device: of a table's file (`table_view.py`), or of samples that are not baked
    yet (`unbaked.py`).

    Attributes:
      kind: their key without sizes.
      num_entries: how many sizes have an entry.
      has_models: whether times are modelled from them.
      first_sizes: all sizes but the last (m), of each group of entries that share them; ascending.
    """

    kind: AnyKey
    num_entries: int
    has_models = False
    first_sizes: Sequence[Sizes]

    def last_sizes(self, first: Sizes) -> Sequence[int]:
        """Every last size (m) that has an entry with these first ones, ascending."""
        raise NotImplementedError

    def variants(self, sizes: Sizes) -> Sequence[Entry]:
        """The entries at `sizes`, one of `self.sizes`: more than one where a decorated kernel was
        measured with several sources, the newest first."""
        raise NotImplementedError

    @property
    def models(self) -> Mapping[AnyConfig, TimeModel]:
        """By candidate, of the family's candidates that were measured often enough."""
        return {}

    def corrections(self, sizes: Sizes) -> Corrections:
        """The measured times of an op's entry at `sizes` over the modelled ones."""
        raise NotImplementedError

    @property
    def sizes(self) -> list[Sizes]:
        """The sizes of each entry, ascending."""
        return [
            (*first, *last)
            for first in self.first_sizes
            for last in ([[size] for size in self.last_sizes(first)] or [[]])
        ]

    @functools.cached_property
    def first_logs(self) -> list[tuple[Sizes, tuple[float, ...]]]:
        """Each of `first_sizes` with the logarithms by which shapes are compared."""
        return [(first, tuple(map(size_log, first))) for first in self.first_sizes]

    def __contains__(self, sizes: Sizes) -> bool:
        return sizes[-1] in self.last_sizes(sizes[:-1]) if sizes else bool(self.first_sizes)

    def entry(self, sizes: Sizes, kernel_sha256: str = "") -> Entry:
        """The entry at `sizes`, one of `self.sizes`.

        Args:
          sizes: where.
          kernel_sha256: of a decorated kernel as it is now: the entry that was measured with it is
            preferred, and the choices of another one are stale.
        """
        variants = self.variants(sizes)
        for entry in variants:
            if entry.kernel_sha256 == kernel_sha256:
                return entry
        entry = variants[0]
        if not kernel_sha256:
            return entry
        return replace(entry, choices=tuple(replace(choice, is_stale=True) for choice in entry.choices))

    @functools.cached_property
    def kept(self) -> dict[Any, Any]:
        """Cache of near NK shapes (`nearest.near_weights`)."""
        return {}


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """The entries of one device.

    Attributes:
      fingerprint, aliases: the device.
      blocks: of each kind, sorted.
    """

    fingerprint: DeviceFingerprint
    aliases: Sequence[str]
    blocks: Mapping[AnyKey, Block]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    def block(self, kind: AnyKey) -> Block | None:
        """The entries of a kind; None without any."""
        return self.blocks.get(kind)

    def of_family(self, key: AnyKey) -> Sequence[Block]:
        """The blocks of a key's family; none if nothing was measured with its scales, and so the vendor library's
        time is unknown."""
        blocks = self._by_family.get(key.family, ())
        return blocks if any(block.kind.scales == key.scales for block in blocks) else ()

    @functools.cached_property
    def _by_family(self) -> dict[AnyFamily, list[Block]]:
        families: dict[AnyFamily, list[Block]] = {}
        for kind, block in self.blocks.items():
            families.setdefault(kind.family, []).append(block)
        return families

    @property
    def num_entries(self) -> int:
        """How many problems it has; a kernel's sources count as one."""
        return sum(block.num_entries for block in self.blocks.values())

    def entries(self) -> Iterator[Entry]:
        """Every entry; of a kernel measured with several sources the newest."""
        for block in self.blocks.values():
            yield from (block.entry(sizes) for sizes in block.sizes)


NearDevices = tuple[tuple[float, DeviceTable], ...]
"""(distance, device), nearest first."""


class Table:
    """The table of one op.

    Args:
      op: whose table.
      devices: those that were measured, sorted by fingerprint.
      runs: id of each run -> its RUN_FIELDS.
      digest: what it is compared by; or what computes it, when it is first asked for.
      basis: what the table of a store was baked from (`store_table.py`); empty for others.
    """

    def __init__(
        self,
        *,
        op: str,
        devices: Sequence[DeviceTable],
        runs: Mapping[str, Mapping[str, Any]],
        digest: str | Callable[[], str],
        basis: Mapping[str, Any] | None = None,
    ) -> None:
        self.op = op
        self.devices = tuple(devices)
        self.runs = runs
        self.basis = basis or {}
        self._digest = digest
        self._near: dict[DeviceFingerprint, tuple[NearDevices, NearDevices]] = {}

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the table's bytes; of samples that are not baked yet, of their lines."""
        return self._digest if isinstance(self._digest, str) else self._digest()

    def near(self, device: DeviceFingerprint) -> tuple[NearDevices, NearDevices]:
        """The devices of its compute capability, nearest first, each with its distance: those that
        are the same hardware, and the others."""
        if device not in self._near:
            near = [(device.distance(other.fingerprint), other) for other in self.devices]
            near.sort(key=lambda item: (item[0], item[1].fingerprint.name))
            same, others = [
                tuple(
                    (distance, other)
                    for distance, other in near
                    if distance < math.inf and other.fingerprint.same_hardware(device) == is_same
                )
                for is_same in (True, False)
            ]
            self._near[device] = same, others
        return self._near[device]
