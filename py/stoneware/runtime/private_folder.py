"""Folders whose files are trusted: only this user or root can have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and the folders above it that are missing, for this user alone (mode 0700).

    Raises:
      OSError: it cannot be made, or something else is there.
    """
    folder = Path(path)
    for missing in (*reversed(folder.parents), folder):
        if not missing.is_dir():
            missing.mkdir(mode=0o700, exist_ok=True)


def why_untrusted(path: str | os.PathLike[str]) -> str | None:
    """Why another user may have written files in a folder: rule, value and remedy, without the path.

    None if no other user can, or if the folder does not exist.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if status.st_uid not in (user, 0):  # root can write everywhere anyway
        return (
            f"the folder must belong to user {user}, who runs this, and belongs to user "
            f"{status.st_uid}; set STONEWARE_CACHE_DIR to a folder of your own"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"the folder must be writable by its owner alone, and its mode is {mode:04o}; delete "
            "it, or check its files and run chmod 700 on it"
        )
    return None
