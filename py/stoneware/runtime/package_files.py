"""Data files of the wheel, and tables of other packages."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from stoneware.errors import TableError
from stoneware.runtime import regular_file

ROOT = Path(__file__).parent.parent
"""The folder of the package `stoneware`."""

REMEDY = "reinstall the stoneware wheel (pip install --force-reinstall)"
"""What to do about a file of the package that is missing or damaged."""


def path(*parts: str) -> Path:
    """A file of the package: `path("tables", "scaled_mm.table")`."""
    return ROOT.joinpath(*parts)


def read_listed(path: Path, sha256: str) -> bytes:
    """The bytes of a file of the package, if they are those that the manifest lists.

    Raises:
      TableError: it cannot be read, or has another digest.
    """
    try:
        data = regular_file.read(path)
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error}; {REMEDY}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise TableError(f"{path}: its sha256={digest} must be {sha256 or 'listed'}, as the manifest says; {REMEDY}")
    return data


def may_have_entry_points(group: str) -> bool:
    """Whether an installed distribution may have entry points of a group.

    importlib.metadata could answer this, but is slow to import and reads every distribution. This searches only
    the files that list entry points. A file on sys.path, such as a zip file, counts like a distribution that
    has some.
    """
    for place in sys.path:
        if os.path.isfile(place):
            return True
        try:
            names = os.listdir(place or ".")
        except OSError:  # it does not exist
            continue
        for name in names:
            if not name.endswith((".dist-info", ".egg-info")):
                continue
            try:
                text = Path(place, name, "entry_points.txt").read_bytes()
            except OSError:  # it has none
                continue
            if group.encode() in text:
                return True
    return False
