"""The plans that an op has made, so that the next call of the same kind is one look-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from stoneware.autotune import tuning

MAX_PLANS = 4096
"""A key and its plan took 1.0 KB of Python memory (tracemalloc over 399 scaled_mm plans on a CPU); a
server that sees every m up to 8192 would otherwise keep them all, for each of its layers."""


_adding = threading.Lock()


class PlanCache(dict[Hashable, Callable[..., None]]):
    """A dict from what a plan depends on to the plan; the oldest go when there are too many.

    What a plan depends on beside its call, `tuning.state()`, is part of the key. When this process
    gets new samples, every plan goes.
    """

    def __init__(self) -> None:
        super().__init__()
        tuning.on_forget(self._forget)

    def add(self, key: Hashable, plan: Callable[..., None], generation: int) -> None:
        """Keeps a plan, unless it must be made anew at the next call.

        Args:
          key: what it depends on.
          plan: the plan.
          generation: `tuning.generation()` before the plan was decided; samples that came since may
            decide otherwise.
        """
        if tuning.current_mode() == "on_miss" and tuning.is_capturing():
            return  # made without the measurement that a call outside of the capture will take
        with _adding:
            if generation != tuning.generation():
                return
            while len(self) >= MAX_PLANS and key not in self:
                del self[next(iter(self))]
            self[key] = plan

    def _forget(self) -> None:
        with _adding:
            self.clear()
