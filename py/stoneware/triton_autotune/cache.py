"""Compiled kernels of `sw.autotune` on disk, so that a new process launches without compiling.

    <tuning folder>/kernels/<sha256 of what it was compiled from>.kernel

A file has three parts: a line with the sha256 of the rest, a line of JSON (the launch), the cubin.
It is written under another name and renamed, so a reader sees all of it or nothing. Each file is
checked when it is read; one that is damaged, cut short or of another kernel is reported once and
compiled anew. The digest protects against damage, not against people: a folder that other users can
write is not used at all. The size of the folder is bounded: past MAX_FOLDER_BYTES the oldest files
are deleted. There is no pickle and no eval.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stoneware.runtime import environment, private_folder, regular_file
from stoneware.runtime.canonical import canonical_json
from stoneware.triton_autotune.specialization import INT32_MAX

FORMAT = 1
"""Part of every digest: files of another format are not found, and are deleted in time."""

MAX_FOLDER_BYTES = 256 << 20
_KEPT_FRACTION = 0.9
"""How full the folder is left, so that not every write deletes a file."""

_SUFFIX = ".kernel"
_PARTIAL_SUFFIX = ".partial"

_LOG = logging.getLogger("stoneware.triton_autotune")
_reported: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class LaunchDescription:
    """How a cubin is launched.

    Attributes:
      symbol: the kernel's name in the cubin.
      arguments: parameters of the Python function that are passed, in order; the others are
        compiled in.
      parameters: a letter for each parameter of the cubin (P pointer, i int32, q int64, f float32):
        those of `arguments`, then pointers to scratch memory, which are null.
      block_threads: threads of a block.
      shared_bytes: dynamic shared memory of a block.

    Raises:
      ValueError: a field breaks its rule.
    """

    symbol: str
    arguments: tuple[str, ...]
    parameters: str
    block_threads: int
    shared_bytes: int

    def __post_init__(self) -> None:
        names, is_text = self.arguments, isinstance(self.parameters, str)
        for name, is_right, rule in (
            ("symbol", isinstance(self.symbol, str) and self.symbol, "a non-empty str"),
            (
                "arguments",
                type(names) is tuple and all(isinstance(item, str) for item in names),
                "names of parameters",
            ),
            (
                "parameters",
                is_text and re.fullmatch(f"[Piqf]{{{len(names)}}}P*", self.parameters),
                f"{len(names)} letters of Piqf, one for each of the arguments, and then only P",
            ),
            ("block_threads", self.block_threads in range(1, 1025), "an int from 1 to 1024"),
            (
                "shared_bytes", self.shared_bytes in range(INT32_MAX + 1),
                f"an int from 0 to {INT32_MAX}",
            ),
        ):
            value = getattr(self, name)
            if not is_right or isinstance(value, (bool, float)):
                raise ValueError(f"{name}={value!r} must be {rule}")

    @property
    def num_scratch(self) -> int:
        """How many pointers to scratch memory follow the arguments."""
        return len(self.parameters) - len(self.arguments)

    @classmethod
    def from_json(cls, data: Any) -> LaunchDescription:
        known = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != known or type(data["arguments"]) is not list:
            raise ValueError(
                f"a launch has the fields {sorted(known)}, arguments a list; found {data!r:.200}"
            )
        return cls(**{**data, "arguments": tuple(data["arguments"])})


def digest(compiled_from: Mapping[str, Any]) -> str:
    """The name under which a kernel is filed: sha256 of everything that it was compiled from."""
    return hashlib.sha256(canonical_json([FORMAT, compiled_from]).encode()).hexdigest()


def folder() -> Path | None:
    """Where compiled kernels are kept; None where there is no home, or where other users can write,
    which is reported once."""
    parent = environment.tuning_folder()
    if parent is None:
        return None
    found = Path(parent, "kernels")
    reason = private_folder.why_untrusted(found)
    if reason:
        _report(
            str(found),
            f"{reason}; until then compiled kernels are neither read nor kept, and each process "
            "compiles its own",
        )
    return None if reason else found


def read(name: str) -> tuple[LaunchDescription, bytes] | None:
    """The kernel that is filed under `name` (see `digest`); None if there is none that is whole."""
    parent = folder()
    if parent is None:
        return None
    path = parent / f"{name}{_SUFFIX}"
    try:
        data = regular_file.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _report(str(path), f"cannot be read: {error}; the kernel is compiled anew")
        return None
    try:
        return _decode(name, data)
    except (ValueError, RecursionError) as error:
        _report(
            str(path),
            f"must be a compiled kernel, whole and of this name, and is not: {error}; the kernel "
            "is compiled anew and the file replaced",
        )
        return None


def _decode(name: str, data: bytes) -> tuple[LaunchDescription, bytes]:
    expected, _, rest = data.partition(b"\n")
    found = hashlib.sha256(rest).hexdigest().encode()
    if expected != found:
        raise ValueError(f"its sha256 is {found.decode()}, and it says {expected[:64]!r}")
    line, _, cubin = rest.partition(b"\n")
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("name") != name:
        raise ValueError("it is of another kernel")
    if not cubin:
        raise ValueError("it has no cubin")
    return LaunchDescription.from_json(header.get("launch")), cubin


def write(
    name: str, launch: LaunchDescription, cubin: bytes, compiled_from: Mapping[str, Any]
) -> None:
    """Files a kernel. A folder that cannot be written is reported once, and nothing else happens.

    Args:
      name: from `digest(compiled_from)`.
      launch: how to launch it.
      cubin: its bytes.
      compiled_from: kept in the file for people who look into it.
    """
    parent = folder()
    if parent is None:
        return
    header = {"name": name, "launch": asdict(launch), "compiled_from": compiled_from}
    rest = canonical_json(header).encode() + b"\n" + cubin
    data = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
    try:
        private_folder.make(parent)
        _publish(parent / f"{name}{_SUFFIX}", data)
        _trim(parent)
    except OSError as error:
        _report(
            str(parent),
            f"compiled kernels must be writable here to be kept, and are not: {error}; each "
            "process compiles its own until STONEWARE_CACHE_DIR names a folder with room",
        )


def _publish(path: Path, data: bytes) -> None:
    handle, partial = tempfile.mkstemp(suffix=_PARTIAL_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _trim(parent: Path) -> None:
    """Deletes the oldest files, partial ones of killed processes among them, past the bound."""
    files = []
    for path in parent.iterdir():
        if path.suffix in (_SUFFIX, _PARTIAL_SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # another process trims too
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= MAX_FOLDER_BYTES:
        return
    for _, size, path in sorted(files):
        if total <= MAX_FOLDER_BYTES * _KEPT_FRACTION:
            break
        path.unlink(missing_ok=True)
        total -= size


def _report(place: str, message: str) -> None:
    """Logs a problem, once per place and process."""
    if place not in _reported:
        _reported.add(place)
        _LOG.warning("%s: %s", place, message)
