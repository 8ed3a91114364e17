"""Estimates of times at a shape from near problems: their intervals, and their order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import small_package as small
from known_times import CONFIGS, candidate_of

from stoneware.tuning.time_model import Corrections, TimeModel, estimates

BIG, TINY, SMALL = (small.sm90(name) for name in (small.BIG, small.TINY, small.SMALL))

MODEL = TimeModel(
    tile_m=128,
    tile_n=128,
    tile_k=128,
    cluster_m=2,
    cluster_n=1,
    splits=1,
    max_swizzle=1,
    slots=120,
    a_bytes=1,
    b_bytes=1,
    out_bytes=2,
    largest_m=1 << 13,
    launch_us=4.0,
    wave_us=1.0,
    step_us=0.3,
    work_us=0.0004,
    unfilled_us=0.0002,
    byte_us=2e-7,
)


def test_a_model_is_not_used_beyond_twice_the_m_of_its_measurements():
    candidates = {0: (candidate_of(BIG), MODEL._replace(largest_m=640)), 1: (candidate_of(SMALL), MODEL)}
    near = [(0.1, Corrections(candidates, [(0, 0, 0.8, 1.0), (1, 0, 1.0, 1.0)]))]
    for m, expected in ((1280, BIG), (1281, SMALL)):
        best, *_ = estimates(m, 4096, 4096, near, {candidate_of(config): config for config in (BIG, SMALL)})
        assert best.config == expected


def test_a_kernel_whose_warp_groups_take_turns_is_not_estimated_where_few_have_tiles():
    turns = replace(BIG, kernel="128x128x128_1x1x1_pingpong2x6_swap")
    candidates = {0: (turns, MODEL), 1: (candidate_of(SMALL), MODEL)}
    near = [(0.1, Corrections(candidates, [(0, 0, 0.8, 1.0), (1, 0, 1.0, 1.0)]))]
    for m, expected in ((256, SMALL), (257, turns)):  # 4096 of n have 32 tiles
        best, *_ = estimates(m, 4096, 4096, near, {turns: turns, candidate_of(SMALL): SMALL})
        assert best.config == expected


def test_config_that_is_fast_nowhere_near_is_not_estimated():
    configs = [replace(SMALL, max_swizzle=size, splits=splits) for size in (1, 2) for splits in (1, 2, 4, 8)]
    configs += [BIG, TINY, small.VENDOR, replace(BIG, max_swizzle=2)]
    candidates = {position: (candidate_of(config), MODEL) for position, config in enumerate(configs)}

    def near(*order):
        return Corrections(candidates, [(at, 0, 1.0 + rank / 100, 1.0) for rank, at in enumerate(order)])

    def estimates_of(*near):
        return estimates(64, 4096, 4096, near, {candidate_of(config): config for config in configs})

    found = estimates_of((0.1, near(*range(12))))
    assert [one.config for one in found] == configs[:10]
    found = estimates_of((0.1, near(*range(12))), (0.2, near(11, 0)))
    assert {one.config for one in found} == {*configs[:10], configs[11]}
    us, _ = MODEL.at(64, 4096, 4096)
    [last] = [one.us for one in found if one.config == configs[11]]
    assert us * 1.0 < last < us * 1.07, "the ratio of every near problem"


def said_of(ratios, candidates):
    """The correction by a problem: for each candidate, by its position, the ratio."""
    return Corrections(candidates, [(at, 0, ratio, 1.0) for at, ratio in enumerate(ratios)])


@pytest.mark.parametrize("config", [BIG, small.VENDOR])
def test_interval_is_wider_farther_from_what_was_measured(config):
    candidates = {0: (candidate_of(config), MODEL)}
    widths = []
    for distance in (0.0, 0.1, 1.0, 4.0):
        [found] = estimates(128, 4096, 4096, [(distance, said_of([1.0], candidates))], CONFIGS)
        low, high = found.interval_us
        assert found.us == pytest.approx(math.sqrt(low * high))
        widths.append(high / low)
    assert widths[0] > 1.0
    assert widths == sorted(set(widths))


def test_interval_is_wider_where_another_device_was_measured():
    near = [(0.1, said_of([1.0], {0: (candidate_of(BIG), MODEL)}))]
    [here], [there] = (
        estimates(128, 4096, 4096, near, CONFIGS, is_other_device=is_other) for is_other in (False, True)
    )
    assert there.us == here.us
    assert there.interval_us[0] < here.interval_us[0] < here.interval_us[1] < there.interval_us[1]


def test_each_source_counts_by_its_own_model():
    """Both say the same time: one by a model that is twice as slow, with ratios of a half."""
    times = ("launch_us", "wave_us", "step_us", "work_us", "unfilled_us", "byte_us")
    slow = MODEL._replace(**{name: 2 * getattr(MODEL, name) for name in times})
    sources = [said_of([1.0], {0: (candidate_of(BIG), MODEL)}), said_of([0.5], {0: (candidate_of(BIG), slow)})]
    for order in (sources, sources[::-1]):
        [both] = estimates(128, 4096, 4096, [(0.1, said) for said in order], CONFIGS)
        [alone] = estimates(128, 4096, 4096, [(0.1, sources[0])] * 2, CONFIGS)
        assert both.us == pytest.approx(alone.us) and both.interval_us == pytest.approx(alone.interval_us)


def test_interval_is_wider_where_near_problems_disagree():
    candidates = {0: (candidate_of(BIG), MODEL)}

    def width(*ratios):
        [found] = estimates(128, 4096, 4096, [(0.1, said_of([ratio], candidates)) for ratio in ratios], CONFIGS)
        return found.interval_us[1] / found.interval_us[0]

    assert width(0.8, 1.2) > 1.1 * width(0.99, 1.01)


def test_choice_is_what_is_expected_to_lose_least():
    # Both have the same model, so the ratios decide.
    for unsure, sure in ((BIG, small.VENDOR), (small.VENDOR, BIG)):
        candidates = {0: (candidate_of(unsure), MODEL), 1: (candidate_of(sure), MODEL)}
        scattered = [(0.1, said_of(ratios, candidates)) for ratios in ((0.7, 1.0), (1.28, 1.0))]
        agreed = [(0.1, said_of(ratios, candidates)) for ratios in ((0.97, 1.0), (0.97, 1.0))]
        first, second = estimates(128, 4096, 4096, scattered, CONFIGS)
        assert (first.config, second.config) == (sure, unsure)
        assert second.us < first.us, "it is less by the mean alone"
        assert estimates(128, 4096, 4096, agreed, CONFIGS)[0].config == unsure


def test_tile_that_is_small_for_m_is_estimated_where_it_was_fast_near():
    """Else nothing would be known of ours where the vendor cannot run the problem."""
    candidates = {0: (candidate_of(small.VENDOR), MODEL), 1: (candidate_of(TINY), MODEL._replace(tile_m=16))}
    near = [(0.1, said_of([1.0, 2.0], candidates))]
    assert [one.config for one in estimates(4096, 4096, 4096, near, CONFIGS)] == [small.VENDOR, TINY]
