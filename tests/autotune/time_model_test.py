"""Modelled times: the fit, what a table keeps of it, and what a look-up makes of it at shapes that
were not measured."""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import weakref
from dataclasses import replace

import pytest
import small_package as small
from known_times import (
    BETWEEN,
    BIG,
    CONFIGS,
    M_VALUES,
    SMALL,
    TINY,
    TRUTH,
    WEIGHTS,
    candidate_of,
    find,
    near_enough,
    samples,
    true_us,
)

from stoneware.kernels import candidate
from stoneware.kernels.manifest import Manifest
from stoneware.measuring.grouped_mm_operands import ragged
from stoneware.tuning import lookup, nearest, table_file, time_fit
from stoneware.tuning.bake import bake
from stoneware.tuning.entries import bake_samples
from stoneware.tuning.sources import Source
from stoneware.tuning.table_entry import MODELLED_RUN, Choice, Entry
from stoneware.tuning.time_model import ALONG_K, ALONG_N, Corrections, corrections_of, estimates


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    return small.bake_samples(tmp_path_factory.mktemp("samples"), samples())


def models_of(taken, num_groups=0, kernels=small.manifest(), num_sms=132, scales="row"):
    entries = [
        Entry(
            key=sample.key,
            rule="",
            choices=(Choice(config=sample.config, median_us=sample.median_us, spread_us=0.0, run="run-1"),),
        )
        for sample in taken
    ]
    key = replace(small.key(scales=scales), num_groups=num_groups)
    models = time_fit.models(entries, kernels, num_sms).get(key.family, {})
    found = {sample.config: models.get(candidate.candidate_of(sample.config, key)) for sample in taken}
    return {config: model for config, model in found.items() if model is not None}


@pytest.mark.parametrize("config", TRUTH)
def test_fit_finds_the_times_and_the_blocks_at_once_of_a_kernel(config):
    model = models_of(samples(configs=[config]))[config]
    assert model.slots == TRUTH[config].slots
    for m, n, k in BETWEEN:
        assert model.at(m, n, k)[0] == pytest.approx(true_us(config, m, n, k), rel=1e-3)


def test_a_block_takes_at_least_what_its_tensor_cores_need():
    """Measured with full waves alone, a kernel's time is as well that of all work, divided by all SMs. Then a few tiles
    with a long k would seem to take next to no time."""
    tile, all_work = 128 * 128 * 128, TRUTH[BIG]._replace(launch_us=4.0, wave_us=0.0, step_us=0.0, work_us=0.003)
    full = [(7680, 2048), (7680, 4096), (7680, 8192), (15360, 2048), (15360, 4096), (15360, 8192)]  # 60 tiles along n
    taken = [
        replace(one, median_us=all_work.at(one.key.m, one.key.n, one.key.k)[0])
        for one in samples(weights=full, m_values=(2048, 4096, 8192), configs=[BIG])
    ]
    found = models_of(taken)[BIG]
    for sample in taken:
        assert found.at(sample.key.m, sample.key.n, sample.key.k)[0] == pytest.approx(sample.median_us, rel=0.02)
    one_sm = 4096 * 1980.0  # products of fp8 in a microsecond
    assert all_work.at(256, 256, 65536)[0] < 65536 / 128 * tile / one_sm < found.at(256, 256, 65536)[0]


