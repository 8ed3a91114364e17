"""What the documents of the measuring programs have in common: their origin, and their text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from absl import flags

_MAX_DETAIL = 400
"""Characters of an error that are kept; torch lists all its backends."""


def define_flags() -> None:
    """Where a program writes, and what its document says of its origin; gpu_check.pyz passes them."""
    flags.DEFINE_string("out", None, "Folder to write to.", required=True)
    flags.DEFINE_string("commit", "unknown", "That the wheel was built from.")
    flags.DEFINE_string("wheel_sha256", "unknown", "Of the installed wheel.")
    flags.DEFINE_string("command", None, "What the user typed, if not this program.")


def origin(program: str, values: Any) -> dict[str, str]:
    """The command and what it measured; `values` has the flags' values as attributes."""
    command = values.command or " ".join([program, *sys.argv[1:]])
    return {"command": command, "commit": values.commit, "wheel_sha256": values.wheel_sha256}


def to_json(document: Mapping[str, Any]) -> str:
    """As JSON text; what is an object or a list has a line for each of its items."""
    entries = []
    for name, value in document.items():
        if isinstance(value, dict):
            text = _lines("{", (f"{json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()), "}")
        elif isinstance(value, list):
            text = _lines("[", map(json.dumps, value), "]")
        else:
            text = json.dumps(value)
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _lines(begin: str, items: Iterable[str], end: str) -> str:
    return begin + ",".join(f"\n  {item}" for item in items) + f"\n {end}"


def line(*cells: object) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def text_of(error: BaseException) -> str:
    """Type and message of an error, in one line of limited length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_DETAIL]
