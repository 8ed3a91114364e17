"""What measurements of another device decide where this one has fewer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_package as small
from known_times import BETWEEN, BIG, M_VALUES, SMALL, TINY, TRUTH, WEIGHTS, find, near_enough, samples, true_us

from stoneware.tuning import nearest, table_file
from stoneware.tuning.bake import bake


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    return small.bake_samples(tmp_path_factory.mktemp("samples"), samples())


def test_the_device_with_more_and_nearer_problems_answers(baked, tmp_path):
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
        assert (both.entry, both.source, both.grade) == (there.entry, "source 1", "other device")
    # Where this device was measured itself, that decides.
    m, n, k = 40, 5120, 5120
    other = next(config for config in (TINY, SMALL) if config != find(baked, m=m, n=n, k=k).choice.config)
    near = [
        small.sample(config, true_us(config, at, n, k) * (0.5 if config == other else 1.0), m=at, n=n, k=k)
        for at in (32, 48)
        for config in TRUTH
    ]
    own = small.bake_samples(tmp_path / "near", far + near, device=small.H100)
    here = find(own, baked, m=m, n=n, k=k, device=small.H100)
    assert (here.choice.config, here.source, here.grade) == (other, "source 0", "nearest m")
    # A device with more measurements of its own asks no other.
    assert find(baked, own, m=m, n=n, k=k).entry == find(baked, m=m, n=n, k=k).entry


def test_a_problem_measured_on_another_device_comes_before_a_modelled_one_there(baked, tmp_path):
    few = [small.sample(BIG, 1.0, m=1, n=512, k=512)]
    own = small.bake_samples(tmp_path, few, device=small.H100)
    found = find(own, baked, m=32, n=4096, k=4096, device=small.H100)
    assert (found.step, found.grade, found.modelled_from) == ("exact", "other device", None)


def test_two_devices_of_one_table_have_models_of_their_own(tmp_path):
    few = [replace(one, median_us=1.3 * one.median_us, run="h100") for one in samples(WEIGHTS[:8], (1, 2048))]
    h200 = small.write_device(tmp_path / "h200", samples())
    h100 = small.write_device(tmp_path / "h100", few, small.H100, [small.run("h100", small.H100)], aliases=("h100",))
    both = table_file.decode(bake("scaled_mm", [*h200, *h100], small.manifest()), "both", "scaled_mm")
    of_h100, of_h200 = (both.near(device)[0][0][1].block(small.key().kind) for device in (small.H100, small.H200))
    assert of_h100.models.keys() == of_h200.models.keys() and of_h100.models != of_h200.models
    for m, n, k in BETWEEN:
        here = find(both, m=m, n=n, k=k).choice
        assert here.median_us == pytest.approx(true_us(here.config, m, n, k), rel=0.02)


def test_two_other_devices_are_not_mixed(baked, tmp_path):
    h20 = replace(small.H200, name="NVIDIA H20", num_sms=78)
    other = small.bake_samples(tmp_path, [replace(one, median_us=one.median_us * 3) for one in samples()], device=h20)
    alone = find(baked, m=24, n=5120, k=5120, device=small.H100)
    assert alone.grade == "other device" and alone.num_modelled_from == nearest.MOST_PROBLEMS
    for tables in ((baked, other), (other, baked)):
        found = find(*tables, m=24, n=5120, k=5120, device=small.H100)
        assert found.place.device.fingerprint == small.H200
        assert found.entry == alone.entry
