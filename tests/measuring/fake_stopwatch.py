"""A GPU that is not there: calls take the time that is written on them, at a given clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

FLUSH_US = 70.0
EVENT_US = 3.0
"""What event, launch and event add to a call that is timed between events."""

BASE_MHZ = 1980


class FakeCall:
    """A call that takes `us` at BASE_MHZ; made without an effect."""

    def __init__(self, us: float, *, is_capturable: bool = True, fails_after: int = -1) -> None:
        self.us, self.is_capturable, self.fails_after = us, is_capturable, fails_after
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class FakeStopwatch:
    """As stopwatch.CudaStopwatch; time passes only in what is timed.

    Args:
      clocks: the SM clock of one round after the other; the last stays. None: unknown.
    """

    def __init__(self, clocks: Iterator[int] | None = None) -> None:
        self._clocks = clocks
        self.clock_mhz = BASE_MHZ if clocks is None else next(clocks)
        self.now_s = 0.0
        self.rounds: list[list[Any]] = [[]]
        self.announce: Callable[[Any], None] = lambda name: None

    def now(self) -> float:
        return self.now_s

    def sm_clock_mhz(self) -> int:
        self.rounds.append([])
        if self._clocks is None:
            return 0
        clock, self.clock_mhz = self.clock_mhz, next(self._clocks, self.clock_mhz)
        return clock

    def warm_up(self, name: Any, call: FakeCall) -> None:
        self.announce(name)
        call()

    def time_call(self, name: Any, call: FakeCall) -> float:
        call()
        if call.fails_after == 0:
            raise RuntimeError("illegal address")
        call.fails_after -= 1
        return self._spent(name, EVENT_US + call.us)

    def capture(self, call: FakeCall | None, num_pairs: int) -> float | None:
        if call is not None and not call.is_capturable:
            return None
        return num_pairs * (FLUSH_US + (0.0 if call is None else call.us))

    def time_graph(self, name: Any, graph: float) -> float:
        self.announce(name)
        return self._spent(name, EVENT_US + graph)

    def _spent(self, name: Any, us: float) -> float:
        us *= BASE_MHZ / (self.clock_mhz or BASE_MHZ)
        self.rounds[-1].append(name)
        self.now_s += us / 1e6
        return us
