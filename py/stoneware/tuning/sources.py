"""Where entries come from: the sources that a look-up asks, first to last.

    overlay              of the `with sw.tuning(..., overlay=...)` around the call
    memory               samples of this process that the user's store could not take
    user's store         samples that were taken on this machine: those that are not baked yet, and
                         the table that was baked of the others
    wheel                the baked table of this installation
    package NAME         baked tables of other installed packages, by the name of the entry point

Each is a Table. An overlay of samples is baked in memory, and again when its files have changed. A
package offers tables through an entry point of the group "stoneware.tuning_tables", in its
pyproject.toml:

    [project.entry-points."stoneware.tuning_tables"]
    acme = "acme_kernels.tables"

The value names a folder, acme_kernels/tables, with a `table_file.file_name(op)` for each op; the
package is found and not imported. A damaged table of a package is skipped, and reported once, by
its path.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoneware.errors import TableError, quoted
from stoneware.runtime import environment, package_files, regular_file
from stoneware.runtime.device import DeviceFingerprint
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tuning import policy, store_table, table_file
from stoneware.tuning.table import Block, DeviceTable, Table

if TYPE_CHECKING:  # what only samples need costs an import a third of its time
    from stoneware.tuning.samples import Run, Sample
    from stoneware.tuning.store import Store
    from stoneware.tuning.unbaked import Unbaked

OVERLAY, MEMORY, STORE, WHEEL = "overlay", "memory", "user's store", "wheel"
GROUP = "stoneware.tuning_tables"

_LOG = logging.getLogger("stoneware.tuning")
_warn_once = functools.cache(_LOG.warning)


@dataclass(frozen=True)
class Source:
    """A table to search, and its name in explanations."""

    name: str
    table: Table


@dataclass(frozen=True)
class Place:
    """The entries of a family in one source for one device, which may differ from the device of the call."""

    source: Source
    position: int
    device: DeviceTable
    block: Block
    distance: float
    is_other_device: bool = False


def sources(op: str, *, has_packages: bool = True) -> tuple[Source, ...]:
    """The sources that hold anything of `op` here and now, first to last.

    Args:
      op: an op of ours, or a decorated kernel as "module:function".
      has_packages: whether to ask for packages' tables too; that takes some 15 ms at the first time
        in a process (importlib.metadata reads every installed distribution).

    Raises:
      TableError: the wheel's table or manifest is damaged.
      ValueError: STONEWARE_CACHE_DIR breaks its rule.
    """
    wheel = table_file.packaged(op)
    last = () if wheel is None else (Source(WHEEL, wheel),)
    if policy.wheel_only():
        return last
    first = []
    overlay = policy.current_overlay()
    if overlay is not None and op in overlay.overlay:
        first.append(Source(OVERLAY, overlay.overlay[op]))
    first += [Source(MEMORY, table) for table in tables_of_memory(op)]
    folder = environment.tuning_folder()
    if folder is not None:
        tables = store_table.tables(Path(folder, environment.STORE_NAME), op)
        first += [Source(STORE, table) for table in tables if table.devices]
    near = (*first, *last)
    return with_packages(op, near) if has_packages else near


def with_packages(op: str, near: tuple[Source, ...]) -> tuple[Source, ...]:
    """Adds the tables of packages to the result of `sources(..., has_packages=False)`."""
    return near if policy.wheel_only() else (*near, *packages(op))


def existing_store() -> Store | None:
    """The user's store, which may be empty yet; None where its folder is not there either. This is one
    stat then, and nothing is imported."""
    folder = environment.tuning_folder()
    if folder is None or not os.path.isdir(folder):
        return None
    from stoneware.tuning.store import store_in

    return store_in(folder)


def with_power_limit(device: DeviceFingerprint, ordinal: int | None, sources: Iterable[Source]) -> DeviceFingerprint:
    """The device's fingerprint, with its power limit if two that were measured differ in nothing
    else.

    Args:
      device: its fingerprint, of which the limit may be unknown.
      ordinal: torch's number of the GPU; None without one.
      sources: what was measured.
    """
    if device.power_limit_w or ordinal is None:
        return device
    limits = {
        other.fingerprint.power_limit_w
        for source in sources
        for other in source.table.devices
        if device.same_hardware(other.fingerprint)
    }
    if len(limits - {0}) < 2:
        return device
    from stoneware.runtime import nvml

    return replace(device, power_limit_w=nvml.power_limit_w(ordinal))


# What is made of files is kept by their stamps, and the versions that were asked for last.


def samples_of_store(store: Store, op: str) -> list[tuple[Run, Sample]]:
    """The samples of an op in a store, read anew when the store has changed."""
    # The stamp before the reading: what is written meanwhile is read the next time.
    return _samples_at(store.path, op, store.stamp())


@functools.lru_cache(maxsize=16)
def _samples_at(path: Path, op: str, stamp: tuple[int, ...]) -> list[tuple[Run, Sample]]:
    from stoneware.tuning.store import Store

    return Store(path).samples(op) if stamp else []


def tables_of_memory(op: str) -> tuple[Table, ...]:
    """The table of the samples that `policy.add_to_memory` got; none without any."""
    samples = policy.memory(op)  # they are only added
    if not samples:
        return ()
    from stoneware.tuning.samples import line_of_run, lines_of
    from stoneware.tuning.unbaked import Unbaked

    num_before, unbaked = _memory_tables.get(op) or (0, Unbaked(op))
    if num_before < len(samples):
        for _, items in itertools.groupby(samples[num_before:], key=lambda item: item[0].id):
            taken = list(items)
            lines = [line_of_run(taken[0][0]), *lines_of(sample for _, sample in taken)]
            named = {line.name: line.text.encode() for line in lines if not line.is_of_samples}
            unbaked.add([line.text.encode() for line in lines if line.is_of_samples], named)
        _memory_tables[op] = len(samples), unbaked
    return (unbaked.table,)


_memory_tables: dict[str, tuple[int, Unbaked]] = {}
"""Op -> how many of its samples in memory are in the table, and the table."""


def overlay_tables(overlay: Table | str | Path) -> dict[str, Table]:
    """op -> table of what `sw.tuning` takes as an overlay; read anew when the files have changed.

    An overlay without entries is reported once, since nothing lies over the rest then.

    Raises:
      ValueError: nothing of a known kind is there.
      TypeError: it is of another type.
      TableError: a file is damaged.
    """
    if isinstance(overlay, Table):
        tables = {overlay.op: overlay}
    elif isinstance(overlay, (str, Path)):
        try:
            tables = _tables_of_path(Path(overlay))
        except OSError as error:
            raise ValueError(
                f"overlay={str(overlay)!r:.200} must be a path that can be read: {error.strerror}; "
                "pass a folder of samples, a store or a baked table"
            ) from error
    else:
        raise TypeError(
            f"overlay={quoted(overlay)} must be a Table or a path, not {type(overlay).__name__}; pass "
            "the folder of samples, the store or the table"
        )
    if not any(table.devices for table in tables.values()):
        _warn_once(
            "overlay=%s has no entry of a kernel that is known here, so it changes nothing; check the "
            "path, and what `stoneware verify` says of it",
            "a Table" if isinstance(overlay, Table) else str(overlay),
        )
    return tables


def _tables_of_path(overlay: Path) -> dict[str, Table]:
    path = Path(os.path.realpath(overlay))
    if path.is_dir():
        from stoneware.tuning import merge

        files = merge.files(path)
    else:
        files = [path] if path.suffix in (".sqlite3", table_file.SUFFIX) and path.is_file() else []
    if not files:
        raise ValueError(
            f"overlay={str(overlay)!r:.200} must be a folder of samples (with device.json), a "
            f"store (.sqlite3) or a baked table ({table_file.SUFFIX}), and does not exist; "
            "pass one of those"
        )
    return _tables_at(path, tuple((file, *regular_file.file_stamp(file)) for file in files))


@functools.lru_cache(maxsize=8)
def _tables_at(path: Path, stamp: tuple[Any, ...]) -> dict[str, Table]:
    if path.suffix == table_file.SUFFIX and path.is_file():
        table = table_file.read(path, None)
        return {table.op: table}
    from stoneware.tuning import entries, merge

    source = merge.read_source(path)
    if source.files and source.problems:
        raise TableError("; ".join(source.problems))
    for problem in source.problems:
        _warn_once("%s", problem)
    by_op: dict[str, Any] = {}
    for record, taken in source.devices:
        device = record.fingerprint
        # A run that knows no power limit was taken on the folder's device.
        runs = {run: replace(run, device=device) if run.device.same_hardware(device) else run for run, _ in taken}
        for run, sample in taken:
            by_op.setdefault(sample.op, []).append((runs[run], sample))
    records = [record for record, _ in source.devices]
    return {
        op: entries.table_of_samples(op, samples, table_file.packaged(op), records) for op, samples in by_op.items()
    }


@functools.cache
def packages(op: str) -> tuple[Source, ...]:
    """The tables of other installed packages, read once per process."""
    offered = []
    for name, folder in package_folders():
        path = folder / table_file.file_name(op)
        try:
            table = table_file.read(path, op, package_remedy(name))
            offered.append(Source(f"package {name}", table))
        except TableError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                _LOG.warning("a tuning table of package %s is skipped: %s", name, error)
    return tuple(offered)


def package_remedy(name: str) -> str:
    """What to do about a damaged table of the entry point `name`."""
    return f"reinstall the package that offers {name!r} to {GROUP}"


def package_digests() -> dict[str, str]:
    """ "package, file" -> sha256 of every table that other packages offer, for whatever op."""
    return {
        f"{name}, {path.name}": hashlib.sha256(regular_file.read(path, table_file.MOST_BYTES)).hexdigest()
        for name, folder in package_folders()
        for path in sorted(folder.glob(f"*{table_file.SUFFIX}"))
    }


@functools.cache
def package_folders() -> tuple[tuple[str, Path], ...]:
    """The folders of `entry_points`, asked for once; an entry point that names none is logged."""
    if not package_files.may_have_entry_points(GROUP):
        return ()
    folders, problems = entry_points()
    for problem in problems:
        _LOG.warning("%s", problem)
    return tuple(folders)


def entry_points() -> tuple[list[tuple[str, Path]], list[str]]:
    """(name of an entry point, folder) of each folder that packages name, sorted, each once; and what is wrong
    with the entry points that name none."""
    import importlib.metadata
    import importlib.util

    folders, problems = [], []
    for name, value in sorted({(point.name, point.value) for point in importlib.metadata.entry_points(group=GROUP)}):
        # Only the spec of the top package is looked up: that of a package inside would import the ones around it.
        top, *inner = value.split(".")
        reason = f"{top} is no package that is installed"
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError) as error:
            spec, reason = None, str(error)
        locations = (spec and spec.submodule_search_locations) or ()
        folders += [(name, Path(location, *inner)) for location in locations]
        if not locations:
            problems.append(
                f"entry point {name} = {quoted(value)} of {GROUP} must name a package with a folder of tables: {reason}"
            )
    return folders, problems


def forget() -> None:
    """Reads everything again at the next look-up; for tests."""
    package_folders.cache_clear()
    packages.cache_clear()
    forget_stores()


def forget_stores() -> None:
    """Opens stores and their tables anew at the next look-up; for tests and benchmarks."""
    for kept in (_samples_at, _tables_at):
        kept.cache_clear()
    store_table.forget()
    _memory_tables.clear()
