"""Families: what was measured with other scales or dtypes of the same widths counts too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_package as small
from known_times import BETWEEN, BIG, M_VALUES, SMALL, TRUTH, WEIGHTS, find, near_enough, samples, true_us

from stoneware.kernels.config import Config
from stoneware.kernels.key import Key
from stoneware.kernels.manifest import KernelRecord, Manifest, tile_of
from stoneware.tuning import lookup, table_file
from stoneware.tuning.bake import bake
from stoneware.tuning.choose import is_vendor
from stoneware.tuning.entries import bake_samples
from stoneware.tuning.sources import Source

ROW, TENSOR = (small.key(scales=scales).kind for scales in ("row", "tensor"))


def us(config, m, n, k, scales="tensor"):
    """SMALL is faster at large n than any model predicts; the vendor library has other kernels for tensor
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


def test_keys_of_one_family_have_the_same_widths_and_class_of_scales():
    assert ROW.family == TENSOR.family == small.key(out_dtype="fp16", m=3).family == small.key(a_dtype="e5m2").family
    others = {"scales": "block"}, {"out_dtype": "fp32"}, {"a_dtype": "bf16"}, {"layout": "nn"}, {"accumulation": "slow"}
    assert len({ROW.family, *(small.key(**changes).family for changes in others)}) == 6


def test_kinds_of_one_family_share_the_models_of_our_kernels(baked):
    row, tensor = (baked.devices[0].block(kind) for kind in (ROW, TENSOR))
    vendors = [
        models.keys() - both for models in (row.models, tensor.models) if (both := row.models.keys() & tensor.models)
    ]
    assert [[config.kernel for config in some] for some in vendors] == [
        ["torch._scaled_mm:row"],
        ["torch._scaled_mm:tensor"],
    ]
    assert {config.kernel for config in row.models.keys() & tensor.models} == {tile_of(one.kernel) for one in TRUTH} - {
        "torch._scaled_mm"
    }
    for config in row.models.keys() & tensor.models:
        assert tensor.models[config] == row.models[config]


def test_measurements_with_other_scales_choose_better_than_few_with_ones_own(baked, tmp_path):
    alone = small.bake_samples(tmp_path, taken("tensor", FEW, (1, 16, 2048)))
    num_wrong = {"both": 0, "alone": 0}
    problems = [problem for problem in BETWEEN if problem[1] > LARGE_N]
    for m, n, k in problems:
        times = {config: us(config, m, n, k) for config in near_enough(m)}
        for name, table in (("both", baked), ("alone", alone)):
            found = find(table, m=m, n=n, k=k, scales="tensor")
            num_wrong[name] += times[found.choice.config] > 1.1 * min(times.values())
            assert found.modelled_from.scales == "tensor", "the nearest with the same scales"
            for one in found.entry.choices:
                if is_vendor(one.config):
                    assert one.median_us == pytest.approx(us(one.config, m, n, k), rel=0.1), (
                        "none with the other scales"
                    )
    assert num_wrong["alone"] > len(problems) / 3
    assert num_wrong["both"] < num_wrong["alone"] / 4


def test_other_scales_do_not_answer_where_the_nearest_choice_with_ones_own_has_no_model(tmp_path):
    """The vendor library's: none of ours can be chosen over a time that is not known."""
    row = taken("row", WEIGHTS)
    assert find(small.bake_samples(tmp_path / "none", row), m=24, n=5120, k=5120, scales="tensor") is None
    [vendors] = [
        replace(one, median_us=0.5) for one in taken("tensor", ((5120, 5120),), (16,)) if is_vendor(one.config)
    ]
    ours = taken("tensor", FEW, (1, 16, 2048))
    table = small.bake_samples(tmp_path / "one", [*row, vendors, *(one for one in ours if not is_vendor(one.config))])
    for excludes_split_k in (False, True):
        key = small.key(m=24, n=5120, k=5120, scales="tensor")
        found = next(
            lookup.answers(
                key, small.H200, [Source("source", table)], kernels=small.manifest(), excludes_split_k=excludes_split_k
            )
        )
        assert (found.choice.config, found.modelled_from) == (vendors.config, None)


def test_a_problem_with_other_scales_whose_fastest_has_no_model_takes_away_no_estimate(tmp_path):
    own = [*taken("row", WEIGHTS), *taken("tensor", FEW)]
    swizzled = replace(BIG, max_swizzle=8)
    near = small.sample(swizzled, 1.0, m=64, n=5120, k=5120)
    tables = [small.bake_samples(tmp_path / name, some) for name, some in (("a", own), ("b", [*own, near]))]
    with_it, without = (find(table, m=64, n=5120, k=5200, scales="tensor") for table in tables)
    assert with_it.num_modelled_from and without.num_modelled_from


