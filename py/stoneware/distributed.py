"""sw.distributed: checks that the ranks of a job choose the same kernels.

Ranks do not communicate in a look-up, so they agree only if they read the same tables. A rank with
more samples in the user's store, an older wheel or another STONEWARE_TUNING would run a different
kernel, with different rounding and, if it measures, minutes later than the others.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoneware import __version__
from stoneware.errors import TuningMismatchError, explained
from stoneware.kernels import manifest
from stoneware.runtime.canonical import canonical_json
from stoneware.specs import OPS
from stoneware.tuning import policy, sources, store_table, table_file
from stoneware.tuning.table import Table

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("stoneware")

_INVARIANCE = "batch invariance"

_OF_THE_WHEEL = ("stoneware", "kernels", *(f"table of {op}" for op in OPS))


def assert_same_tuning(group: torch.distributed.ProcessGroup | None = None) -> str:
    """Checks that the ranks of a process group choose the same kernels; every rank must call it.

    It compares the version of Stoneware, its kernels and tables, the tables of other packages, the
    user's store, the overlay, the mode of `sw.tuning`, and whether `sw.batch_invariant` is on.

    If they differ only outside the wheel, every rank logs a warning, and from then on uses only the
    wheel's tables: overlay, user's store and other packages are ignored, "on_miss" measures nothing,
    and every plan is made again. The process cannot undo this.

    Args:
      group: torch's process group; None for the default one.

    Returns:
      The digest of the state that all ranks now choose by: 64 hexadecimal digits.

    Raises:
      TuningMismatchError: the wheels or the batch invariance differ; raised on every rank.
      ImportError: torch is not installed.
      RuntimeError: torch.distributed is not initialized.
      TableError: a table of this installation is damaged.
    """
    try:
        from torch import distributed
    except ModuleNotFoundError as error:
        raise explained(error) from error
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "assert_same_tuning needs an initialized process group, and torch.distributed has "
            "none; call it after torch.distributed.init_process_group(...)"
        )
    own = description()
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, own, group=group)
    differing = [name for name in own if any(other.get(name) != own[name] for other in everyone)]
    if not differing:
        return _digest(own)
    if any(name in _OF_THE_WHEEL for name in differing):
        raise TuningMismatchError(
            "every rank must have the same stoneware wheel, and they differ in "
            f"{', '.join(name for name in differing if name in _OF_THE_WHEEL)}:"
            f"{_by_rank(everyone, differing)}\ninstall one wheel on all of them"
        )
    if _INVARIANCE in differing:
        raise TuningMismatchError(
            f"batch invariance must hold on every rank or on none:{_by_rank(everyone, [_INVARIANCE])}\ncall "
            "assert_same_tuning inside sw.batch_invariant() on all of them, or give all of them the same "
            "STONEWARE_BATCH_INVARIANT"
        )
    policy.use_wheel_only()
    _LOG.warning(
        "the ranks are tuned differently (%s), so from now on each uses only the tables of the "
        "wheel:%s\ngive all of them the same STONEWARE_CACHE_DIR or a copy of one store, the same "
        "packages and the same STONEWARE_TUNING",
        ", ".join(differing),
        _by_rank(everyone, differing),
    )
    return _digest({name: own[name] for name in (*_OF_THE_WHEEL, _INVARIANCE)})


def description() -> dict[str, str]:
    """What this process decides by: name -> version, digest or value; "none" if it has none."""
    overlay = policy.current_overlay()
    packages, stored, in_memory = {}, {}, {}
    if not policy.wheel_only():
        packages = sources.package_digests()
        if (store := sources.existing_store()) is not None:
            stored = {op: _digest_of(store_table.tables(store.path, op)) for op in store.ops()}
        ops = {sample.op for _, sample in policy.memory()}
        in_memory = {op: _digest_of(sources.tables_of_memory(op)) for op in ops}
    return {
        "stoneware": __version__,
        "kernels": _digest({kernel.id: kernel.sha256 for kernel in manifest.packaged().kernels.values()}),
        **{f"table of {op}": table.digest for op in OPS if (table := table_file.packaged(op))},
        "tables of packages": _digest(packages),
        "user's store": _digest(stored),
        "samples in memory": _digest(in_memory),
        "overlay": "none" if overlay is None else _digest({op: table.digest for op, table in overlay.overlay.items()}),
        "mode": policy.current_mode(),
        _INVARIANCE: "on" if policy.is_batch_invariant() else "off",
    }


def _digest_of(tables: Iterable[Table]) -> str:
    return " ".join(table.digest for table in tables)


def _digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(canonical_json(dict(parts)).encode("ascii")).hexdigest() if parts else "none"


def _by_rank(everyone: Sequence[Mapping[str, str]], differing: Sequence[str]) -> str:
    """A line for each digest: its ranks, and what they have where the ranks differ."""
    ranks: dict[str, list[int]] = {}
    for rank, other in enumerate(everyone):
        ranks.setdefault(_digest(other), []).append(rank)
    lines = []
    for digest, members in ranks.items():
        values = everyone[members[0]]
        had = ", ".join(f"{name} {values.get(name, 'unknown')[:16]}" for name in differing)
        lines.append(f"\n  ranks {', '.join(map(str, members))}: digest {digest[:16]}: {had}")
    return "".join(lines)
