"""Compiled kernels of `sw.autotune` on disk, so that a new process launches without compiling.

    <tuning folder>/kernels/<sha256 of the compiler's inputs>.kernel

A file has three parts: a line with the sha256 of the rest, a line of JSON (the launch), the cubin.
Each file is checked when it is read. A file that is damaged, truncated or of another kernel is reported
once, and the kernel is compiled again. The digest detects damage, not tampering: a folder that other users
can write is not used at all. If the folder exceeds MAX_FOLDER_BYTES, its oldest files are deleted.
Neither pickle nor eval is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stoneware.kernels.launch_description import LaunchDescription
from stoneware.runtime import environment, private_folder, regular_file
from stoneware.runtime.canonical import canonical_json

FORMAT = 2
"""Part of every digest, so files of another format are never read, and are deleted in time."""

MAX_FOLDER_BYTES = 256 << 20
_TRIMMED_FRACTION = 0.9
"""The part of the bound to which the folder is trimmed, so that not every write deletes a file."""

_SUFFIX = ".kernel"

_LOG = logging.getLogger("stoneware.triton_autotune")
_reported: set[str] = set()


def digest(inputs: Mapping[str, Any]) -> str:
    """The name of a kernel's file: sha256 of everything that the compiler depends on."""
    return hashlib.sha256(canonical_json([FORMAT, inputs]).encode()).hexdigest()


def folder() -> Path | None:
    """The folder of compiled kernels; None without a home folder, or if other users can write the folder,
    which is reported once."""
    parent = environment.tuning_folder()
    if parent is None:
        return None
    kernels = Path(parent, "kernels")
    reason = private_folder.why_untrusted(kernels)
    if reason:
        _report(
            str(kernels),
            f"{reason}; until then compiled kernels are neither read nor kept, and each process compiles its own",
        )
    return None if reason else kernels


def read(name: str) -> tuple[LaunchDescription, bytes] | None:
    """The kernel with this `name` (see `digest`); None if it is missing or damaged."""
    parent = folder()
    if parent is None:
        return None
    path = parent / f"{name}{_SUFFIX}"
    try:
        return _decode(name, regular_file.read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _report(
            str(path),
            f"must be a compiled kernel, whole and of this name, and is not: {error}; the kernel "
            "is compiled anew and the file replaced",
        )
        return None


def _decode(name: str, data: bytes) -> tuple[LaunchDescription, bytes]:
    expected, _, rest = data.partition(b"\n")
    actual = hashlib.sha256(rest).hexdigest().encode()
    if expected != actual:
        raise ValueError(f"its sha256 is {actual.decode()}, and its first line has {expected[:64]!r}")
    line, _, cubin = rest.partition(b"\n")
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("name") != name:
        raise ValueError("it is of another kernel")
    if not cubin:
        raise ValueError("it has no cubin")
    launch = LaunchDescription.from_json(header.get("launch"))
    launch.num_scratch(len(launch.arguments))  # raises unless they fit the parameters
    return launch, cubin


def write(name: str, launch: LaunchDescription, cubin: bytes, inputs: Mapping[str, Any]) -> None:
    """Stores a kernel. A folder that cannot be written is reported once, and nothing else happens.

    Args:
      name: from `digest(inputs)`.
      launch: how to launch it.
      cubin: its bytes.
      inputs: of the compiler, stored for people who read the file.
    """
    parent = folder()
    if parent is None:
        return
    header = {"name": name, "launch": asdict(launch), "compiled_from": inputs}
    rest = canonical_json(header).encode() + b"\n" + cubin
    data = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    try:
        private_folder.make(parent)
        regular_file.write(parent / f"{name}{_SUFFIX}", data, mode=0o600)
        _trim(parent)
    except OSError as error:
        _report(
            str(parent),
            f"compiled kernels must be writable here to be kept, and are not: {error}; each "
            "process compiles its own until STONEWARE_CACHE_DIR names a folder with room",
        )


def _trim(parent: Path) -> None:
    """Deletes the oldest files, including drafts of killed processes, until the bound holds."""
    files = []
    for path in parent.iterdir():
        if path.suffix == _SUFFIX or path.name.startswith(regular_file.DRAFT_PREFIX):
            with contextlib.suppress(FileNotFoundError):  # another process trims too
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= MAX_FOLDER_BYTES:
        return
    for _, size, path in sorted(files):
        if total <= MAX_FOLDER_BYTES * _TRIMMED_FRACTION:
            break
        path.unlink(missing_ok=True)
        total -= size


def _report(place: str, message: str) -> None:
    """Logs a problem, once per place and process."""
    if place not in _reported:
        _reported.add(place)
        _LOG.warning("%s: %s", place, message)