def test_kernels_with_clusters_of_a_size_have_as_many_of_them_at_once():
    """Of four blocks an H200 runs 30, on 120 of its SMs. The small kernel was measured with fewer alone."""
    truth = {
        BIG: TRUTH[BIG]._replace(cluster_m=4, slots=120),
        SMALL: TRUTH[SMALL]._replace(cluster_n=4, slots=120),  # its operands are swapped
    }
    kernels = Manifest(
        {record.id: replace(record, config=record.config | {"cluster": [4, 1, 1]}) for record in small.kernel_records()}
    )
    few = [(2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (6144, 4096), (6144, 8192)]
    taken = [
        replace(one, median_us=truth[one.config].at(one.key.m, one.key.n, one.key.k)[0])
        for one in [*samples(configs=[BIG]), *samples(weights=few, m_values=(16, 48), configs=[SMALL])]
    ]
    assert max(truth[SMALL].counts(48, n, k)[0] for n, k in few) == 1, "all clusters at once"
    assert {config: model.slots for config, model in models_of(taken, kernels=kernels).items()} == {
        BIG: 120,
        SMALL: 120,
    }
    # A slice of a GPU may have fewer SMs than a cluster has blocks.
    for num_sms in (3, 5):
        slots = {model.slots for model in models_of(taken, kernels=kernels, num_sms=num_sms).values()}
        assert slots and slots <= {4, 8, 12, 16}


def test_swizzled_tiles_are_rounded_up_as_the_tile_scheduler_does():
    model = TRUTH[BIG]._replace(cluster_m=1, max_swizzle=8)
    # 9 x 5 tiles: five of the shorter side are four at a time, so 12 x 8 blocks are launched.
    waves, _, work, unfilled, *_, fullness = model.counts(9 * 128, 5 * 128, 128)
    assert (waves, work, fullness) == (1, 96, 96 / 120)
    assert unfilled == 1 - 9 / 12
    assert model._replace(max_swizzle=1).counts(9 * 128, 5 * 128, 128)[2] == 45


def test_where_m_is_taken_in_whole_units_another_product_computes_the_last_rows():
    """As torch's with block scales, m in fours."""
    m_values = (16, 64, 300, 1022, 1024, 1027, 2048, 2049, 4095, 8192)
    truth = TRUTH[small.VENDOR]._replace(m_unit=4, part_us=5.0)
    us, last_us = (truth.at(m, 4096, 4096)[0] for m in (1024, 4))
    assert truth.at(1027, 4096, 4096) == (pytest.approx(us + last_us + 5), truth.at(1024, 4096, 4096)[1])
    taken = [
        replace(one, key=replace(one.key, scales="block"), median_us=truth.at(one.key.m, one.key.n, one.key.k)[0])
        for one in samples(m_values=m_values, configs=[small.VENDOR])
    ]
    model = models_of(taken, scales="block")[small.VENDOR]
    for m, n, k in [*BETWEEN, *((m + 1, n, k) for m, n, k in BETWEEN)]:
        assert model.at(m, n, k)[0] == pytest.approx(truth.at(m, n, k)[0], rel=1e-3)
    of_rows = [replace(one, key=replace(one.key, scales="row")) for one in taken]
    assert models_of(of_rows)[small.VENDOR].m_unit == 1


def test_a_row_of_b_may_have_all_k_or_all_n():
    model = TRUTH[BIG]._replace(a_bytes=2, b_bytes=2)
    for rows_along, (n, k) in ((ALONG_K, (4096, 4104)), (ALONG_N, (4104, 4096))):
        along = model._replace(rows_along=rows_along)
        *_, crossing, _ = along.counts(512, n, k)
        assert crossing == 1 - 16 / 128  # rows begin at multiples of 16 bytes
        *_, crossing, _ = along.counts(512, k, n)
        assert crossing == 0


@pytest.mark.parametrize("rows", [16, 64, 128, 256])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 40, 64, 100, 128, 192, 300, 1000])
def test_groups_have_as_many_tiles_in_the_mean_as_those_that_are_measured(m, rows):
    num_groups = 512
    counts = ragged(m * num_groups, num_groups)
    model = TRUTH[BIG]._replace(tile_m=rows, tile_k=4096, cluster_m=1, slots=1)
    _, _, tiles, *_ = model.counts(m, model.tile_n, 4096, num_groups)
    assert tiles == pytest.approx(sum(-(-count // rows) for count in counts), rel=0.06)
    *_, num_bytes, _, _ = model.counts(m, 4096, 4096, num_groups)
    with_rows = sum(count > 0 for count in counts)
    assert num_bytes == pytest.approx(with_rows * 4096 * 4096 + m * num_groups * 3 * 4096, rel=0.03)


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
    block = baked.devices[0].block(small.key().kind)
    fitted = time_fit.models(baked.devices[0].entries(), small.manifest(), 132)[small.key().family]
    assert block.models == fitted
    assert len(fitted) == 4
    for m in (16, 512):
        sizes = (4096, 4096, m)
        read = block.corrections(sizes)
        for (at, is_stale, *read_factors), (tile, *stale, ratio, fullness) in zip(
            read.corrections, corrections_of(block.entry(sizes), fitted), strict=True
        ):
            assert (*read.candidates[at], is_stale) == (tile, fitted[tile], *stale)
            assert read_factors == pytest.approx([ratio, fullness], rel=1e-3), "half precision"


def test_corrections_leave_out_what_was_slow():
    entry = Entry(
        key=small.key(),
        rule="",
        choices=tuple(
            Choice(config=config, median_us=us, spread_us=0.0, run="run-1", is_stale=us > 14)
            for config, us in ((BIG, 10.2), (TINY, 10.0), (SMALL, 30.0), (small.VENDOR, 30.1))
        ),
    )
    found = corrections_of(entry, {candidate_of(TINY): TRUTH[TINY]})
    assert [one[0] for one in found] == [candidate_of(BIG), candidate_of(TINY), candidate_of(SMALL)]
    assert [one[1] for one in found] == [False, False, True]
    assert found[0][2:] == found[2][2:] == (0.0, 0.0)
    us, fullness = TRUTH[TINY].at(16, 4096, 4096)
    assert found[1][2] == pytest.approx(10.0 / us, rel=1e-3)
    assert found[1][3] == pytest.approx(fullness, abs=1e-3)


def test_fastest_at_the_very_shape_is_chosen_where_the_nearest_entry_has_another(baked):
    worst, worst_of_nearest = 1.0, 1.0
    for m, n, k in BETWEEN:
        best_us = min(true_us(config, m, n, k) for config in near_enough(m))
        modelled, nearest = itertools.islice(
            lookup.answers(small.key(m=m, n=n, k=k), small.H200, [Source("wheel", baked)], kernels=small.manifest()), 2
        )
        assert (modelled.step, modelled.grade) == ("nearest shape", "nearest shape")
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
        assert (found.step, found.grade) == ("nearest m", "nearest m")
        assert (found.modelled_from.n, found.modelled_from.k) == (4096, 4096)
        best = min(near_enough(m), key=lambda config: true_us(config, m, 4096, 4096))
        assert found.choice.config == best
        assert found.choice.median_us == pytest.approx(true_us(best, m, 4096, 4096), rel=0.01)


def with_models(entry, models):
    candidates = {candidate: (candidate, model) for candidate, model in models.items()}
    return Corrections(candidates, corrections_of(entry, models))


def test_near_measurements_correct_the_model():
    off = {BIG: 1.3, TINY: 0.8, SMALL: 1.2, small.VENDOR: 0.9}
    near = [
        (
            apart,
            with_models(
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
                {candidate_of(config): model for config, model in TRUTH.items()},
            ),
        )
        for apart, n in ((0.01, 4096), (0.04, 4608))
    ]
    found = {one.config: one.us for one in estimates(64, 4352, 4096, near, CONFIGS)}
    assert found.keys() == off.keys()
    for config, us in found.items():
        assert us == pytest.approx(off[config] * true_us(config, 64, 4352, 4096), rel=1e-3)


def test_only_what_would_be_raced_is_estimated():
    """A tile of 16 rows at m = 200, if all tiles run at once."""
    candidates = {at: (candidate_of(config), model) for at, (config, model) in enumerate(TRUTH.items())}
    said = Corrections(candidates, [(at, 0, 1.0, 1.0) for at in range(len(TRUTH))])

    def configs(m, n, num_groups=0):
        return {one.config for one in estimates(m, n, 4096, [(0.1, said)], CONFIGS, num_groups)}

    assert configs(200, 128) == configs(128, 8192) == configs(200, 128, 5) == {BIG, TINY, SMALL, small.VENDOR}
    assert configs(200, 8192) == configs(200, 128, 6) == {BIG, SMALL, small.VENDOR}


def test_nearer_and_equally_full_measurements_count_for_more():
    model = TRUTH[SMALL]
    _, full = model.at(64, 4096, 4096)

    def us(*corrections):
        near = [
            (apart, Corrections({0: (candidate_of(SMALL), model)}, [(0, 0, ratio, fullness)]))
            for apart, ratio, fullness in corrections
        ]
        [found] = estimates(64, 4096, 4096, near, CONFIGS)
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
    assert find(baked, m=60, n=4224, k=4096).modelled_from == small.key(m=64), "other n and k: its own m may be far"


def own_table(taken, wheel=None):
    """The table of a user's store."""
    data = bake_samples("scaled_mm", [(small.run(), one) for one in taken], small.manifest(), wheel=wheel)
    return table_file.decode(data, "scaled_mm.table", "scaled_mm")


def test_own_measurements_of_few_weights_correct_the_models_of_the_wheel(baked):
    m, n, k = 40, 5120, 5120
    first = find(baked, m=m, n=n, k=k).choice.config
    # On this machine another one is the fastest there.
    other = next(config for config in (TINY, SMALL) if config != first)
    own = own_table(
        [
            small.sample(config, true_us(config, at, n, k) * (0.5 if config == other else 1.0), m=at, n=n, k=k)
            for at in (32, 48)
            for config in TRUTH
        ],
        wheel=baked,
    )
    found = find(own, baked, m=m, n=n, k=k)
    assert (found.choice.config, found.source) == (other, "source 0")
    assert (found.step, found.num_modelled_from) == ("nearest m", nearest.MOST_PROBLEMS)
    alone = find(own_table([small.sample(BIG, 1.0, m=32, n=n, k=k)]), m=m, n=n, k=k)
    assert alone.modelled_from is None, "no models at all"


def test_a_store_of_few_weights_has_the_models_of_the_wheel(baked):
    few = samples(((5120, 5120),), (16, 32))
    kind = small.key().kind
    of_wheel, own, alone = (
        table.devices[0].block(kind).models for table in (baked, own_table(few, wheel=baked), own_table(few))
    )
    assert (own, alone) == (of_wheel, {})


def test_what_a_look_up_keeps_goes_with_its_table(baked):
    """That of a store is made anew with each measurement."""
    own = own_table(samples(((5120, 5120),), (16, 32)), wheel=baked)
    assert find(own, baked, m=24, n=5120, k=5120).modelled_from
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None


def test_of_two_sources_with_the_same_problem_the_first_counts(baked):
    once, twice = (find(*tables, m=24, n=5120, k=5120) for tables in ([baked], [baked, baked]))
    assert twice.num_modelled_from == once.num_modelled_from == nearest.MOST_PROBLEMS
    assert twice.entry == once.entry
    assert (twice.source, once.source) == ("source 0", "source 0")


def test_a_near_weight_that_was_measured_at_a_far_m_does_not_keep_others_out(tmp_path):
    """Ten weights that are the nearest, each at one m of 4096, where TINY takes ten times as long as it
    does at the m of the look-up."""
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
    kernels = Manifest({one.id: replace(one, op="grouped_mm") for one in small.kernel_records()})
    data = bake_samples("grouped_mm", [(small.run(), one) for one in taken], kernels)
    table = table_file.decode(data, "grouped_mm.table", "grouped_mm")
    for m, groups in itertools.product((1, 24, 200), (8, 24, 60, 256)):
        key = small.key(m=m, n=5120, k=5120, num_groups=groups, **family)
        found = lookup.find(key, small.H200, [Source("wheel", table)], kernels=kernels)
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
    assert found.choice.median_us == float(f"{measured[found.choice.config]:.4g}")
    assert found.choice.median_us <= 1.03 * min(measured.values())


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
    assert (explanation.step, explanation.grade) == ("nearest shape", "nearest shape")
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
