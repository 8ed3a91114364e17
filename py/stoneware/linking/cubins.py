"""Linked cubins on disk, so that a new process links nothing.

    <tuning folder>/linked/<sha256 of what is linked>.cubin

Behind the digest of `kept_files.py` a file has its name, and the cubin.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable

from stoneware.linking import toolchain
from stoneware.runtime.kept_files import KeptFiles

FORMAT = b"stoneware.linked.1"
"""Part of every digest."""

FILES = KeptFiles(
    "linked",
    ".cubin",
    subject="a linked cubin",
    remedy="each process links its own",
    most_bytes=256 << 20,
    log=logging.getLogger("stoneware.linking"),
)


def digest(*parts: bytes | str) -> str:
    """sha256 of everything that a cubin depends on, each part with its length, and of the libraries' versions."""
    return digest_of_parts((FORMAT, toolchain.installed(), *parts))


def digest_of_parts(parts: Iterable[bytes | str]) -> str:
    """sha256 of parts, each behind its length: no two lists of parts have the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def read(name: str) -> bytes | None:
    """The cubin of this digest; None if it is missing or damaged."""

    def decode(data: bytes) -> bytes:
        own_name, _, cubin = data.partition(b"\n")
        if own_name != name.encode():
            raise ValueError("it is of another name")
        return cubin

    return FILES.read(name, decode)


def write(name: str, cubin: bytes) -> None:
    """Keeps a cubin."""
    FILES.write(name, name.encode() + b"\n" + cubin)
