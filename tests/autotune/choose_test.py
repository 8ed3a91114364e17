"""The rule that picks among timed candidates: stable under noise, never far from the fastest."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import small_package as small
from hypothesis import given
from hypothesis import strategies as st

from stoneware.kernels.config import Config, KernelConfig
from stoneware.tuning.choose import BAND, choose, is_slower

BIG, TINY, TRITON = small.sm90(small.BIG), small.sm90(small.TINY), small.triton()


@dataclass(frozen=True)
class Timed:
    config: Config
    median_us: float
    spread_us: float = 0.0


def test_no_candidate_is_refused():
    with pytest.raises(ValueError, match=r"candidates=\[\] must be at least one"):
        choose([])


def test_order_of_the_candidates_decides_nothing():
    timed = [Timed(BIG, 10.0, 1.0), Timed(TINY, 10.2, 1.0), Timed(small.VENDOR, 10.1, 1.0)]
    expected = choose(timed, [TINY])
    for _ in range(10):
        random.shuffle(timed)
        assert choose(timed, [TINY]) == expected


def test_near_tie_with_the_vendor_is_ours_whichever_was_faster():
    """Noise of 0.2 % moves either ahead; the next tune must give the same table."""
    for tiny_us, vendor_us in ((10.0, 10.02), (10.02, 10.0)):
        chosen = choose([Timed(TINY, tiny_us), Timed(small.VENDOR, vendor_us)], [])[0][0]
        assert chosen.config == TINY


def test_near_tie_is_the_first_by_the_heuristic():
    for tiny_us, big_us in ((10.0, 10.02), (10.02, 10.0)):
        timed = [Timed(TINY, tiny_us), Timed(BIG, big_us), Timed(small.VENDOR, 10.01)]
        for preferred in ([TINY, BIG], [BIG, TINY]):
            assert choose(timed, preferred)[0][0].config == preferred[0]


def test_what_is_faster_by_more_than_the_band_is_chosen_whatever_its_spread():
    timed = [Timed(TINY, 10.0, 5.0), Timed(small.VENDOR, 10.31, 5.0), Timed(BIG, 10.4, 5.0)]
    assert choose(timed, [BIG])[0][0].config == TINY
    assert is_slower(timed[1], timed[0]) and not is_slower(timed[0], timed[1])


def test_two_of_ours_tie_within_a_narrower_band():
    assert choose([Timed(TINY, 10.0), Timed(BIG, 10.19)], [BIG])[0][0].config == BIG
    assert choose([Timed(TINY, 10.0), Timed(BIG, 10.21)], [BIG])[0][0].config == TINY
    # The vendor library does not widen it.
    timed = [Timed(small.VENDOR, 9.95), Timed(TINY, 10.0), Timed(BIG, 10.21)]
    assert choose(timed, [BIG])[0][0].config == TINY


def test_two_of_ours_tie_within_half_of_it_at_a_long_problem():
    assert choose([Timed(TINY, 1000.0), Timed(BIG, 1009.0)], [BIG])[0][0].config == BIG
    assert choose([Timed(TINY, 1000.0), Timed(BIG, 1011.0)], [BIG])[0][0].config == TINY


@pytest.mark.parametrize("vendor_us", [10.0, 1000.0])
def test_tie_with_the_vendor_is_ours_at_every_length(vendor_us):
    ordered, rule = choose([Timed(BIG, vendor_us * 1.029), Timed(small.VENDOR, vendor_us)])
    assert ordered[0].config == BIG
    assert rule == "the preferred one within 3% of the fastest of 2"
    assert choose([Timed(BIG, vendor_us * 1.031), Timed(small.VENDOR, vendor_us)])[0][0].config == small.VENDOR


def test_configs_of_decorated_kernels_tie_by_their_order():
    first, second = (KernelConfig(kwargs=(("BLOCK", block),)) for block in (64, 128))
    ordered, _ = choose([Timed(second, 10.0), Timed(first, 10.01)])
    assert [one.config for one in ordered] == [first, second]
    ordered, _ = choose([Timed(second, 10.0), Timed(first, 10.01)], [second])
    assert ordered[0].config == second


def test_two_tunes_with_noise_differ_in_less_than_the_plain_fastest():
    random.seed(3)
    configs = [BIG, TINY, TRITON, small.VENDOR]
    problems = [[random.choice((10.0, 10.0, 10.1, 11.0, 13.0)) for _ in configs] for _ in range(400)]

    def tune(true_us):
        return [Timed(config, random.gauss(us, 0.005 * us), 0.02 * us) for config, us in zip(configs, true_us)]

    differ = {"choose": 0, "fastest": 0}
    for true_us in problems:
        one, two = tune(true_us), tune(true_us)
        differ["choose"] += choose(one, configs)[0][0].config != choose(two, configs)[0][0].config
        differ["fastest"] += (
            min(one, key=lambda timed: timed.median_us).config != min(two, key=lambda timed: timed.median_us).config
        )
    assert differ["choose"] * 4 < differ["fastest"]


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 100)), min_size=1, max_size=8), st.integers(0, 7))
def test_chosen_is_no_slower_than_fastest_canonical_or_vendor_by_more_than_a_tie(timings, which):
    configs = [small.VENDOR, *(Config(backend="x", kernel=str(idx)) for idx in range(7))]
    timed = [Timed(config, *timing) for config, timing in zip(configs, timings)]
    canonical = configs[which]
    ordered, rule = choose(timed, [canonical])
    assert sorted(map(id, ordered)) == sorted(map(id, timed))
    chosen = ordered[0]

    def ties(other):
        return chosen.median_us <= other.median_us * (1 + BAND)

    fastest_us = min(one.median_us for one in timed)
    assert any(ties(other) for other in timed if other.median_us == fastest_us)
    assert all(ties(other) for other in timed if other.config in (canonical, small.VENDOR))
    assert [one.median_us for one in ordered[1:]] == sorted(one.median_us for one in ordered[1:])
    assert math.isfinite(chosen.median_us) and rule
