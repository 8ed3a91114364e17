"""Folders of files that a process keeps for the next ones, such as compiled kernels.

    <tuning folder>/<folder>/<name><suffix>

A file has two parts: a line with the sha256 of the rest, and the rest. Each file is checked when it is
read. The digest detects damage, not tampering: a folder that other users can write is not used at all.
Writers replace files atomically, so any number of processes may share a folder. If it exceeds its bound,
the oldest files are deleted. Problems are logged once per place, and cost nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stoneware.runtime import environment, private_folder, regular_file

_TRIMMED_FRACTION = 0.9
"""The part of the bound to which a folder is trimmed, so that not every write deletes a file."""

Content = TypeVar("Content")


class KeptFiles:
    """A folder.

    Args:
      folder: its name in the tuning folder.
      suffix: of its files.
      subject: what a file has, such as "a compiled kernel", for messages.
      remedy: what happens without the files: "each process compiles its own".
      most_bytes: the bound of the folder.
      log: where problems go.

    Attributes:
      most_bytes: as above.
      reported: the places of which a problem was logged.
    """

    def __init__(
        self, folder: str, suffix: str, *, subject: str, remedy: str, most_bytes: int, log: logging.Logger
    ) -> None:
        self._name, self._suffix, self._subject, self._remedy = folder, suffix, subject, remedy
        self.most_bytes, self._log = most_bytes, log
        self.reported: set[str] = set()

    def folder(self) -> Path | None:
        """The folder; None without a home folder, or if other users can write it, which is reported."""
        parent = environment.tuning_folder()
        if parent is None:
            return None
        folder = Path(parent, self._name)
        reason = private_folder.why_untrusted(folder)
        if reason:
            self._report(str(folder), f"{reason}; until then its files are neither read nor kept, and {self._remedy}")
        return None if reason else folder

    def read(self, name: str, decode: Callable[[bytes], Content]) -> Content | None:
        """The content of a file, or None if it is missing or damaged.

        Args:
          name: of the file, without its suffix.
          decode: from the file's bytes without the digest; raises ValueError for those of something else.
        """
        folder = self.folder()
        if folder is None:
            return None
        path = folder / f"{name}{self._suffix}"
        try:
            return decode(_checked(regular_file.read(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            self._report(
                str(path),
                f"must be {self._subject}, whole and of this name, and is not: {error}; the file is made anew and "
                "replaced",
            )
            return None

    def write(self, name: str, data: bytes) -> None:
        """Keeps a file, whose bytes without the digest are `data`."""
        folder = self.folder()
        if folder is None:
            return
        try:
            private_folder.make(folder)
            digest = hashlib.sha256(data).hexdigest().encode()
            regular_file.write(folder / f"{name}{self._suffix}", digest + b"\n" + data, mode=0o600)
            self._trim(folder)
        except OSError as error:
            self._report(
                str(folder),
                f"files must be writable here to be kept, and are not: {error}; until STONEWARE_CACHE_DIR names a "
                f"folder with room {self._remedy}",
            )

    def _trim(self, folder: Path) -> None:
        """Deletes the oldest files, including drafts of killed processes, until the bound holds."""
        files = []
        for path in folder.iterdir():
            if path.suffix == self._suffix or path.name.startswith(regular_file.DRAFT_PREFIX):
                with contextlib.suppress(FileNotFoundError):  # another process trims too
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.most_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self.most_bytes * _TRIMMED_FRACTION:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _report(self, place: str, message: str) -> None:
        """Logs a problem, once per place and process."""
        if place not in self.reported:
            self.reported.add(place)
            self._log.warning("%s: %s", place, message)


def _checked(data: bytes) -> bytes:
    """The bytes behind the digest; raises ValueError if they have another."""
    expected, _, rest = data.partition(b"\n")
    actual = hashlib.sha256(rest).hexdigest().encode()
    if expected != actual:
        raise ValueError(f"its sha256 is {actual.decode()}, and its first line has {expected[:64]!r}")
    return rest
