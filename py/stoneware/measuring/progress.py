"""How far a tuning session is: a bar with the time left on a terminal, lines in a log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from stoneware.tuning.samples import Sample

_LOG = logging.getLogger("stoneware.measuring")


class Reporter:
    """Says nothing; the base of what says something.

    Costs are in the units of workloads.cost: only their ratio counts.
    """

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        """Before the first problem; `num_known` of the problems have all their samples already."""

    def begin(self, problem: str) -> None:
        """A problem is about to be measured."""

    def stored(self, samples: Sequence[Sample]) -> None:
        """These samples are in the store, durably."""

    def end(self, problem: str, cost: float, outcome: str) -> None:
        """A problem is done."""

    def note(self, text: str) -> None:
        """Something to know, such as a candidate that hung."""

    def finish(self, outcome: str) -> None:
        """After the last problem, also of a session that was interrupted."""


class LogReporter(Reporter):
    """Lines in the log "stoneware.measuring"."""

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        self._idx, self._num = 0, num_problems - num_known
        self._cost, self._total_cost = 0.0, total_cost
        self._begin = time.monotonic()
        self._print(f"{self._num} problems to measure on {device}, {num_known} more are known")

    def end(self, problem: str, cost: float, outcome: str) -> None:
        self._idx += 1
        self._cost += cost
        gone_s = time.monotonic() - self._begin
        left_s = gone_s / self._cost * (self._total_cost - self._cost)
        self._print(
            f"[{self._idx}/{self._num}] {problem}: {outcome}; {gone_s:.0f} s gone, about "
            f"{left_s:.0f} s left"
        )

    def note(self, text: str) -> None:
        self._print(text, logging.WARNING)

    def finish(self, outcome: str) -> None:
        self._print(outcome)

    def _print(self, text: str, level: int = logging.INFO) -> None:
        _LOG.log(level, "%s", text)


class TerminalReporter(LogReporter):
    """The same lines on the terminal, above a bar with the time left."""

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn,
        )

        # Remaining time from the last five minutes: the cost is a rough measure of the time.
        self._progress = Progress(
            BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(),
            TextColumn("gone, left"), TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True, highlight=False), speed_estimate_period=300.0,
        )
        self._task: Any = self._progress.add_task("", total=total_cost)
        super().start(num_problems, num_known, total_cost, device)
        self._progress.start()

    def begin(self, problem: str) -> None:
        self._progress.update(self._task, description=_printable(problem))

    def end(self, problem: str, cost: float, outcome: str) -> None:
        self._progress.update(self._task, advance=cost)
        super().end(problem, cost, outcome)

    def finish(self, outcome: str) -> None:
        self._progress.update(self._task, description="")
        self._progress.stop()
        super().finish(outcome)

    def _print(self, text: str, level: int = logging.INFO) -> None:
        self._progress.console.print(_printable(text), markup=False)


def _printable(text: str) -> str:
    """The text with control characters, such as those of a config's name, written as escapes."""
    return "".join(
        letter if letter == "\n" or letter.isprintable() else repr(letter)[1:-1] for letter in text
    )


def default() -> Reporter:
    """A bar if stderr is a terminal, else lines in the log."""
    return TerminalReporter() if sys.stderr.isatty() else LogReporter()
