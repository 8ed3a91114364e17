"""Flags and arguments that several commands share, and the parsing of lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def flag(name: str) -> str:
    """The flag of a parameter: "-m" for m, "--bias" for has_bias."""
    return f"-{name}" if len(name) == 1 else f"--{name.removeprefix('has_').replace('_', '-')}"


def refuse(names: Sequence[str], reason: str) -> None:
    """Raises ValueError if `names` is not empty: these parameters do not apply, for a reason."""
    if names:
        raise ValueError(f"{' '.join(map(flag, names))} must be left out: {reason}")


def split(name: str, text: str) -> list[str]:
    """The parts of a comma-separated flag.

    Raises:
      ValueError: a part is empty.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"{flag(name)}={text!r} must be values separated by single commas; leave the flag out for its default"
        )
    return parts


def integers(name: str, text: str) -> list[int]:
    """The integers of a comma-separated flag.

    Raises:
      ValueError: a part is not an integer >= 1.
    """
    parts = split(name, text)
    for part in parts:
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise ValueError(
                f"{flag(name)}={text!r} must be integers >= 1 separated by commas, and {part!r} is not one; "
                "pass for example 1,16,64"
            )
    return [int(part) for part in parts]


def check_paths(paths: Sequence[str]) -> Sequence[str]:
    """The same paths.

    Raises:
      ValueError: a path does not exist, or is empty, which would mean the current folder.
    """
    for path in paths:
        if not path:
            raise ValueError("a source must be a path, and is empty; give its path, or . for the current folder")
        if not Path(path).exists():
            raise ValueError(f"{path}: no such file or folder; check the path")
    return paths
