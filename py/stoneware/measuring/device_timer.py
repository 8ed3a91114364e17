"""Times calls on the GPU against each other: operands from memory, device time only, interleaved.

Each round times every call once, in a new random order, so that a change of clock or temperature
meets all of them alike. stopwatch.py says how one call is timed.

Slow calls are dropped after a few rounds, and keep the timings they have.

Short calls: if the fastest takes less than SHORT_US between events, all that are left are timed in
CUDA graphs instead, since the microseconds of the events would hide differences. If one of them
cannot be captured, none is: two methods are never compared with each other. The cost of the
events, measured on calls that were timed both ways, is subtracted from the timings of dropped calls; they stay
DROP_RATIO times slower than the fastest.

Drooped rounds: rounds in which the clock of the SMs is below DROOP_RATIO of its median over all
rounds are discarded and repeated. The median, not the default clock as in NVBench, since large
products keep a GPU at its power limit and below that clock. At most half of the rounds can be below
the median; no more are taken than twice those asked for, and none after `max_seconds`. If the clock
is unknown, nothing is discarded.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

SHORT_US = 100.0
"""Below this a call is short: event, launch and event cost more than 3 % of it."""

DROP_RATIO = 1.5
"""Calls slower than this multiple of the fastest are dropped."""

DROOP_RATIO = 0.97
"""An H200 changes its clock in steps of 15 MHz, and two of them are 1.5 % of 1980 MHz."""

MEASURING = threading.RLock()
"""Held by the thread that measures in this process. Two measurements at once would time each other, and
CUDA graphs cannot be captured at once, not even on two GPUs. Only measurements wait for it, so a capture
of the caller's never does. It is reentrant: what is measured may measure a kernel of its own. Nothing
waits for other work of this process, or for other processes on the GPU, which nobody here can see."""

_PAIRS_IN_GRAPH = 8
"""Flushes and calls in one graph, which divides the noise of a flush by sqrt(8)."""

Name = TypeVar("Name", bound=Hashable)

_FLUSH = object()
"""Stands for the flushes alone among the graphs of a round."""


def spread(samples: Sequence[float]) -> float:
    """The interquartile range; 0 of one sample."""
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


@dataclasses.dataclass(frozen=True)
class Timing:
    """Timings of one call, in microseconds; without arguments, of one that was not timed.

    Attributes:
      spread_us: interquartile range.
      count: number of timings.
      sm_clock_mhz_before, sm_clock_mhz_after: clock of the SMs at the end of the first and the last
        round that counts; 0 if unknown.
    """

    median_us: float = 0.0
    spread_us: float = 0.0
    count: int = 0
    sm_clock_mhz_before: int = 0
    sm_clock_mhz_after: int = 0

    @classmethod
    def of(cls, samples_us: list[float], before_mhz: int = 0, after_mhz: int = 0) -> Timing:
        return cls(statistics.median(samples_us), spread(samples_us), len(samples_us), before_mhz, after_mhz)

    @property
    def figures(self) -> dict[str, Any]:
        """The attributes, in steps of a nanosecond; what was timed took at least one."""
        least_us = 0.001 if self.count else 0.0
        return {
            **vars(self),
            "median_us": max(round(self.median_us, 3), least_us),
            "spread_us": round(self.spread_us, 3),
        }


class TimingFailed(Exception):
    """A call raised while it was timed: `name` is its name, `__cause__` its error."""

    def __init__(self, name: Hashable, error: Exception) -> None:
        super().__init__(f"{name} failed while it was timed: {type(error).__name__}: {error}")
        self.name = name


@dataclasses.dataclass
class _Round:
    clock_mhz: int
    us: dict[Any, float]


class DeviceTimer:
    """Times calls on one GPU.

    Args:
      ordinal: torch's number of the GPU.
      stopwatch: with the methods of `stopwatch.CudaStopwatch`; None makes one for the GPU.
      now: seconds, for tests.
    """

    def __init__(self, ordinal: int, stopwatch: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        if stopwatch is None:
            from stoneware.measuring.stopwatch import CudaStopwatch

            stopwatch = CudaStopwatch(ordinal)
        self.stopwatch = stopwatch
        self._now = now
        self._order = random.Random(0)

    def time(
        self,
        calls: Mapping[Name, Callable[[], object]],
        *,
        rounds: int,
        max_seconds: float,
        rounds_before_drop: int = 0,
        short_us: float = SHORT_US,
    ) -> dict[Name, Timing]:
        """Times every call once a round.

        Args:
          calls: what to time, by any name. They must have run once without error.
          rounds: number of rounds that count.
          max_seconds: stop after the round in which this has passed.
          rounds_before_drop: drop slow calls after this many rounds; 0 drops none.
          short_us: see SHORT_US; 0 uses no graphs.

        Returns:
          Timings by name, of at least one round.

        Raises:
          TimingFailed: a call raised.
        """
        if not calls:
            return {}
        deadline = self._now() + max_seconds
        for name, call in calls.items():
            self._guarded(name, self.stopwatch.warm_up, name, call)
        first_rounds = min(rounds, rounds_before_drop or _PAIRS_IN_GRAPH)
        time_call = self.stopwatch.time_call
        by_event = self._rounds(time_call, calls, list(calls), first_rounds, deadline)
        timed = _timings(by_event)
        if len(by_event) < first_rounds:
            return timed  # the time is over
        fastest_us = min(timing.median_us for timing in timed.values())
        left = [name for name in calls if not rounds_before_drop or timed[name].median_us <= DROP_RATIO * fastest_us]
        graphs = self._captured(calls, left) if fastest_us < short_us else None
        if graphs is not None:
            in_graphs = _timings(self._rounds(self.stopwatch.time_graph, graphs, list(graphs), rounds, deadline))
            if all(timing.median_us > 0 for timing in in_graphs.values()):
                return {**_without_events(timed, in_graphs), **in_graphs}
        rest = self._rounds(time_call, calls, left, rounds - first_rounds, deadline)
        return _timings(by_event + rest)

    def _rounds(
        self, step: Callable[[Any, Any], float], items: Mapping[Any, Any], names: list[Any], count: int, deadline: float
    ) -> list[_Round]:
        """At least one round, until `count` have not drooped, but no more than twice as many."""
        taken: list[_Round] = []
        while len(taken) < 2 * count and len(_steady(taken)) < count:
            self._order.shuffle(names)
            us = {name: self._guarded(name, step, name, items[name]) for name in names}
            if _FLUSH in us:
                flushes_us = us.pop(_FLUSH)
                us = {name: (pairs - flushes_us) / _PAIRS_IN_GRAPH for name, pairs in us.items()}
            taken.append(_Round(self.stopwatch.sm_clock_mhz(), us))
            if self._now() > deadline:
                break
        return taken

    def _captured(self, calls: Mapping[Any, Callable[[], object]], names: Sequence[Any]) -> dict[Any, Any] | None:
        """Graphs of the calls and of the flushes alone; None if one cannot be captured."""
        graphs: dict[Any, Any] = {}
        for name in [_FLUSH, *names]:
            graph = self._guarded(name, self.stopwatch.capture, calls.get(name), _PAIRS_IN_GRAPH)
            if graph is None:
                return None
            graphs[name] = graph
            self._guarded(name, self.stopwatch.time_graph, name, graph)  # uploads it
        return graphs

    def _guarded(self, name: Hashable, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Exception as error:
            raise TimingFailed(name, error) from error


def _steady(rounds: list[_Round]) -> list[_Round]:
    """The rounds that did not droop."""
    clocks = [taken.clock_mhz for taken in rounds if taken.clock_mhz]
    if not clocks:
        return rounds
    least = DROOP_RATIO * statistics.median(clocks)
    return [taken for taken in rounds if not taken.clock_mhz or taken.clock_mhz >= least]


def _without_events(between_events: Mapping[Any, Timing], in_graphs: Mapping[Any, Timing]) -> dict[Any, Timing]:
    """The timings between events, without what the calls that were timed both ways take more there (median)."""
    events_us = statistics.median(between_events[name].median_us - in_graphs[name].median_us for name in in_graphs)
    least_us = DROP_RATIO * min(timing.median_us for timing in in_graphs.values())
    return {
        name: dataclasses.replace(timing, median_us=max(timing.median_us - events_us, least_us))
        for name, timing in between_events.items()
    }


def _timings(rounds: list[_Round]) -> dict[Any, Timing]:
    steady = _steady(rounds)
    timings = {}
    for name in dict.fromkeys(name for taken in rounds for name in taken.us):
        own = [taken for taken in steady if name in taken.us]
        # If all its rounds drooped, they count: it was dropped against its peers of the same rounds.
        own = own or [taken for taken in rounds if name in taken.us]
        timings[name] = Timing.of([taken.us[name] for taken in own], own[0].clock_mhz, own[-1].clock_mhz)
    return timings
