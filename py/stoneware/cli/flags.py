"""Flags and arguments that several commands share, and flags that are lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def listed(name: str, text: str | None) -> list[str] | None:
    """The parts of a comma-separated flag; None if it was left out.

    Raises:
      ValueError: a part is empty.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"--{name}={text!r} must be values separated by single commas; leave the flag out for its default"
        )
    return parts


def not_empty(paths: Sequence[str]) -> Sequence[str]:
    """The same paths of sources.

    Raises:
      ValueError: one is empty, which would mean the current folder.
    """
    if not all(paths):
        raise ValueError("a source must be a path, and is empty; give the path of one")
    return paths


def integers(name: str, text: str | None) -> list[int] | None:
    """The integers of a comma-separated flag; None if it was left out.

    Raises:
      ValueError: a part is no integer >= 1.
    """
    parts = listed(name, text)
    if parts is None:
        return None
    for part in parts:
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise ValueError(
                f"--{name}={text!r} must be integers >= 1 separated by commas, and {part!r} is "
                "none; pass such as 1,16,64"
            )
    return [int(part) for part in parts]