def test_a_store_has_the_models_of_the_wheels_family(baked):
    run = small.run()
    own = [(run, one) for one in taken("tensor", ((5120, 5120),), (16, 32))]
    more = [(run, one) for one in taken("row", WEIGHTS)]
    of_wheel = baked.devices[0].block(TENSOR)
    for some in (own, own + more):
        data = bake_samples("scaled_mm", some, small.manifest(), wheel=baked)
        block = table_file.decode(data, "scaled_mm.table", "scaled_mm").devices[0].block(TENSOR)
        assert of_wheel.models.items() <= block.models.items()


def test_other_scales_of_another_device_than_ones_own_problems_do_not_count(tmp_path):
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
        assert (found.place.device.fingerprint, found.num_of_other_scales) == (h20, 0)
        times.append(found.choice.median_us)
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_the_reason_says_how_many_have_other_scales(baked):
    found = find(baked, m=64, n=8192, k=8192, scales="tensor")
    assert 0 < found.num_of_other_scales < found.num_modelled_from
    reason = lookup.decision(found).reason
    assert f"{found.num_modelled_from} measured problems, {found.num_of_other_scales} of them with row scales" in reason


def test_another_dtype_of_the_same_width_is_modelled_with_its_own_kernels(baked):
    for scales in ("row", "tensor"):
        found, measured = (find(baked, m=24, n=5120, k=7168, out_dtype=out, scales=scales) for out in ("fp16", "bf16"))
        assert found.choice.config.kernel == measured.choice.config.kernel.replace("_bf16_", "_fp16_")
        assert found.modelled_from == measured.modelled_from and found.modelled_from.out_dtype == "bf16"
        assert "measured with e4m3*e4m3->bf16, e4m3*e4m3->fp16 asked" in lookup.decision(found).reason


def _matmul_kernel(dtype, tile):
    config = {"a": dtype, "b": dtype, "out": dtype, "layout": "nt", "tile": tile}
    name = f"matmul_{dtype}_{tile[1]}"
    return KernelRecord(id=name, op="matmul", backend="sm90", arch="sm_90a", sha256=small.sha256(name), config=config)


LARGE_TILE, SMALL_TILE = [64, 128, 64], [64, 16, 64]


def _answer(tmp_path, tiles, measured, asked):
    """The first answer for a matmul of the dtype `asked`, where that of `measured` was raced: with the largest tile
    in 10 us, each smaller one and torch in 5 more. `tiles` are those of each dtype."""
    kernels = [_matmul_kernel(dtype, tile) for dtype, some in tiles.items() for tile in some]
    manifest = Manifest({kernel.id: kernel for kernel in kernels})
    key, other = (
        Key(op="matmul", a_dtype=dtype, b_dtype=dtype, out_dtype=dtype, scales="none", layout="nt", n=64, k=64, m=8)
        for dtype in (measured, asked)
    )
    configs = [Config(backend="sm90", kernel=one.id) for one in kernels if one.config["a"] == measured]
    configs.append(Config(backend="vendor", kernel="torch.mm"))
    raced = [small.sample(config, 10.0 + 5 * at, key=key) for at, config in enumerate(configs)]
    data = bake("matmul", small.write_device(tmp_path, raced, name="matmul.jsonl"), manifest)
    table = table_file.decode(data, "matmul.table", "matmul")
    return lookup.find(other, small.H200, [Source("wheel", table)], kernels=manifest)


def test_a_tile_without_a_kernel_for_the_dtypes_is_no_candidate(tmp_path):
    found = _answer(tmp_path, {"bf16": [LARGE_TILE, SMALL_TILE], "fp16": [SMALL_TILE]}, "bf16", "fp16")
    assert found.grade == "exact" and found.entry.key.a_dtype == "bf16"
    assert [(choice.config.kernel, choice.median_us) for choice in found.entry.choices] == [
        ("matmul_fp16_16", 15.0),
        ("torch.mm", 20.0),
    ]


def test_a_race_without_a_tile_of_the_dtypes_does_not_decide(tmp_path):
    assert _answer(tmp_path, {"bf16": [LARGE_TILE, SMALL_TILE], "fp16": [SMALL_TILE]}, "fp16", "bf16") is None


def test_dtypes_without_a_kernel_of_ours_run_the_vendor_library(tmp_path):
    found = _answer(tmp_path, {"bf16": [LARGE_TILE, SMALL_TILE]}, "bf16", "fp16")
    assert [choice.config.kernel for choice in found.entry.choices] == ["torch.mm"]
