"""The one rule that picks among timed candidates: in the bake, in the user's store, on a miss.

The next tune of the same shapes gives other medians. What noise decides would be decided
differently, from one table to the next and from one rank to another. So candidates that take no
more than a band longer than the fastest tie with it (BAND, LONG_BAND), and the first of them in
canonical order is chosen: the vendor library, which fits its kernel to each shape, also to those
that were not timed; then the op's heuristic; then the configs' own order.

Whatever is chosen is therefore never slower than the default or the vendor library by more than
the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from stoneware.kernels.config import VENDOR, AnyConfig

BAND = 0.03

LONG_US = 400.0
LONG_BAND = 0.06
"""Between the vendor library and another, where the fastest takes LONG_US or more: how they compare
depends on the clock there, which a tune lowers by heat. For both: docs/design/table.md."""


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
        return not is_vendor(config), rank.get(config, len(rank)), config

    by_time = sorted(candidates, key=lambda candidate: (candidate.median_us, order(candidate)))
    fastest = by_time[0]
    chosen = min((candidate for candidate in by_time if not is_slower(candidate, fastest)), key=order)
    if chosen is fastest:
        rule = f"the fastest of {len(by_time)}"
    else:
        which = "the vendor library" if is_vendor(chosen.config) else "first in canonical order"
        rule = f"{which}, within {_band(chosen, fastest):.0%} of the fastest of {len(by_time)}"
    return (chosen, *(candidate for candidate in by_time if candidate is not chosen)), rule


def is_vendor(config: AnyConfig) -> bool:
    """Whether torch's own kernel is meant, not one of ours."""
    return getattr(config, "backend", None) == VENDOR


def is_slower(candidate: Timed, other: Timed) -> bool:
    """Whether `candidate` took longer than `other` by more than a tie."""
    return candidate.median_us > other.median_us * (1 + _band(candidate, other))


def _band(candidate: Timed, other: Timed) -> float:
    is_long = other.median_us >= LONG_US
    return LONG_BAND if is_long and is_vendor(candidate.config) != is_vendor(other.config) else BAND
