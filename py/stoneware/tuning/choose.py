"""The one rule that picks among timed candidates: in the bake, in the user's store, on a miss.

The next tune of the same shapes gives other medians. What noise decides would be decided
differently, from one table to the next and from one rank to another. So candidates that take no
more than a band longer than the fastest tie with it (BAND, LONG_BAND), and of these the first in
canonical order is chosen: the vendor library, which fits its kernel to each shape, also to those
that were not timed; then the op's rule of thumb; then the configs' own order.

Whatever is chosen is therefore never slower than the default or the vendor library by more than
the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from stoneware.kernels.config import AnyConfig
from stoneware.kernels.registry import VENDOR

BAND = 0.03
"""Two tunes of 901 scaled_mm problems on one H200, some minutes apart: a candidate's median moved by
0.8 % (standard deviation) beside the others of its shape, by more than its spread tells. 1.1 % of
the problems got another config, 4.8 % with the plain fastest, and 8.8 % where overlapping spreads
tied and the order began with our kernels. What the first tune chose took 0.1 % longer than the
fastest of the second (geometric mean). With the kernels of later days 12 of 280 problems got
another, and 30 with the plain fastest, in two tunes 20 minutes apart, maybe on two H200s; 32 and 53
in two an hour apart (tools/bench/table_quality.py)."""

LONG_US = 400.0
LONG_BAND = 0.06
"""Between the vendor library and another, where the fastest takes LONG_US or more. A tune keeps
the GPU at its power limit with such products, their callers may not, and the clock decides between
kernels: in bf16 at m = 8192, n = 6144, k = 4096 torch.mm took 3 % longer than the best of ours in
a tune at 1470 MHz, and 4 % less in a benchmark of mixed calls at 1980 MHz. Three tunes on two days
agree, to 1.3 to 1.9 %, so it is no noise. With BAND there, as tried, seven of thirteen such
products in bf16 ran kernels of ours in that benchmark, and took from 2 % less to 4 % longer than
torch.mm, one of 12 ms 15 % longer."""


class Timed(Protocol):
    """What is asked of a candidate: its config, and the median in us."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def median_us(self) -> float: ...


Candidate = TypeVar("Candidate", bound=Timed)


def choose(
    candidates: Sequence[Candidate], preferred: Sequence[AnyConfig] = ()
) -> tuple[tuple[Candidate, ...], str]:
    """Orders the candidates at one problem, the chosen one first.

    Args:
      candidates: timed, at least one, each with another config; of any order.
      preferred: configs by the rule of thumb, best first.

    Returns:
      The chosen candidate and then the others from fast to slow; and why it was chosen, as a
      sentence without a full stop.

    Raises:
      ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("candidates=[] must be at least one; leave out problems without timings")
    rank = {config: position for position, config in enumerate(preferred)}

    def order(candidate: Candidate) -> tuple[bool, int, AnyConfig]:
        config = candidate.config
        return not is_vendor(config), rank.get(config, len(rank)), config

    by_time = sorted(candidates, key=lambda candidate: (candidate.median_us, order(candidate)))
    fastest = by_time[0]
    chosen = min(
        (candidate for candidate in by_time if not is_slower(candidate, fastest)), key=order
    )
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
