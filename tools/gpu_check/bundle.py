"""Builds gpu_check.pyz: one file that checks and measures the wheel on any machine with a GPU.

    bundle --out gpu_check.pyz --wheel W.whl --wheel W2.whl --pure_wheel pytest.whl ... \\
        --source tests/gpu/x_test.py=PATH ...

Equal inputs give equal bytes: entries are sorted, carry one date and one mode, and are stored
without compression (deflate's output differs between versions of zlib).
"""

from __future__ import annotations

import pathlib
import sys
import zipfile
from collections.abc import Mapping, Sequence

from absl import app, flags

_SHEBANG = b"#!/usr/bin/env python3\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can hold
_FILE_MODE = 0o100644 << 16

_MAIN = b"""import pathlib
import sys

from tools.gpu_check import runner

sys.exit(runner.main(sys.argv[1:], pathlib.Path(sys.argv[0])))
"""


class BundleError(Exception):
    """The inputs make no archive; the message has rule, value and remedy."""


def collect(wheels: Sequence[str], pure_wheels: Sequence[str], sources: Sequence[str]) -> dict[str, bytes]:
    """The archive's entries by name.

    Args:
      wheels: paths of Stoneware's wheels, one per Python ABI.
      pure_wheels: paths of wheels that any Python 3 can use.
      sources: "NAME=PATH", where NAME is the place in the archive.

    Raises:
      BundleError: a file is of the wrong kind, or two would have one name.
    """
    if not wheels:
        raise BundleError("--wheel must be given at least once, since it is what is checked; pass one")
    placed = [(f"wheels/{pathlib.Path(path).name}", path) for path in wheels]
    for path in pure_wheels:
        name = pathlib.Path(path).name
        if not name.endswith("-none-any.whl"):
            raise BundleError(
                f"--pure_wheel={name} must be a wheel for any platform, *-none-any.whl; pass such a wheel"
            )
        placed.append((f"pure_wheels/{name}", path))
    for source in sources:
        name, equals, path = source.partition("=")
        if not equals or not name or name.startswith("/") or ".." in name.split("/"):
            raise BundleError(f"--source={source} must be NAME=PATH with a relative NAME; pass one")
        placed.append((name, path))
    entries: dict[str, bytes] = {"__main__.py": _MAIN}
    for name, path in placed:
        if name in entries:
            raise BundleError(f"{name} must be among the inputs only once; remove the other")
        entries[name] = pathlib.Path(path).read_bytes()
    # Without these, a package `tools` that is installed on the machine would hide ours: Python
    # takes a folder without __init__.py only if no other entry of its path has one with.
    for name in list(entries):
        for folder in pathlib.PurePosixPath(name).parents:
            if name.startswith("tools/") and folder.name:
                entries.setdefault(f"{folder}/__init__.py", b"")
    if "tools/gpu_check/runner.py" not in entries:
        raise BundleError("--source must include tools/gpu_check/runner.py, the archive's program; pass it")
    return entries


def write(path: pathlib.Path, entries: Mapping[str, bytes]) -> None:
    """Writes a runnable archive of the entries."""
    with path.open("wb") as file:
        file.write(_SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                info = zipfile.ZipInfo(name, _DATE)
                info.create_system = 3  # Unix, wherever this runs
                info.external_attr = _FILE_MODE
                archive.writestr(info, entries[name])
    path.chmod(0o755)


def _define_flags() -> None:
    flags.DEFINE_string("out", None, "Archive to write.", required=True)
    flags.DEFINE_multi_string("wheel", [], "A wheel of Stoneware.")
    flags.DEFINE_multi_string("pure_wheel", [], "A pure-Python wheel that the tests need.")
    flags.DEFINE_multi_string("source", [], "NAME=PATH of a test or program.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, found {argv[1:]}")
    values = flags.FLAGS
    try:
        entries = collect(values.wheel, values.pure_wheel, values.source)
    except BundleError as error:
        sys.exit(f"bundle: {error}")
    write(pathlib.Path(values.out), entries)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
