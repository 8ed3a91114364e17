"""Tells how far a tuning session is, with the time left."""

from __future__ import annotations

import logging
import time

_LOG = logging.getLogger("stoneware.measuring")


class Reporter:
    """Writes lines to the log "stoneware.measuring"; a subclass shows them elsewhere.

    Costs are in the units of workloads.cost: only their ratio counts.

    Args:
      rank: named in each line if it is above 0.
    """

    def __init__(self, rank: int = 0) -> None:
        self._prefix = f"rank {rank}: " if rank else ""

    def start(self, num_problems: int, num_known: int, total_cost: float, device: str) -> None:
        """Before the first problem; `num_known` of the problems already have all their samples."""
        self._idx, self._num = 0, num_problems - num_known
        self._cost, self._total_cost = 0.0, total_cost
        self._begin = time.monotonic()
        self.say(f"{self._num} problems to measure on {device}, {num_known} more are known")

    def end(self, problem: str, cost: float, outcome: str) -> None:
        """After a problem."""
        self._idx += 1
        self._cost += cost
        gone_s = time.monotonic() - self._begin
        left_s = gone_s / self._cost * (self._total_cost - self._cost)
        self.say(f"[{self._idx}/{self._num}] {problem}: {outcome}; {gone_s:.0f} s gone, about {left_s:.0f} s left")

    def note(self, text: str) -> None:
        """A warning, for example about a candidate that hung."""
        self.say(text, logging.WARNING)

    def finish(self, outcome: str) -> None:
        """After the last problem, also of an interrupted session."""
        self.say(outcome)

    def say(self, text: str, level: int = logging.INFO) -> None:
        _LOG.log(level, "%s%s", self._prefix, text)
