"""What measurements of another device tell where this one has fewer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_package as small
from known_times import BETWEEN, M_VALUES, SMALL, TINY, TRUTH, WEIGHTS, find, near_enough, samples, true_us

from stoneware.tuning import nearest, table_file
from stoneware.tuning.bake import bake
from stoneware.tuning.entries import make_table


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    return small.bake_samples(tmp_path_factory.mktemp("samples"), samples())


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
    of_h100, of_h200 = (both.near(device)[0][0][1].block(small.key().family) for device in (small.H100, small.H200))
    assert of_h100.models == of_h200.models and of_h100.models_names == of_h200.models_names
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


def test_a_store_of_a_device_that_the_wheel_lacks_is_told_in_the_models_of_another(baked):
    def block(taken):
        run = small.run("h100", small.H100)
        slower = [(run, replace(one, median_us=1.3 * one.median_us, run=run.id)) for one in taken]
        return make_table("scaled_mm", slower, small.manifest(), known=baked).devices[0].block(small.key().family)

    of_wheel = baked.devices[0].block(small.key().family)
    assert block(samples(((5120, 5120),), (16, 32))).models_names == of_wheel.models_names
    assert block(samples()).models_names != of_wheel.models_names, "as much was measured here"


def test_two_other_devices_are_not_mixed(baked, tmp_path):
    h20 = replace(small.H200, name="NVIDIA H20", num_sms=78)
    other = small.bake_samples(tmp_path, [replace(one, median_us=one.median_us * 3) for one in samples()], device=h20)
    alone = find(baked, m=24, n=5120, k=5120, device=small.H100)
    assert alone.grade == "other device" and alone.num_modelled_from == nearest.MOST_PROBLEMS
    for tables in ((baked, other), (other, baked)):
        found = find(*tables, m=24, n=5120, k=5120, device=small.H100)
        assert found.place.device.fingerprint == small.H200
        assert found.entry == alone.entry
