"""Reading a file where somebody may have put something else in its place.

A pipe (FIFO) that nobody writes to would stop a process for ever, at its opening.
"""

from __future__ import annotations

import errno
import os
import stat

def read(path: str | os.PathLike[str], most_bytes: int | None = None) -> bytes:
    """The content of a regular file, or of the one that a link leads to.

    Args:
      path: where it is.
      most_bytes: what a larger file is refused for, unread; None for no limit.

    Raises:
      OSError: it cannot be read, is no regular file, or is too large.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        _check(status, path)
        if most_bytes is not None and status.st_size > most_bytes:
            raise OSError(
                errno.EFBIG, f"it must have at most {most_bytes} bytes, and has {status.st_size}",
                os.fspath(path),
            )
        file = os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise
    with file:
        return file.read()


def size_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file; 0 if there is none.

    Raises:
      OSError: there is something else, or the way to it leads through what is no folder.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return 0
    _check(status, path)
    return status.st_size


def _check(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = "pipe (FIFO)" if stat.S_ISFIFO(mode) else "socket or device"
        raise OSError(errno.EINVAL, f"it must be a regular file, and is a {kind}", os.fspath(path))
