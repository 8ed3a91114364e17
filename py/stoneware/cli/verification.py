"""The checks of an installation by `stoneware verify`.

Each function yields the problems that it finds, as sentences with their places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from stoneware.errors import TableError
from stoneware.installation import NATIVE_MODULES
from stoneware.kernels import manifest
from stoneware.kernels.manifest import Manifest
from stoneware.runtime import environment, native, package_files, regular_file
from stoneware.specs import OPS
from stoneware.tuning import differences, entries, sources, table_file
from stoneware.tuning.store import user_store


def installation() -> dict[str, list[str]]:
    """Part of the installation -> its problems."""
    no_manifest = _error_of(lambda: len(manifest.packaged().kernels))  # parses all of it
    kernels = None if no_manifest else manifest.packaged()
    missing = [*filter(None, map(native.why_missing, NATIVE_MODULES))]
    return {
        "manifest": no_manifest,
        "native modules": missing,
        "kernels": list(_kernels(kernels, missing)),
        "tables": list(_tables(kernels)),
        "packages' tables": list(_packages()),
        "user's store": _user_store(),
        "mode of tuning": _error_of(environment.tuning_mode),
    }


def _error_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except (TableError, ValueError) as error:
        return [str(error)]
    return []


def _kernels(kernels: Manifest | None, missing: Sequence[str]) -> Iterator[str]:
    """Compares the bytes of every kernel, in a file or in a native module, with the manifest."""
    in_modules: dict[str, tuple[str, ModuleType]] = {}
    for name in NATIVE_MODULES:
        if native.why_missing(name) is None and hasattr(module := native.load(name), "image"):
            in_modules |= {kernel["id"]: (name, module) for kernel in module.kernels()}
    for record in kernels.kernels.values() if kernels else ():
        if record.description_sha256:
            for suffix, expected in (("cubin", record.sha256), ("json", record.description_sha256)):
                file = package_files.path("cubins", f"{record.id}.{suffix}")
                try:
                    yield from _digest(str(file), regular_file.read(file), expected)
                except OSError as error:
                    yield f"{file}: cannot be read: {error.strerror}; {package_files.REMEDY}"
        elif record.id in in_modules:
            name, module = in_modules[record.id]
            yield from _digest(f"{name}: {record.id}", module.image(record.id), record.sha256)
        elif not missing:
            yield f"no native module holds kernel {record.id} of the manifest; {package_files.REMEDY}"


def _digest(place: str, data: bytes, expected: str) -> Iterator[str]:
    actual = hashlib.sha256(data).hexdigest()
    if actual != expected:
        yield f"{place}: expected sha256={expected}, as the manifest says, found {actual}; {package_files.REMEDY}"


def _tables(kernels: Manifest | None) -> Iterator[str]:
    """Damage of a table, and configs whose kernels this installation lacks."""
    for op in OPS:
        place = table_file.packaged_path(op)
        problems = differences.verify(place, package_files.REMEDY)
        yield from problems
        table = None if problems or kernels is None else table_file.packaged(op)
        if table is None:
            continue
        configs = {choice.config for device in table.devices for entry in device.entries() for choice in entry.choices}
        for config in sorted(configs):
            if not entries.is_known(config, kernels):
                yield f"{place}: {config} is not a kernel of the manifest; {package_files.REMEDY}"


def _packages() -> Iterator[str]:
    """Every table in the folders that installed packages name."""
    folders, problems = sources.entry_points()
    yield from problems
    for name, folder in folders:
        files = sorted(folder.glob(f"*{table_file.SUFFIX}"))
        if not files:
            yield f"package {name}: {folder} has no table (<op>{table_file.SUFFIX}); add one"
        for file in files:
            for problem in differences.verify(file, sources.package_remedy(name)):
                yield f"package {name}: {problem}"


def _user_store() -> list[str]:
    try:
        store = user_store()
    except ValueError as error:
        return [str(error)]
    return [] if store is None else store.problems()
