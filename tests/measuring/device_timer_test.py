"""The rule by which calls are timed against each other, on a GPU that is not there."""

from __future__ import annotations

import itertools
import statistics

import pytest
from fake_stopwatch import BASE_MHZ, EVENT_US, FakeCall, FakeStopwatch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoneware.measuring import device_timer
from stoneware.measuring.device_timer import SHORT_US, DeviceTimer, Timing, TimingFailed

LONG_US = SHORT_US


def timer(stopwatch: FakeStopwatch) -> DeviceTimer:
    return DeviceTimer(0, stopwatch=stopwatch, now=stopwatch.now)


def test_each_round_has_every_call_once_in_an_order_drawn_anew():
    stopwatch = FakeStopwatch()
    timer(stopwatch).time({name: FakeCall(LONG_US) for name in "abcdef"}, rounds=20, max_seconds=1e9)
    rounds = [taken for taken in stopwatch.rounds if taken]
    assert len(rounds) == 20
    assert all(sorted(taken) == list("abcdef") for taken in rounds)
    assert len({tuple(taken) for taken in rounds}) > 10


def test_the_hopeless_are_dropped_and_keep_the_timings_they_have():
    calls = {"fast": FakeCall(100.0), "near": FakeCall(140.0), "slow": FakeCall(170.0)}
    timings = timer(FakeStopwatch()).time(calls, rounds=50, max_seconds=1e9, rounds_before_drop=7)
    assert {name: timing.count for name, timing in timings.items()} == {"fast": 50, "near": 50, "slow": 7}
    assert timings["slow"].median_us == 170.0 + EVENT_US


def test_without_a_drop_none_is_dropped():
    timings = timer(FakeStopwatch()).time(
        {"fast": FakeCall(100.0), "slow": FakeCall(1000.0)}, rounds=9, max_seconds=1e9
    )
    assert {timing.count for timing in timings.values()} == {9}


def test_rounds_at_a_drooped_clock_are_discarded_and_repeated():
    clocks = [BASE_MHZ] * 5 + [1500] * 3 + [BASE_MHZ] * 100
    stopwatch = FakeStopwatch(iter(clocks))
    timing = timer(stopwatch).time({"a": FakeCall(LONG_US)}, rounds=20, max_seconds=1e9)["a"]
    assert timing == Timing(LONG_US + EVENT_US, 0.0, 20, BASE_MHZ, BASE_MHZ)
    assert len([taken for taken in stopwatch.rounds if taken]) == 23


def test_the_ramp_of_an_idle_gpu_is_discarded():
    clocks = iter([345, 345, 1200, 1700] + [BASE_MHZ] * 100)
    timing = timer(FakeStopwatch(clocks)).time({"a": FakeCall(LONG_US)}, rounds=20, max_seconds=1e9)["a"]
    assert (timing.median_us, timing.spread_us, timing.count) == (LONG_US + EVENT_US, 0.0, 20)
    assert timing.sm_clock_mhz_before == BASE_MHZ


def test_a_clock_that_is_low_all_along_discards_nothing():
    """Large products keep the GPU at its power limit."""
    stopwatch = FakeStopwatch(itertools.cycle([1300, 1315, 1330]))
    timing = timer(stopwatch).time({"a": FakeCall(LONG_US)}, rounds=21, max_seconds=1e9)["a"]
    assert timing.count == 21 == len([taken for taken in stopwatch.rounds if taken])


def test_an_unknown_clock_discards_nothing():
    timing = timer(FakeStopwatch()).time({"a": FakeCall(LONG_US)}, rounds=21, max_seconds=1e9)["a"]
    assert (timing.count, timing.sm_clock_mhz_before, timing.sm_clock_mhz_after) == (21, 0, 0)


