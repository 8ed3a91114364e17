"""The one rule that picks among timed candidates: in the bake, in the user's store, on a miss.

The next tune of the same shapes gives other medians. A choice by noise would differ from one table
to the next and from one rank to another. So candidates that take at most a band longer than the
fastest tie with it (BAND), and a kernel of ours wins over the vendor library: its call takes less
time on the host, and has the same order of sums at every m. Of ours those tie that take at most a
narrower band longer than the fastest of them (OWN_BAND, at long problems LONG_OWN_BAND), and the first
in canonical order is chosen: that of the op's heuristic, and then of their configs.

So the choice is never slower than the default or the vendor library by more than the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from stoneware.kernels.config import VENDOR, AnyConfig

BAND = 0.03
"""Why so much: docs/design/table.md, like the next."""

OWN_BAND = 0.02
"""The same between two configs that are not the vendor library's."""

LONG_US = 200.0
"""Problems that take this long keep a GPU at its power limit while they are timed."""

LONG_OWN_BAND = 0.01
"""OWN_BAND of long problems, where the power limit hides a part of the differences."""


class Timed(Protocol):
    """A candidate: its config, and the median in us."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def median_us(self) -> float: ...


Candidate = TypeVar("Candidate", bound=Timed)


def choose(candidates: Sequence[Candidate], preferred: Sequence[AnyConfig] = ()) -> tuple[tuple[Candidate, ...], str]:
    """Orders the candidates at one problem, the chosen one first.

    Args:
      candidates: timed, at least one, each with another config; of any order.
      preferred: configs by the heuristic, best first.

    Returns:
      The chosen candidate and then the others from fast to slow; and why it was chosen, as a
      sentence without a full stop.

    Raises:
      ValueError: there are no candidates.
    """
    if not candidates:
        raise ValueError("candidates=[] must be at least one; leave out problems without timings")
    rank = {config: position for position, config in enumerate(preferred)}

    def order(candidate: Candidate) -> tuple[bool, int, AnyConfig]:
        config = candidate.config
        return is_vendor(config), rank.get(config, len(rank)), config

    by_time = sorted(candidates, key=lambda candidate: (candidate.median_us, order(candidate)))
    fastest = by_time[0]
    tied = [candidate for candidate in by_time if not is_slower(candidate, fastest)]
    ours = [candidate for candidate in tied if not is_vendor(candidate.config)]
    own_band = OWN_BAND if fastest.median_us < LONG_US else LONG_OWN_BAND
    tied_ours = [candidate for candidate in ours if not is_slower(candidate, ours[0], own_band)]
    chosen = min(tied_ours, key=order) if tied_ours else fastest
    if chosen is fastest:
        rule = f"the fastest of {len(by_time)}"
    else:
        rule = f"the preferred one within {BAND:.0%} of the fastest of {len(by_time)}"
    return (chosen, *(candidate for candidate in by_time if candidate is not chosen)), rule


def is_vendor(config: AnyConfig) -> bool:
    """Whether torch's own kernel is meant, not one of ours."""
    return getattr(config, "backend", None) == VENDOR


def is_slower(candidate: Timed, other: Timed, band: float = BAND) -> bool:
    """Whether `candidate` took longer than `other` by more than a tie."""
    return candidate.median_us > other.median_us * (1 + band)
