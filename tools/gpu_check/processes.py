"""Programs in processes of their own. Standard library only, like runner.py."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_OUTPUT = 1000
"""Characters of a failed program's output that are kept."""


class ProcessFailed(Exception):
    """A program did not end as it should; the message has the end of its output."""


def run_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: pathlib.Path | None = None,
    limit_s: float = 600.0,
    exit_code: int = 0,
) -> str:
    """Runs a Python module; returns its standard output.

    Args:
      arguments: of the program.
      environment, folder: None: those of this process.
      exit_code: with which it must end; negative for a signal.

    Raises:
      ProcessFailed: it ended with another exit code, or did not end in time.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, env=environment and dict(environment), cwd=folder, capture_output=True, text=True,
            errors="replace", check=False, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ProcessFailed(
            f"{module} must end within {limit_s:.0f} s and did not; give it more time, or less to do"
        ) from error
    if done.returncode != exit_code:
        raise ProcessFailed(
            f"{module} must end with exit code {exit_code} and ended with {done.returncode}: "
            f"{done.stderr.strip()[-_MAX_OUTPUT:]}"
        )
    return done.stdout


def json_lines(output: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines that a program printed."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def stream(
    command: Sequence[str], say: Callable[[str], None], *, folder: pathlib.Path, environment: Mapping[str, str]
) -> int:
    """Runs a command; `say` gets each line of its output, without its end, as it comes. Returns the exit code."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for line in process.stdout:
        say(line.rstrip("\n"))
    return process.wait()
