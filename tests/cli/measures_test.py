"""What the report computes from samples: speed, roofline."""

from __future__ import annotations

import pytest
from small_samples import (
    GROUPED,
    GROUPED_VENDOR,
    H200,
    UNKNOWN_GPU,
    VENDOR,
    grouped_sample,
    kernel_sample,
    key,
    ours,
    run,
    sample,
)

from stoneware.report import measures
from stoneware.report.nominal import NOMINAL
from stoneware.tuning import entries

SMALL, BIG = ours("64x16x256"), ours("64x64x256")


def problems(samples):
    pairs = [(run(item.run), item) for item in samples]
    return measures.problems(entries.entries(pairs, None, (9, 0)))


def single_problem(samples):
    [problem] = problems(samples)
    return problem


def test_speedup_is_the_vendors_time_over_the_chosens():
    problem = single_problem([sample(SMALL, 10.0), sample(BIG, 14.0), sample(VENDOR, 16.0)])
    assert (problem.chosen.config, problem.chosen.median_us) == (SMALL, 10.0)
    assert problem.vendor.median_us == 16.0
    assert problem.speedup == 1.6


def test_speedup_is_unknown_without_the_vendor():
    assert single_problem([sample(SMALL, 10.0)]).speedup is None


def test_a_tie_goes_to_the_first_in_canonical_order():
    problem = single_problem([sample(SMALL, 10.2), sample(BIG, 10.0)])
    assert problem.chosen.config == SMALL
    assert min(problem.choices, key=lambda choice: choice.median_us).config == BIG


def test_roofline_counts_two_operations_and_each_operand_once():
    [point] = measures.roofline(problems([sample(SMALL, 10.0, m=16, n=32, k=64)]))
    num_operations = 2 * 16 * 32 * 64
    assert point.intensity == num_operations / (16 * 64 + 32 * 64 + 2 * 16 * 32)
    assert point.tflops == pytest.approx(num_operations / 10e-6 / 1e12)


def test_roofline_counts_every_group():
    [point] = measures.roofline(problems([grouped_sample(GROUPED, 100.0, m=16)]))
    num_operations = 8 * 2 * 16 * 4096 * 14336
    num_bytes = 8 * 2 * (16 * 14336 + 4096 * 14336 + 16 * 4096)
    assert point.intensity == num_operations / num_bytes
    assert point.tflops == pytest.approx(num_operations / 100e-6 / 1e12)


def test_problems_of_other_numbers_of_groups_are_apart():
    measured = problems(
        [
            grouped_sample(GROUPED, 10.0),
            grouped_sample(GROUPED_VENDOR, 15.0),
            grouped_sample(GROUPED, 40.0, num_groups=32),
        ]
    )
    assert [problem.speedup for problem in measured] == [1.5, None]
    assert [problem.key.num_groups for problem in measured] == [8, 32]


def test_roofs_of_a_known_device_are_nominal():
    points = measures.roofline(problems([sample(SMALL, 10.0)]))
    roofs = measures.roofs(H200, points)
    assert "H200 data sheet" in roofs.source
    assert roofs.tflops == pytest.approx(1979, rel=0.01)  # fp8 dense, H200 data sheet
    assert roofs.gbytes_per_s == 4800
    assert roofs.ridge == pytest.approx(roofs.tflops * 1e12 / (4800 * 1e9))


def test_roofs_of_16_bit_operands_are_half():
    key_16_bit = key(op="matmul", a_dtype="bf16", b_dtype="bf16", scales="none")
    points = measures.roofline(problems([sample(SMALL, 10.0, key=key_16_bit)]))
    assert measures.roofs(H200, points).tflops == pytest.approx(989, rel=0.01)


def test_nominal_rates_are_plausible_and_each_says_where_it_is_from():
    for (_, num_sms, *_), rates in NOMINAL.items():
        assert rates.source and num_sms > 0 and rates.gbytes_per_s > 0
        assert rates.tflops_8_bit / rates.tflops_16_bit == pytest.approx(2, rel=0.02) or (
            rates.tflops_8_bit == rates.tflops_16_bit
        )


def test_roofs_of_an_unknown_device_are_the_measured_maxima_and_say_so():
    points = measures.roofline(problems([sample(SMALL, 10.0), sample(SMALL, 40.0, m=8192)]))
    roofs = measures.roofs(UNKNOWN_GPU, points)
    assert "no nominal rates" in roofs.source
    assert roofs.tflops == max(point.tflops for point in points)


def test_a_decorated_kernel_has_no_roofline():
    samples = [
        kernel_sample(64, 10.0, 4),
        kernel_sample(64, 12.0, 8),
        kernel_sample(128, 25.0, 4),
        kernel_sample(128, 20.0, 8),
    ]
    measured = problems(samples)
    assert [problem.chosen.config.num_warps for problem in measured] == [4, 8]
    assert measures.roofline(measured) == []
