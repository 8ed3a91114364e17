"""The one rule that picks among timed candidates: in the bake, in the user's store, on a miss.

The next tune of the same shapes gives other medians. A choice by noise would differ from one table
to the next and from one rank to another. So candidates that take at most a band longer than the
fastest tie with it (BAND), and the first of them in canonical order is chosen: our kernels, in the
order of the op's heuristic and then of their configs, before the vendor library. A call of ours
takes less time on the host, and has the same order of sums at every m.

So the choice is never slower than the default or the vendor library by more than the band. Among our kernels a tie
is narrower (OWN_BAND): what the wider one costs in speed, it does not win in stability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from stoneware.kernels.config import VENDOR, AnyConfig

BAND = 0.03
"""Why so much: docs/design/table.md, like the next."""

OWN_BAND = 0.02
"""The same between two kernels of ours."""


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
    own = [candidate for candidate in tied if not is_vendor(candidate.config)]
    chosen = min((one for one in own if not is_slower(one, own[0], OWN_BAND)), key=order) if own else fastest
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
