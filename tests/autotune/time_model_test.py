"""Modelled times: the fit, what a table keeps of it, and what a look-up makes of it at shapes that
were not measured."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import struct
from dataclasses import replace

import pytest
import small_package as small

from stoneware.kernels.tile_rule import is_near
from stoneware.tuning import lookup, nearest, sources, table_file, time_fit
from stoneware.tuning.bake import bake
from stoneware.tuning.entries import make_table
from stoneware.tuning.sources import Source
from stoneware.tuning.table import Block
from stoneware.tuning.table_entry import MODELLED_RUN, Choice, Entry
from stoneware.tuning.time_model import Corrections, TimeModel, corrections_of, estimates

BIG, TINY, SMALL = (small.cutlass(name) for name in (small.BIG, small.TINY, small.SMALL))

_FP8 = {"a_bytes": 1, "b_bytes": 1, "out_bytes": 2, "splits": 1, "max_swizzle": 1}
TRUTH = {
    BIG: TimeModel(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        cluster_m=2,
        cluster_n=1,
        slots=120,
        **_FP8,
        launch_us=4.0,
        wave_us=1.0,
        step_us=0.3,
        work_us=0.0004,
        unfilled_us=0.0002,
        byte_us=2e-7,
    ),
    TINY: TimeModel(
        tile_m=16,
        tile_n=64,
        tile_k=256,
        cluster_m=1,
        cluster_n=1,
        slots=264,
        **_FP8,
        launch_us=3.0,
        wave_us=2.0,
        step_us=0.4,
        work_us=0.0009,
        unfilled_us=0.0,
        byte_us=1e-7,
    ),
    SMALL: TimeModel(
        tile_m=64,
        tile_n=64,
        tile_k=256,
        cluster_m=1,
        cluster_n=1,
        slots=132,
        **_FP8,
        launch_us=3.5,
        wave_us=3.0,
        step_us=0.35,
        work_us=0.001,
        unfilled_us=0.0003,
        byte_us=1e-7,
    ),
    small.VENDOR: TimeModel(
        tile_m=128,
        tile_n=128,
        tile_k=128,
        cluster_m=1,
        cluster_n=1,
        slots=132,
        **_FP8,
        launch_us=8.0,
        wave_us=2.0,
        step_us=0.4,
        work_us=0.0005,
        unfilled_us=0.0,
        byte_us=2e-7,
    ),
}
"""Kernels of which everything is known."""

WEIGHTS = (
    (2048, 2048),
    (2048, 8192),
    (4096, 4096),
    (4096, 14336),
    (6144, 4096),
    (8192, 8192),
    (28672, 4096),
    (24576, 1536),
)
M_VALUES = (1, 16, 32, 64, 96, 128, 256, 512, 2048)
BETWEEN = tuple(itertools.product((8, 24, 48, 80, 112, 200, 400, 1000), (2560, 5120, 7168, 14336), (3072, 7168, 10240)))
"""m, n and k that were not measured."""


def near_enough(m):
    """The configs that are raced at m."""
    return [config for config, model in TRUTH.items() if config == small.VENDOR or is_near(model.tile_m, m)]


def true_us(config, m, n, k):
    return TRUTH[config].at(m, n, k)[0]


def samples(weights=WEIGHTS, m_values=M_VALUES, configs=tuple(TRUTH), **changes):
    return [
        small.sample(config, true_us(config, m, n, k), m=m, n=n, k=k, **changes)
        for n, k in weights
        for m in m_values
        for config in configs
    ]


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    return small.bake_samples(tmp_path_factory.mktemp("samples"), samples())


def find(*tables, m, n, k, device=small.H200, **family):
    sources = [Source(f"source {position}", one) for position, one in enumerate(tables)]
    return lookup.find(small.key(m=m, n=n, k=k, **family), device, sources)


def models_of(taken, num_groups=0, kernels=small.manifest(), num_sms=132):
    entries = [
        Entry(
            key=sample.key,
            rule="",
            choices=(Choice(config=sample.config, median_us=sample.median_us, spread_us=0.0, run="run-1"),),
        )
        for sample in taken
    ]
    found = time_fit.models(entries, kernels, num_sms)
    return found.get(replace(small.key(), num_groups=num_groups).family, {})


@pytest.mark.parametrize("config", TRUTH)
def test_fit_finds_the_times_and_the_blocks_at_once_of_a_kernel(config):
    model = models_of(samples(configs=[config]))[config]
    assert model.slots == TRUTH[config].slots
    for m, n, k in BETWEEN:
        assert model.at(m, n, k)[0] == pytest.approx(true_us(config, m, n, k), rel=1e-3)


def test_swizzled_tiles_are_rounded_up_as_the_tile_scheduler_does():
    model = TRUTH[BIG]._replace(cluster_m=1, max_swizzle=8)
    # 9 x 5 tiles: five of the shorter side are four at a time, so 12 x 8 blocks are launched.
    waves, _, work, unfilled, *_, fullness = model.counts(9 * 128, 5 * 128, 128)
    assert (waves, work, fullness) == (1, 96, 96 / 120)
    assert unfilled == 1 - 9 / 12
    assert model._replace(max_swizzle=1).counts(9 * 128, 5 * 128, 128)[2] == 45


def test_what_was_measured_seldom_or_is_no_kernel_has_no_model():
    assert models_of(samples(WEIGHTS[:5])) == {}
    assert models_of(samples(WEIGHTS[:6], [16])) == {}, "6 samples"
    assert models_of(samples(m_values=[16])) == {}, "8 samples of 8 weights, and one m"
    assert models_of(samples(WEIGHTS[:6], [16, 32])).keys() == TRUTH.keys()
    assert models_of(samples(), num_sms=0) == {}, "a device whose SMs nobody told"
    unknown = replace(TINY, kernel="unknown")
    assert models_of([replace(one, config=unknown) for one in samples(configs=[TINY])]) == {}
    batches = [replace(one, key=replace(one.key, num_groups=8)) for one in samples()]
    assert models_of(batches, num_groups=8) == {}
    assert models_of(samples(), kernels=None) == {}


@pytest.mark.parametrize("seed", range(100))
def test_no_time_is_negative_and_no_other_choice_of_terms_fits_better(seed):
    draw = random.Random(seed)
    num, rows = draw.randint(2, 6), draw.randint(3, 20)
    columns = [[draw.choice((0.0, draw.random(), draw.random())) for _ in range(rows)] for _ in range(num)]
    columns = [
        [value / (math.sqrt(math.fsum(one * one for one in column)) or 1.0) for value in column] for column in columns
    ]
    products = [[math.fsum(map(float.__mul__, a, b)) for b in columns] for a in columns]
    target = [math.fsum(column) for column in columns]

    def error(values):
        return math.fsum(
            (math.fsum(value * column[row] for value, column in zip(values, columns)) - 1) ** 2 for row in range(rows)
        )

    values = time_fit._non_negative(products, target)
    assert min(values) >= 0
    for size in range(1, num + 1):
        for chosen in itertools.combinations(range(num), size):
            solved = time_fit._solve([[products[a][b] for b in chosen] for a in chosen], [target[a] for a in chosen])
            other = [0.0] * num
            for idx, value in zip(chosen, solved):
                other[idx] = value
            if min(other) >= 0:
                assert error(values) <= error(other) + 1e-6


def test_table_gives_the_models_and_corrections_back(baked):
    block = baked.devices[0].block(small.key().family)
    fitted = time_fit.models(baked.devices[0].entries(), small.manifest(), 132)[block.family]
    assert block.models == fitted
    assert len(fitted) == 4
    read, made = (
        [corrections((4096, 4096, m)) for m in (16, 512)]
        for corrections in (block.corrections, functools.partial(Block.corrections, block))
    )
    for one, other in zip(read, made, strict=True):
        assert one.measured_out_dtype == other.measured_out_dtype == "bf16"
        assert list(map(by_config(one), one.corrections)) == list(map(by_config(other), other.corrections))


def by_config(said):
    """A correction with its candidate in place of the position."""
    return lambda correction: (said.candidates[correction[0]], *correction[1:])


def test_corrections_leave_out_what_was_slow():
    entry = Entry(
        key=small.key(),
        rule="",
        choices=tuple(
            Choice(config=config, median_us=us, spread_us=0.0, run="run-1", is_stale=us > 14)
            for config, us in ((BIG, 10.2), (TINY, 10.0), (SMALL, 30.0), (small.VENDOR, 30.1))
        ),
    )
    said = corrections_of(entry, {}, {TINY: TRUTH[TINY]}, {TINY: TRUTH[BIG]})
    found = list(map(by_config(said), said.corrections))
    assert [one[0] for one in found] == [(BIG, None), (TINY, TRUTH[TINY]), (SMALL, None)]
    assert [one[1] for one in found] == [False, False, True]
    us, fullness = TRUTH[TINY].at(16, 4096, 4096)
    assert found[1][2] == pytest.approx(10.0 / us, rel=1e-3)
    assert found[1][3] == pytest.approx(fullness, abs=1e-3)


def test_both_16_bit_outputs_share_what_they_have_in_common(baked):
    line, _, body = table_file.encode(baked).partition(b"\n")
    [device] = json.loads(line)["devices"]
    families = {family["key"]["out_dtype"]: family for family in device["families"]}
    assert families["bf16"]["offset"] == families["fp16"]["offset"]
    assert families["bf16"]["configs"] != families["fp16"]["configs"]
    [slots] = {
        model.slots for config, model in baked.devices[0].block(small.key().family).models.items() if config == TINY
    }
    tiny = struct.pack("<8I", 16, 64, 256, 1, 1, 1, 1, slots)
    assert body.count(tiny) == 1
    found = find(baked, m=24, n=5120, k=7168, out_dtype="fp16")
    assert found.choice.config.kernel.replace("fp16", "bf16") == find(baked, m=24, n=5120, k=7168).choice.config.kernel
    assert found.grade == "nearest shape" and found.entry.measured_out_dtype == "bf16"


def test_fastest_at_the_very_shape_is_chosen_where_the_nearest_entry_has_another(baked):
    worst, worst_of_nearest = 1.0, 1.0
    for m, n, k in BETWEEN:
        best_us = min(true_us(config, m, n, k) for config in near_enough(m))
        modelled, nearest = itertools.islice(
            lookup.answers(small.key(m=m, n=n, k=k), small.H200, [Source("wheel", baked)]), 2
        )
        assert (modelled.layer, modelled.grade) == ("nearest shape", "nearest shape")
        worst = max(worst, true_us(modelled.choice.config, m, n, k) / best_us)
        worst_of_nearest = max(worst_of_nearest, true_us(nearest.choice.config, m, n, k) / best_us)
    assert worst < 1.01
    assert worst_of_nearest > 1.2


def test_tile_of_which_less_than_half_would_be_filled_is_no_candidate(tmp_path):
    """It was measured at the next larger m, and never as far down as this one."""
    fast = [
        replace(one, median_us=one.median_us / 3) if one.config == SMALL else one
        for one in samples()
        if one.config != SMALL or one.key.m >= 32
    ]
    table = small.bake_samples(tmp_path, fast)
    assert find(table, m=32, n=5120, k=5120).choice.config == SMALL
    assert find(table, m=31, n=5120, k=5120).choice.config == TINY


def test_same_weight_at_another_m_is_modelled_too(baked):
    for m in (8, 48, 72, 200, 1000):
        found = find(baked, m=m, n=4096, k=4096)
        assert (found.layer, found.grade) == ("nearest m", "nearest m")
        assert (found.modelled_from.n, found.modelled_from.k) == (4096, 4096)
        best = min(near_enough(m), key=lambda config: true_us(config, m, 4096, 4096))
        assert found.choice.config == best
        assert found.choice.median_us == pytest.approx(true_us(best, m, 4096, 4096), rel=0.01)


def test_near_measurements_correct_the_model():
    off = {BIG: 1.3, TINY: 0.8, SMALL: 1.2, small.VENDOR: 0.9}
    near = [
        (
            apart,
            corrections_of(
                Entry(
                    key=small.key(m=64, n=n),
                    rule="",
                    choices=tuple(
                        Choice(
                            config=config, median_us=true_us(config, 64, n, 4096) * times, spread_us=0.0, run="run-1"
                        )
                        for config, times in off.items()
                    ),
                ),
                {},
                TRUTH,
            ),
        )
        for apart, n in ((0.01, 4096), (0.04, 4608))
    ]
    found = {one.config: one.us for one in estimates(64, 4352, 4096, near)}
    assert found.keys() == off.keys()
    for config, us in found.items():
        assert us == pytest.approx(off[config] * true_us(config, 64, 4352, 4096), rel=1e-3)


def test_nearer_and_equally_full_measurements_count_for_more():
    model = TRUTH[SMALL]
    _, full = model.at(64, 4096, 4096)

    def us(*corrections):
        near = [
            (apart, Corrections("bf16", {0: (SMALL, model)}, [(0, 0, ratio, fullness)]))
            for apart, ratio, fullness in corrections
        ]
        [found] = estimates(64, 4096, 4096, near)
        return found.us / model.at(64, 4096, 4096)[0]

    assert us((0.1, 1.0, full), (0.1, 1.2, full)) == pytest.approx(1.1)
    assert us((0.1, 1.0, full), (1.5, 1.2, full)) < 1.02
    assert us((0.1, 1.0, full), (0.1, 1.2, full - 0.3)) < 1.02


def test_nearest_entry_answers_where_its_choice_has_no_model(tmp_path):
    swizzled = replace(BIG, max_swizzle=8)
    baked = small.bake_samples(tmp_path, [*samples(), small.sample(swizzled, 1.0, m=64, n=4096, k=4096)])
    found = find(baked, m=60, n=4096, k=4096)
    assert found.choice.config == swizzled
    assert (found.modelled_from, found.entry.key) == (None, small.key(m=64))
    assert find(baked, m=20, n=4096, k=4096).modelled_from == small.key(m=16)


def test_own_measurements_of_few_weights_correct_the_models_of_the_wheel(baked, tmp_path):
    m, n, k = 40, 5120, 5120
    first = find(baked, m=m, n=n, k=k).choice.config
    # On this machine another one is the fastest there.
    other = next(config for config in (TINY, SMALL) if config != first)
    own = small.bake_samples(
        tmp_path,
        [
            small.sample(config, true_us(config, at, n, k) * (0.5 if config == other else 1.0), m=at, n=n, k=k)
            for at in (32, 48)
            for config in TRUTH
        ],
    )
    found = find(own, baked, m=m, n=n, k=k)
    assert (found.choice.config, found.source) == (other, "source 0")
    assert (found.layer, found.num_modelled_from) == ("nearest m", nearest.MOST_PROBLEMS)
    assert find(own, m=m, n=n, k=k).modelled_from is None, "no models at all"


def test_store_table_tells_its_measurements_in_the_models_of_the_wheel(baked, monkeypatch):
    own = [
        (small.run(), replace(one, median_us=one.median_us * (0.5 if one.config == TINY else 2)))
        for one in samples(((5120, 5120),), (16, 32))
    ]
    monkeypatch.setattr(sources.manifest, "packaged", small.manifest)
    store = sources.table_of_samples("scaled_mm", own, known=baked)
    family = small.key().family
    block, of_wheel = (one.devices[0].block(family) for one in (store, baked))
    assert block.fitted_by == of_wheel.fitted_by == baked.digest
    assert block.models == of_wheel.models
    alone = sources.table_of_samples("scaled_mm", own).devices[0].block(family)
    assert (alone.has_models, alone.models) == (False, {})
    made = find(sources.table_of_samples("scaled_mm", own), baked, m=24, n=5120, k=5120)
    read = find(store, baked, m=24, n=5120, k=5120)
    assert read.choice.config == TINY
    assert [(one.config, one.median_us) for one in read.entry.choices] == [
        (one.config, one.median_us) for one in made.entry.choices
    ]


def test_store_with_more_weights_than_the_wheel_has_models_of_its_own(tmp_path):
    wheel = small.bake_samples(tmp_path, samples(WEIGHTS[:6]))
    family = small.key().family

    def block(taken):
        pairs = [(small.run(), one) for one in taken]
        made = make_table("scaled_mm", pairs, small.manifest(), known=wheel)
        return made.devices[0].block(family)

    more = block(samples())
    assert not more.fitted_by and more.models.keys() == TRUTH.keys()
    fewer = block(samples()[: 4 * len(M_VALUES) * 6])
    assert fewer.fitted_by == wheel.digest
    assert fewer.models == wheel.devices[0].block(family).models


def test_of_two_sources_with_the_same_problem_the_first_counts(baked):
    once, twice = (find(*tables, m=24, n=5120, k=5120) for tables in ([baked], [baked, baked]))
    assert twice.num_modelled_from == once.num_modelled_from == nearest.MOST_PROBLEMS
    assert twice.entry == once.entry
    assert (twice.source, once.source) == ("source 0", "source 0")


def test_a_near_weight_that_was_measured_at_a_far_m_does_not_keep_others_out(tmp_path):
    """Ten weights that are the nearest, each at one m of 4096, where TINY takes ten times as long as it
    does at the m that is asked for."""
    near = [(5120 + 16 * i, 5120) for i in range(10)]
    taken = samples() + [
        small.sample(
            config, true_us(config, 4096, *weight) * (10 if config == TINY else 1), m=4096, n=weight[0], k=5120
        )
        for weight in near
        for config in TRUTH
    ]
    table = small.bake_samples(tmp_path, taken)
    found = find(table, m=17, n=5120, k=5120)
    assert found.num_modelled_from == nearest.MOST_PROBLEMS
    assert found.modelled_from.m in (16, 32)
    assert found.choice.config == min(near_enough(17), key=lambda config: true_us(config, 17, 5120, 5120))


def test_a_number_of_groups_that_was_not_measured_is_modelled_from_others():
    family = {"op": "grouped_mm", "scales": "row"}
    taken = [
        replace(
            small.sample(config, TRUTH[config].at(m, n, k, groups)[0], m=m, n=n, k=k),
            key=small.key(m=m, n=n, k=k, num_groups=groups, **family),
        )
        for groups in (8, 128)
        for n, k in WEIGHTS
        for m in M_VALUES
        for config in TRUTH
    ]
    made = make_table("grouped_mm", [(small.run(), one) for one in taken], small.manifest())
    table = table_file.decode(table_file.encode(made), "grouped_mm.table", "grouped_mm")
    for m, groups in itertools.product((1, 24, 200), (8, 24, 60, 256)):
        found = find(table, m=m, n=5120, k=5120, num_groups=groups, **family)
        times = {config: TRUTH[config].at(m, 5120, 5120, groups)[0] for config in near_enough(m)}
        assert found.num_modelled_from == nearest.MOST_PROBLEMS
        assert found.choice.median_us == pytest.approx(times[found.choice.config], rel=0.05)
        assert times[found.choice.config] <= 1.05 * min(times.values())


def test_weights_whose_rows_are_aligned_alike_are_nearer(tmp_path):
    weights = [(4096, k) for k in (4000, 4016, 4112, 4128)]
    found = find(small.bake_samples(tmp_path, samples((*WEIGHTS, *weights))), m=16, n=4096, k=4080)
    assert found.modelled_from.k == 4112, "an odd multiple of 16 bytes, as 4016 and 4080 are, and 4096 is not"


def test_measured_problem_is_not_estimated(tmp_path):
    # Everything near says that BIG is the fastest, but not what was measured at the very problem.
    key = small.key(m=128, n=4096, k=4096)
    taken = [
        replace(one, median_us=one.median_us * (0.5 if one.config == BIG and one.key != key else 2.0))
        for one in samples()
    ]
    found = find(small.bake_samples(tmp_path, taken), m=128, n=4096, k=4096)
    measured = {one.config: one.median_us for one in taken if one.key == key}
    assert found.is_exact and found.choice.interval_us is None
    assert found.choice.median_us == measured[found.choice.config]
    assert found.choice.median_us <= 1.03 * min(measured.values())


def test_what_was_measured_here_counts_beside_more_that_was_measured_on_another_device(baked, tmp_path):
    """Else the nearest of few measurements would answer for every shape."""
    far = [
        small.sample(config, 1.2 * true_us(config, m, 512, 512), m=m, n=512, k=512)
        for m in M_VALUES
        for config in near_enough(m)
    ]
    own = small.bake_samples(tmp_path, far, device=small.H100)
    for m, n, k in BETWEEN:
        there = find(baked, m=m, n=n, k=k, device=small.H100)
        both = find(own, baked, m=m, n=n, k=k, device=small.H100)
        assert both.choice.config == there.choice.config
        assert (both.source, both.grade) == ("source 0", "other device"), "most is of the other"
        assert both.num_of_other_device > both.num_modelled_from / 2
        assert both.choice.median_us == pytest.approx(1.2 * there.choice.median_us, rel=0.02), "in this device's scale"
    # Where this device was measured itself, that decides.
    m, n, k = 40, 5120, 5120
    other = next(config for config in (TINY, SMALL) if config != find(baked, m=m, n=n, k=k).choice.config)
    near = [
        small.sample(config, true_us(config, at, n, k) * (0.5 if config == other else 1.0), m=at, n=n, k=k)
        for at in (32, 48)
        for config in TRUTH
    ]
    own = small.bake_samples(tmp_path / "near", far + near, device=small.H100)
    assert find(own, baked, m=m, n=n, k=k, device=small.H100).choice.config == other
    # A device with more measurements of its own asks no other.
    assert find(baked, own, m=m, n=n, k=k).entry == find(baked, m=m, n=n, k=k).entry


def test_two_devices_of_one_table_are_told_in_the_models_of_one(baked, tmp_path):
    few = [replace(one, median_us=1.3 * one.median_us, run="h100") for one in samples(WEIGHTS[:8], (1, 2048))]
    h200 = small.write_device(tmp_path / "h200", samples())
    h100 = small.write_device(tmp_path / "h100", few, small.H100, [small.run("h100", small.H100)], aliases=("h100",))
    both = table_file.decode(bake("scaled_mm", [*h200, *h100], small.manifest()), "both", "scaled_mm")
    num_mixed = 0
    for m, n, k in BETWEEN:
        found, here = find(both, m=m, n=n, k=k, device=small.H100), find(both, m=m, n=n, k=k).choice
        assert found.choice.median_us == pytest.approx(1.3 * true_us(found.choice.config, m, n, k), rel=0.02)
        assert here.median_us == pytest.approx(true_us(here.config, m, n, k), rel=0.02)
        if found.num_of_other_device:
            num_mixed += 1
            widths = [high / low for low, high in (found.choice.interval_us, here.interval_us)]
            assert widths[0] > widths[1]
    assert num_mixed > len(BETWEEN) / 4


def test_two_other_devices_are_not_mixed(baked, tmp_path):
    h20 = replace(small.H200, name="NVIDIA H20", num_sms=78)
    other = small.bake_samples(tmp_path, [replace(one, median_us=one.median_us * 3) for one in samples()], device=h20)
    alone = find(baked, m=24, n=5120, k=5120, device=small.H100)
    assert alone.grade == "other device" and alone.num_modelled_from == nearest.MOST_PROBLEMS
    for tables in ((baked, other), (other, baked)):
        found = find(*tables, m=24, n=5120, k=5120, device=small.H100)
        assert found.place.device.fingerprint == small.H200
        assert found.entry == alone.entry


def test_stale_measurement_lowers_the_grade_of_what_is_modelled_from_it(tmp_path):
    taken = [replace(one, kernel_sha256="0" * 64) if one.config != small.VENDOR else one for one in samples()]
    found = find(small.bake_samples(tmp_path, taken), m=24, n=5120, k=5120)
    assert found.choice.config != small.VENDOR
    assert (found.choice.is_stale, found.grade) == (True, "stale kernel")


def test_explain_says_what_was_modelled_and_from_what(baked, tmp_path, monkeypatch):
    import stoneware as sw

    files = small.write_device(tmp_path / "samples", samples())
    small.install(tmp_path, {"scaled_mm": bake("scaled_mm", files, small.manifest())}, monkeypatch)
    explanation = sw.explain("scaled_mm", m=48, n=5120, k=7168, device="H200")
    assert (explanation.layer, explanation.grade) == ("nearest shape", "nearest shape")
    reason = explanation.decision.reason
    low, high = explanation.decision.chosen.interval_us
    between = (
        f", between {low:.2f} and {high:.2f} with 90 %; from {nearest.MOST_PROBLEMS} measured problems, the nearest m="
    )
    assert f" us modelled for NVIDIA H200{between}" in reason
    assert f"({low:.2f} to {high:.2f})" in str(explanation)
    number = 1 + len(explanation.decision.runners_up)
    assert number > 1 and reason.endswith(f"; the least expected time of {number} as modelled")
    assert explanation.run is None, "no run measured it"
    plain = json.loads(json.dumps(explanation.as_dict()))
    assert plain["chosen"]["run"] == MODELLED_RUN
    assert plain["chosen"]["is_modelled"]
    for one in (plain["chosen"], *plain["runners_up"]):
        assert one["interval_us"][0] < one["median_us"] < one["interval_us"][1]


def test_samples_give_the_same_table_in_any_order(tmp_path):
    taken = samples()
    random.Random(1).shuffle(taken)
    files = [small.write_device(tmp_path / name, some) for name, some in (("a", samples()), ("b", taken))]
    first, second = (bake("scaled_mm", some, small.manifest()) for some in files)
    assert first == second
