"""What our kernels took with other scales tells of the same kernels: row and tensor scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_package as small
from known_times import BETWEEN, M_VALUES, SMALL, TRUTH, WEIGHTS, find, near_enough, samples, true_us

from stoneware.tuning.choose import is_vendor
from stoneware.tuning.entries import make_table

ROW, TENSOR = (small.key(scales=scales).family for scales in ("row", "tensor"))


def us(config, m, n, k, scales="tensor"):
    """SMALL has it easy at large n, which no model tells; the vendor library has other kernels for tensor
    scales, twice as slow."""
    surprise = 0.4 if config == SMALL and n > LARGE_N else 1.0
    return true_us(config, m, n, k) * surprise * (2 if is_vendor(config) and scales == "tensor" else 1)


def taken(scales, weights, m_values=M_VALUES):
    return [
        replace(
            one,
            key=replace(one.key, scales=scales),
            median_us=us(one.config, one.key.m, one.key.n, one.key.k, scales),
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
    assert tensor.models_name == row.models_name
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


def test_kin_alone_answers_nothing(tmp_path):
    """Without a time of the vendor library none of ours can be chosen over it."""
    row = small.bake_samples(tmp_path, taken("row", WEIGHTS))
    assert find(row, m=24, n=5120, k=5120, scales="tensor") is None


def test_a_store_of_one_kind_of_scales_is_told_in_its_own_familys_models(baked):
    run = small.run()
    own = [(run, one) for one in taken("tensor", ((5120, 5120),), (16, 32))]
    made = make_table("scaled_mm", own, small.manifest(), known=baked).devices[0].block(TENSOR)
    of_wheel = baked.devices[0].block(TENSOR)
    assert made.models_name == of_wheel.models_name
    assert made.models == of_wheel.models and made.models.keys() == TRUTH.keys()
