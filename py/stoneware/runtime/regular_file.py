"""Reads and writes files safely if the path may be something other than a regular file.

Opening a pipe (FIFO) without a writer would block the process forever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

MAX_BYTES = 1 << 30
"""The longest file that is read, some hundred times the longest that is written."""

DRAFT_PREFIX = ".stoneware-"
"""Prefix of the temporary names of files before they are renamed; a kill leaves such a file behind."""


def read(path: str | os.PathLike[str], most_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file; links are followed.

    Args:
      path: where it is.
      most_bytes: a longer file is refused, unread.

    Raises:
      OSError: it cannot be read, is not a regular file, is too long, or has more bytes than its size says.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        _check(status, path)
        if status.st_size > most_bytes:
            raise OSError(
                errno.EFBIG, f"it has {status.st_size} bytes, and at most {most_bytes} are read", os.fspath(path)
            )
        content = file.read(status.st_size + 1)
        if len(content) > status.st_size:
            reason = f"it is longer than its size, {status.st_size} bytes: it grows, or belongs to the system; copy it"
            raise OSError(errno.EINVAL, reason, os.fspath(path))
        return content


def size_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file; 0 if it does not exist.

    Raises:
      OSError: it is not a regular file, or a parent of it is not a folder.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    _check(status, path)
    return status.st_size


Stamp = tuple[int, ...]
"""Device, inode, size and time of a file."""


def file_stamp(path: str | os.PathLike[str]) -> Stamp:
    """A value that changes whenever a file's content may have; () if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:  # absent, or not readable: reading raises
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def write(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Replaces a file atomically: a reader, also after a kill, finds the old file or the new one.

    The new file is written next to the old one under a random name, then renamed: a link at `path` is
    replaced, and its target is unchanged. Anything else at `path`, and an open file of a process, such as
    /dev/stdout, are written to in place.

    Args:
      path: where it is.
      data: all of it.
      mode: of the new file, less the umask.

    Raises:
      OSError: it cannot be written; an existing file is unchanged.
    """
    path = os.fspath(path)
    if os.path.exists(path) and (not os.path.isfile(path) or _is_descriptor(path)):
        with open(path, "wb") as file:  # raises the right error for a folder
            file.write(data)
        return
    draft = os.path.join(os.path.dirname(path), DRAFT_PREFIX + os.urandom(8).hex())
    try:
        # x: never overwrites, nor follows a link
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError):
            error.filename, error.filename2 = path, None  # the caller's name, not the draft's
        raise


def _is_descriptor(path: str) -> bool:
    """Whether links lead from `path` to an open file of a process, like those of `/dev/stdout`."""
    while os.path.islink(path):
        folder = os.path.realpath(os.path.dirname(path))
        if folder.startswith("/proc/"):
            return True
        path = os.path.join(folder, os.readlink(path))
    return False


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = "pipe (FIFO)" if stat.S_ISFIFO(mode) else "socket or device"
        raise OSError(errno.EINVAL, f"it must be a regular file, and is a {kind}", os.fspath(path))
