"""The output of a command: one JSON document on stdout, or text for people; everything else on stderr.

Names in files come from other people, so control characters are escaped before they reach the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from stoneware.runtime.canonical import printable, printable_lines


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
            document = {"command": self.command, "exit_code": exit_code, **data}
            print(json.dumps(document, indent=1, allow_nan=False))
        return exit_code

    def text(self, *lines: str) -> None:
        """Prints lines for people; nothing if the output is JSON."""
        if not self.is_json:
            for line in lines:
                print(printable_lines(line))

    def note(self, line: str) -> None:
        """Prints a line on stderr, also if the output is JSON."""
        note(f"stoneware {self.command}: {line}")


def note(line: str) -> None:
    """Prints a line on stderr; errors are ignored, since nobody reads a closed or full stderr."""
    if sys.stderr is not None:  # None to print means stdout
        try:
            print(printable(line), file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Sends what is still buffered to /dev/null, after the pipe was closed or the disk was full."""
    # As Python's documentation of SIGPIPE advises: otherwise the flush at exit fails again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
