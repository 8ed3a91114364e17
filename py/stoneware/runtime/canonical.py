"""JSON with the same bytes on every machine; checks of names and numbers that are read from files."""

from __future__ import annotations

import json
from typing import Any

LONGEST_NAME = 500
"""Characters; the name of a decorated kernel has its module and every enclosing function."""


def canonical_json(value: Any) -> str:
    """JSON on one line: sorted keys, ASCII, no NaN, floats as Python writes them."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def canonical_document(value: Any) -> str:
    """JSON with the same rules on several lines, for files that people read."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def parse_json(text: str) -> Any:
    """Parses JSON from an untrusted file, in linear time.

    Raises:
      ValueError: it is not JSON, or an object repeats a key.
      RecursionError: it is nested more deeply than Python's parser supports.
    """
    return json.loads(text, object_pairs_hook=_without_duplicates)


def check_name(field: str, value: object) -> None:
    """Raises ValueError unless `value` is a name that can be printed and name a file."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= LONGEST_NAME:
        raise ValueError(f"{field}={value!r:.60} must be a str of 1 to {LONGEST_NAME} printable characters")


def check_count(field: str, value: object) -> None:
    """Raises ValueError unless `value` is an int, not a bool, from 0 to 2**63-1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{field}={value!r:.40} must be an int from 0 to 2**63-1")


def printable(text: str) -> str:
    """The text with escapes for the characters that are not printable: `\\x1b`, `\\ud800`, `\\n`.

    Names come from other people's files, and a terminal executes escape sequences.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def printable_lines(text: str) -> str:
    """`printable` of each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise ValueError(f"the key {name!r:.60} comes twice in an object")
        data[name] = value
    return data
