"""The plans that an op has made, so that the next call of the same kind is one look-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

MAX_PLANS = 4096
"""A plan takes some 4 KB of host memory (a CUTLASS Params struct is 1.5 to 1.8 KB); a server that
sees every m up to 8192 would otherwise keep them all, for each of its layers."""


_adding = threading.Lock()


class PlanCache(dict[Hashable, Callable[..., None]]):
    """A dict from what a plan depends on to the plan; the oldest go when there are too many."""

    def add(self, key: Hashable, plan: Callable[..., None]) -> None:
        with _adding:
            while len(self) >= MAX_PLANS:
                del self[next(iter(self))]
            self[key] = plan
