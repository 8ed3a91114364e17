"""Who is told how far a tuning session is."""

from __future__ import annotations

import logging
import time

_LOG = logging.getLogger("stoneware.measuring")


class Reporter:
    """Says nothing; the base of what says something.

    Costs are in the units of workloads.cost: only their ratio counts.
    """

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        """Before the first problem; `num_known` of the problems have all their samples already."""

    def begin(self, problem: str) -> None:
        """A problem is about to be measured."""

    def end(self, problem: str, cost: float, outcome: str) -> None:
        """A problem is done."""

    def note(self, text: str) -> None:
        """Something to know, such as a candidate that hung."""

    def finish(self, outcome: str) -> None:
        """After the last problem, also of a session that was interrupted."""


class LogReporter(Reporter):
    """Lines in the log "stoneware.measuring", with the time left."""

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        self._idx, self._num = 0, num_problems - num_known
        self._cost, self._total_cost = 0.0, total_cost
        self._begin = time.monotonic()
        self.say(f"{self._num} problems to measure on {device}, {num_known} more are known")

    def end(self, problem: str, cost: float, outcome: str) -> None:
        self._idx += 1
        self._cost += cost
        gone_s = time.monotonic() - self._begin
        left_s = gone_s / self._cost * (self._total_cost - self._cost)
        self.say(f"[{self._idx}/{self._num}] {problem}: {outcome}; {gone_s:.0f} s gone, about {left_s:.0f} s left")

    def note(self, text: str) -> None:
        self.say(text, logging.WARNING)

    def finish(self, outcome: str) -> None:
        self.say(outcome)

    def say(self, text: str, level: int = logging.INFO) -> None:
        _LOG.log(level, "%s", text)
