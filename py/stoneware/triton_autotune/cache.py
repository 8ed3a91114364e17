"""Compiled kernels of `sw.autotune` on disk, so that a new process launches without compiling.

    <tuning folder>/kernels/<sha256 of the compiler's inputs>.kernel

Behind the digest of `kept_files.py` a file has a line of JSON (the launch), and the cubin. Neither pickle
nor eval is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stoneware.kernels.launch_description import LaunchDescription
from stoneware.runtime.canonical import canonical_json
from stoneware.runtime.kept_files import KeptFiles

FORMAT = 2
"""Part of every digest, so files of another format are never read, and are deleted in time."""

FILES = KeptFiles(
    "kernels",
    ".kernel",
    subject="a compiled kernel",
    remedy="each process compiles its own",
    most_bytes=256 << 20,
    log=logging.getLogger("stoneware.triton_autotune"),
)


def digest(inputs: Mapping[str, Any]) -> str:
    """The name of a kernel's file: sha256 of everything that the compiler depends on."""
    return hashlib.sha256(canonical_json([FORMAT, inputs]).encode()).hexdigest()


def read(name: str) -> tuple[LaunchDescription, bytes] | None:
    """The kernel with this `name` (see `digest`); None if it is missing or damaged."""

    def decode(data: bytes) -> tuple[LaunchDescription, bytes]:
        line, _, cubin = data.partition(b"\n")
        header = json.loads(line)
        if not isinstance(header, dict) or header.get("name") != name:
            raise ValueError("it is of another kernel")
        if not cubin:
            raise ValueError("it has no cubin")
        launch = LaunchDescription.from_json(header.get("launch"))
        launch.num_scratch(len(launch.arguments))  # raises unless they fit the parameters
        return launch, cubin

    return FILES.read(name, decode)


def write(name: str, launch: LaunchDescription, cubin: bytes, inputs: Mapping[str, Any]) -> None:
    """Stores a kernel.

    Args:
      name: from `digest(inputs)`.
      launch: how to launch it.
      cubin: its bytes.
      inputs: of the compiler, stored for people who read the file.
    """
    header = {"name": name, "launch": asdict(launch), "compiled_from": inputs}
    FILES.write(name, canonical_json(header).encode() + b"\n" + cubin)
