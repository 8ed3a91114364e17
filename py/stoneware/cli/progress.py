"""What `stoneware tune` shows on stderr while it runs."""

from __future__ import annotations

import logging
import sys
from typing import Any

from stoneware.cli.output import note
from stoneware.measuring.progress import Reporter
from stoneware.runtime.canonical import printable


def reporter(rank: int) -> Reporter:
    """A bar on a terminal, otherwise lines; ranks above 0 report only what went wrong."""
    if rank:
        return _Notes(rank)
    return _Bar() if sys.stderr.isatty() else Reporter()


class _Notes(Reporter):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def note(self, text: str) -> None:
        note(f"stoneware tune: rank {self._rank}: {text}")

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Rank 0 shows the progress."""


class _Bar(Reporter):
    """The lines of the log on the terminal, above a bar with the time left."""

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        # The time left is estimated from the last five minutes, since costs follow times only roughly.
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("gone, left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True, highlight=False),
            speed_estimate_period=300.0,
        )
        self._task: Any = self._progress.add_task("", total=total_cost)
        super().start(num_problems, num_known, total_cost, device)
        self._progress.start()

    def begin(self, problem: str) -> None:
        self._progress.update(self._task, description=printable(problem))

    def end(self, problem: str, cost: float, outcome: str) -> None:
        self._progress.update(self._task, advance=cost)
        super().end(problem, cost, outcome)

    def finish(self, outcome: str) -> None:
        self._progress.update(self._task, description="")
        self._progress.stop()
        super().finish(outcome)

    def say(self, text: str, level: int = logging.INFO) -> None:
        lines = "\n".join(map(printable, text.split("\n")))
        self._progress.console.print(lines, markup=False)
