"""Times of our kernels with row scales are used for tensor scales, and the reverse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_package as small
from known_times import BETWEEN, BIG, M_VALUES, SMALL, TRUTH, WEIGHTS, find, near_enough, samples, true_us

from stoneware.tuning import lookup, table_file
from stoneware.tuning.bake import bake
from stoneware.tuning.choose import is_vendor
from stoneware.tuning.entries import make_table
from stoneware.tuning.sources import Source

ROW, TENSOR = (small.key(scales=scales).family for scales in ("row", "tensor"))


def us(config, m, n, k, scales="tensor"):
    """SMALL is fast at large n, which no model predicts; the vendor library has other kernels for tensor
    scales, twice as slow."""
    surprise = 0.4 if config == SMALL and n > LARGE_N else 1.0
    return true_us(config, m, n, k) * surprise * (2 if is_vendor(config) and scales == "tensor" else 1)


def taken(scales, weights, m_values=M_VALUES):
    return [
        replace(
            one, key=replace(one.key, scales=scales), median_us=us(one.config, one.key.m, one.key.n, one.key.k, scales)
        )
        for one in samples(weights, m_values)
    ]


LARGE_N = 5000
FEW = [*(weight for weight in WEIGHTS if weight[0] < LARGE_N), (3072, 3072), (2560, 5120)]


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    return small.bake_samples(folder, [*taken("row", WEIGHTS), *taken("tensor", FEW, (1, 16, 2048))])


def test_only_keys_with_row_or_tensor_scales_have_kin():
    assert (ROW.kin, TENSOR.kin) == (TENSOR, ROW)
    assert small.key(scales="block").kin is None and small.key(op="matmul", scales="none").kin is None


def test_our_kernels_are_told_in_the_models_of_the_kin_that_was_measured_more(baked):
    row, tensor = (baked.devices[0].block(family) for family in (ROW, TENSOR))
    assert tensor.models_names[0] == row.models_names[0] and tensor.models_names[1] != row.models_names[1]
    for config in tensor.models:
        assert (tensor.models[config] == row.models[config]) == (not is_vendor(config))


def test_more_measurements_of_the_kin_choose_better_than_few_of_ones_own(baked, tmp_path):
    alone = small.bake_samples(tmp_path, taken("tensor", FEW, (1, 16, 2048)))
    num_wrong = {"both": 0, "alone": 0}
    problems = [problem for problem in BETWEEN if problem[1] > LARGE_N]
    for m, n, k in problems:
        times = {config: us(config, m, n, k) for config in near_enough(m)}
        for name, table in (("both", baked), ("alone", alone)):
            found = find(table, m=m, n=n, k=k, scales="tensor")
            num_wrong[name] += times[found.choice.config] > 1.1 * min(times.values())
            assert found.modelled_from.scales == "tensor", "the nearest of one's own"
            for one in found.entry.choices:
                if is_vendor(one.config):
                    assert one.median_us == pytest.approx(us(one.config, m, n, k), rel=0.1), "none of the kin's"
    assert num_wrong["alone"] > len(problems) / 3
    assert num_wrong["both"] < num_wrong["alone"] / 4


def test_kin_do_not_answer_where_the_nearest_of_ones_own_is_a_config_without_a_model(tmp_path):
    """The vendor library's: none of ours can be chosen over a time that is not known."""
    row = taken("row", WEIGHTS)
    assert find(small.bake_samples(tmp_path / "none", row), m=24, n=5120, k=5120, scales="tensor") is None
    [vendors] = [
        replace(one, median_us=0.5) for one in taken("tensor", ((5120, 5120),), (16,)) if is_vendor(one.config)
    ]
    ours = taken("tensor", FEW, (1, 16, 2048))
    table = small.bake_samples(tmp_path / "one", [*row, vendors, *(one for one in ours if not is_vendor(one.config))])
    for has_one_order in (False, True):
        key = small.key(m=24, n=5120, k=5120, scales="tensor")
        found = next(lookup.answers(key, small.H200, [Source("source", table)], has_one_order=has_one_order))
        assert (found.choice.config, found.modelled_from) == (vendors.config, None)


def test_a_kins_problem_whose_fastest_has_no_model_takes_away_no_estimate(tmp_path):
    own = [*taken("row", WEIGHTS), *taken("tensor", FEW)]
    swizzled = replace(BIG, max_swizzle=8)
    near = small.sample(swizzled, 1.0, m=64, n=5120, k=5120)
    tables = [small.bake_samples(tmp_path / name, some) for name, some in (("a", own), ("b", [*own, near]))]
    with_it, without = (find(table, m=64, n=5120, k=5200, scales="tensor") for table in tables)
    assert with_it.num_modelled_from and without.num_modelled_from


def test_a_store_of_one_kind_of_scales_is_told_in_its_own_familys_models(baked):
    """The wheel's models, even if the store has more of the other kind of scales."""
    run = small.run()
    own = [(run, one) for one in taken("tensor", ((5120, 5120),), (16, 32))]
    more = [(run, one) for one in taken("row", WEIGHTS)]
    of_wheel = baked.devices[0].block(TENSOR)
    for some in (own, own + more):
        made = make_table("scaled_mm", some, small.manifest(), known=baked).devices[0].block(TENSOR)
        assert made.models_names == of_wheel.models_names
        assert made.models == of_wheel.models and made.models.keys() == TRUTH.keys()


def test_kin_of_another_device_than_ones_own_problems_do_not_count(tmp_path):
    h20 = replace(small.H200, name="NVIDIA H20", num_sms=78)
    times = []
    for factor in (1, 5):
        row = [replace(one, median_us=factor * one.median_us) for one in taken("row", WEIGHTS)]
        folder = tmp_path / str(factor)
        files = small.write_device(folder / "h200", row)
        tensor = [replace(one, run="h20") for one in taken("tensor", WEIGHTS)]
        files += small.write_device(folder / "h20", tensor, h20, [small.run("h20", h20)], aliases=("h20",))
        both = table_file.decode(bake("scaled_mm", files, small.manifest()), "both", "scaled_mm")
        found = find(both, m=48, n=5120, k=7168, device=small.H100, scales="tensor")
        assert (found.place.device.fingerprint, found.num_of_kin) == (h20, 0)
        times.append(found.choice.median_us)
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_the_reason_says_how_many_are_of_the_kin_and_which_is_ones_own_nearest(baked):
    found = find(baked, m=64, n=8192, k=8192, scales="tensor")
    assert 0 < found.num_of_kin < found.num_modelled_from
    reason = lookup.decision(found).reason
    assert f"{found.num_modelled_from} measured problems, {found.num_of_kin} with row scales, its own nearest" in reason
