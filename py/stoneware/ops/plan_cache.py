"""The plans that an op has made, so that the next call of the same kind is one look-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

MAX_PLANS = 4096
"""A key and its plan took 1.0 KB of Python memory (tracemalloc over 399 scaled_mm plans on a CPU); a
server that sees every m up to 8192 would otherwise keep them all, for each of its layers."""


_adding = threading.Lock()


class PlanCache(dict[Hashable, Callable[..., None]]):
    """A dict from what a plan depends on to the plan; the oldest go when there are too many."""

    def add(self, key: Hashable, plan: Callable[..., None]) -> None:
        with _adding:
            while len(self) >= MAX_PLANS and key not in self:
                del self[next(iter(self))]
            self[key] = plan
