"""A kernel with an epilogue linked in: from this process, from the wheel, from the disk, or linked now or in the
background.

A link takes some tenths of a second and needs no GPU. One thread links in the background, in the order in
which calls asked. What it has linked is found by the next call; what it could not link is logged once, and
those calls stay unfused.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from typing import Any

from stoneware.epilogue import link, shipped
from stoneware.errors import StonewareError, UnsupportedError
from stoneware.kernels import manifest, sm90_kernels
from stoneware.linking import cubins
from stoneware.runtime import native, package_files

_LOG = logging.getLogger("stoneware.epilogue")

Key = tuple[str, str]
"""Id of the kernel, text of the epilogue."""

_kernels: dict[Key, Any] = {}
"""Native LinkedKernels; each stays loaded."""

_failed: dict[Key, StonewareError] = {}

_logged: set[str] = set()
"""Reasons why nothing can be linked."""

_waiting: deque[Key] = deque()
_in_progress: set[Key] = set()
_changed = threading.Condition()
_thread: list[threading.Thread] = []


def now(kernel: str, text: str) -> Any:
    """The native LinkedKernel of a kernel and an epilogue, which is linked now if it must be.

    Args:
      kernel: id of an open kernel.
      text: of `source.Source`.

    Raises:
      LinkError: NVRTC or nvJitLink refuses.
      TableError: the kernel's LTO-IR is missing or damaged.
      UnsupportedError: nothing can be linked here.
    """
    key = (kernel, text)
    if key in _failed:
        raise _failed[key]
    if key not in _kernels:
        _kernels.setdefault(key, native.load(sm90_kernels.MODULE).LinkedKernel(kernel, cubin(kernel, text)))
    return _kernels[key]


def soon(kernel: str, text: str) -> Any | None:
    """Like `now`, but None if it is not linked yet: it will be, in the background, or cannot be."""
    key = (kernel, text)
    if key in _kernels:
        return _kernels[key]
    if key in _failed:
        return None
    try:
        data = kept(kernel, text)
    except UnsupportedError as error:  # neither library is here: its version is part of the name on the disk
        _fail(key, error)
        return None
    if data is not None:
        return _kernels.setdefault(key, native.load(sm90_kernels.MODULE).LinkedKernel(kernel, data))
    with _changed:
        if key not in _in_progress:
            _in_progress.add(key)
            _waiting.append(key)
            if not _thread:
                _thread.append(threading.Thread(target=_link_in_background, name="stoneware-link", daemon=True))
                _thread[0].start()
            _changed.notify_all()
    return None


def _forget_thread() -> None:
    """In a forked child, which has neither the thread nor its links."""
    global _changed
    _changed = threading.Condition()
    _thread.clear()
    _waiting.clear()
    _in_progress.clear()


os.register_at_fork(after_in_child=_forget_thread)


def has_failed(kernel: str, text: str) -> bool:
    """Whether it cannot be linked."""
    return (kernel, text) in _failed


def wait(timeout_s: float | None = None) -> bool:
    """Waits until nothing is left to link in the background; whether that is so."""
    with _changed:
        return _changed.wait_for(lambda: not _in_progress, timeout_s)


def kept(kernel: str, text: str) -> bytes | None:
    """The linked cubin, if the wheel or the disk has it.

    Raises:
      UnsupportedError: the wheel lacks it, and neither NVRTC nor nvJitLink is here.
    """
    name = link.digest(kernel, _kernels_sha256(kernel), text)
    return shipped.read(manifest.packaged().kernels[kernel].op, name) or cubins.read(_name_on_disk(kernel, text))


def cubin(kernel: str, text: str) -> bytes:
    """The linked cubin, from the wheel, from the disk, or linked now; see `now`."""
    data = kept(kernel, text)
    if data is None:
        data = link.link(kernel, _open_kernel(kernel), text)
        cubins.write(_name_on_disk(kernel, text), data)
    return data


def _fail(key: Key, error: StonewareError) -> None:
    """Notes that a key cannot be linked. What concerns all of them, such as an old library, is logged once."""
    _failed[key] = error
    if not isinstance(error, UnsupportedError):
        _LOG.warning("an epilogue stays unfused, since it cannot be linked into %s: %s", key[0], error)
    elif str(error) not in _logged:
        _logged.add(str(error))
        _LOG.warning("epilogues stay unfused: they run as torch's operators after the kernel: %s", error)


def _link_in_background() -> None:
    while True:
        with _changed:
            _changed.wait_for(lambda: bool(_waiting))
            key = _waiting.popleft()
        try:
            now(*key)
        except StonewareError as error:
            _fail(key, error)
        except Exception as error:  # whatever it is, the thread serves the others
            _failed[key] = UnsupportedError(f"linking {key[0]} failed: {type(error).__name__}: {error}")
            _LOG.exception("an epilogue stays unfused, since linking it into %s failed", key[0])
        finally:
            with _changed:
                _in_progress.discard(key)
                _changed.notify_all()


def _name_on_disk(kernel: str, text: str) -> str:
    return cubins.digest(link.digest(kernel, _kernels_sha256(kernel), text))


def _kernels_sha256(kernel: str) -> str:
    return manifest.packaged().open[kernel].sha256


@functools.lru_cache(maxsize=8)
def _open_file(name: str, sha256: str) -> bytes:
    return package_files.read_listed(package_files.path("open_kernels", name), sha256)


def _open_kernel(kernel: str) -> bytes:
    opened = manifest.packaged().open[kernel]
    return _open_file(opened.name, opened.sha256)
