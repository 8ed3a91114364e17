"""What a command prints: one JSON document on stdout, or text for people; all else on stderr.

Names in files are what others wrote: no escape sequence of theirs reaches the terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from stoneware.runtime.canonical import printable

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST_COLUMNS = 160
"""Where nobody looks, in a file or a pipe, tables get at least this width and are not cut."""


class Output:
    """The output of one command.

    Attributes:
      command: its name.
      is_json: whether stdout gets one JSON document and nothing else.
    """

    def __init__(self, command: str, is_json: bool) -> None:
        self.command = command
        self.is_json = is_json

    def document(self, data: Mapping[str, Any], exit_code: int) -> int:
        """Prints `data` with "command" and "exit_code" if the output is JSON; returns exit_code."""
        if self.is_json:
            document = {"command": self.command, "exit_code": exit_code, **finite(data)}
            print(json.dumps(document, indent=1, allow_nan=False))
        return exit_code

    def text(self, *lines: str) -> None:
        """Prints lines for people; nothing if the output is JSON."""
        if not self.is_json:
            for line in lines:
                print("\n".join(map(printable, line.split("\n"))))

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
    ) -> None:
        """Prints a table for people; nothing if the output is JSON.

        Args:
          title: above the table.
          columns: headings.
          rows: as many cells as there are columns.
          right: the columns whose cells are flush right, that is the numbers.
        """
        if self.is_json:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(
                column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in right
            )
        for row in rows:
            # Text: brackets are no markup.
            table.add_row(*(Text(printable(cell)) for cell in row))
        console().print(table)

    def note(self, line: str) -> None:
        """Prints a line on stderr, in any case."""
        note(f"stoneware {self.command}: {line}")


def note(line: str) -> None:
    """Prints a line on stderr; a stderr that is closed or full is no error, as nobody reads it."""
    if sys.stderr is not None:  # None to print means stdout
        try:
            print(printable(line), file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Lets what is still buffered for a reader that has gone, or a full disk, go nowhere."""
    # As Python's documentation of SIGPIPE advises: else the flush at exit fails once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def console(*, stderr: bool = False) -> Console:
    """Rich's console on stdout or stderr: without colours for NO_COLOR and off a terminal."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal and found.width < NARROWEST_COLUMNS:
        found.width = NARROWEST_COLUMNS
    return found


def finite(value: Any) -> Any:
    """The value as JSON has it: null for what is not finite, lists for tuples, str keys."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