@settings(deadline=None, max_examples=200)
@given(
    clocks=st.lists(st.integers(0, 2500), min_size=1, max_size=200),
    rounds=st.integers(1, 30),
    us=st.lists(st.floats(0.5, 500.0), min_size=1, max_size=4),
    drop=st.integers(0, 10),
)
def test_whatever_the_clock_does_it_ends_and_times_every_call(clocks, rounds, us, drop):
    stopwatch = FakeStopwatch(iter(clocks))
    calls = {idx: FakeCall(time_us) for idx, time_us in enumerate(us)}
    timings = timer(stopwatch).time(calls, rounds=rounds, max_seconds=1e9, rounds_before_drop=drop)
    assert set(timings) == set(calls)
    assert all(timing.count >= 1 for timing in timings.values())
    num_rounds = len([taken for taken in stopwatch.rounds if taken])
    assert num_rounds <= 4 * max(rounds, drop) + len(calls) + 2


@given(clocks=st.lists(st.integers(1, 2500), min_size=1, max_size=60))
def test_at_most_half_of_the_rounds_are_discarded_and_none_near_the_median(clocks):
    rounds = [device_timer._Round(clock, {"a": 1.0}) for clock in clocks]
    kept = [taken.clock_mhz for taken in device_timer._steady(rounds)]
    median = statistics.median(clocks)
    assert 2 * len(kept) >= len(clocks)
    assert sorted(kept) == sorted(clock for clock in clocks if clock >= 0.97 * median)


def test_short_calls_are_timed_in_graphs_without_the_cost_of_the_events():
    calls = {"a": FakeCall(5.0), "b": FakeCall(5.4), "slow": FakeCall(30.0)}
    timings = timer(FakeStopwatch()).time(calls, rounds=30, max_seconds=1e9, rounds_before_drop=5)
    assert timings["a"].median_us == pytest.approx(5.0)
    assert timings["b"].median_us == pytest.approx(5.4)
    assert (timings["slow"].median_us, timings["slow"].count) == (pytest.approx(30.0), 5)


def test_a_dropped_call_stays_slower_than_a_tie_whatever_its_events_cost():
    between_events = {"cheap": Timing(6.0), "dear": Timing(9.0), "dropped": Timing(9.1)}
    in_graphs = {"cheap": Timing(5.5), "dear": Timing(1.5)}
    assert device_timer._without_events(between_events, in_graphs)["dropped"].median_us == pytest.approx(9.1 - 4.0)
    in_graphs = {"cheap": Timing(5.5), "dear": Timing(5.0)}
    found = device_timer._without_events({**between_events, "dear": Timing(11.0)}, in_graphs)
    assert found["dropped"].median_us == pytest.approx(1.5 * 5.0)


def test_one_call_that_cannot_be_captured_keeps_all_at_one_method():
    calls = {"a": FakeCall(5.0), "b": FakeCall(5.4, is_capturable=False)}
    timings = timer(FakeStopwatch()).time(calls, rounds=30, max_seconds=1e9)
    assert timings["a"].median_us == 5.0 + EVENT_US
    assert timings["b"].median_us == 5.4 + EVENT_US
    assert {timing.count for timing in timings.values()} == {30}


def test_long_calls_are_timed_between_events_even_beside_short_drops():
    us = SHORT_US - EVENT_US
    timings = timer(FakeStopwatch()).time({"a": FakeCall(us)}, rounds=30, max_seconds=1e9)
    assert timings["a"].median_us == us + EVENT_US  # not short with the cost of the events


def test_it_stops_after_the_round_in_which_the_time_is_over():
    stopwatch = FakeStopwatch()
    timings = timer(stopwatch).time({"a": FakeCall(1e6)}, rounds=50, max_seconds=2.5)
    assert timings["a"].count == 3


def test_a_call_that_fails_is_named():
    calls = {"a": FakeCall(LONG_US), "b": FakeCall(LONG_US, fails_after=3)}
    with pytest.raises(TimingFailed, match="b failed.*illegal address") as caught:
        timer(FakeStopwatch()).time(calls, rounds=50, max_seconds=1e9)
    assert caught.value.name == "b"


def test_no_calls_take_no_time():
    assert timer(FakeStopwatch()).time({}, rounds=5, max_seconds=1e9) == {}
