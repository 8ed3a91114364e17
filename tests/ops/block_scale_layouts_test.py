"""Block scales of a layout that torch's kernel does not take: copied in its plan, and what that costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operands import block_scaled_operands, poisoned

from stoneware.ops import dispatch
from stoneware.ops.scaled_mm import vendor
from stoneware.ops.scaled_mm.api import OPERATION
from stoneware.runtime.device import CPU, Device, DeviceFingerprint
from stoneware.specs.scaled_mm import VENDOR
from stoneware.specs.scaled_mm_problem import Problem, num_blocks
from stoneware.tuning import entries, lookup
from stoneware.tuning.samples import Run, Sample
from stoneware.tuning.sources import Source

H200 = Device(
    fingerprint=DeviceFingerprint(
        name="NVIDIA H200", compute_capability=(9, 0), num_sms=132, l2_bytes=62914560, memory_clock_khz=3201000
    )
)


def laid_out(problem: Problem, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Problem:
    """The problem of these scales, whose second strides say nothing where they are columns."""
    return dataclasses.replace(
        problem,
        scale_a_stride_m=scale_a.stride(0),
        ld_scale_a=scale_a.stride(1) if problem.k > 128 else problem.m,
        ld_scale_b=scale_b.stride(0),
        scale_b_stride_n=scale_b.stride(1) if scale_b.shape[1] > 1 else scale_b.shape[0],
        is_scale_b_padded=scale_b.shape[0] % 4 == 0,
    )


def row_major(m: int, n: int, k: int) -> Problem:
    blocks, columns = num_blocks(k), num_blocks(n)
    return laid_out(Problem.dense(m=m, n=n, k=k, scales="block"), torch.empty(m, blocks), torch.empty(blocks, columns))


@pytest.mark.parametrize("layout", ["torch", "padded", "dense", "strided"])
@pytest.mark.parametrize("n", [112, 288])
@pytest.mark.parametrize("k", [128, 256, 512, 640])
def test_torch_is_given_its_layout_and_the_same_values(monkeypatch, layout, k, n):
    m, given = 8, []

    def scaled_mm_v2(a, b, scale_a, recipe_a, swizzle_a, scale_b, *rest, out):
        given.extend([*scale_a, *scale_b])

    monkeypatch.setattr(torch, "_scaled_mm_v2", scaled_mm_v2)
    x = block_scaled_operands(m, n, k, layout=layout)
    problem = laid_out(Problem.dense(m=m, n=n, k=k, scales="block"), x.scale_a, x.scale_b)
    vendor.BACKEND.plan(problem, VENDOR, CPU)(x.a, x.b, poisoned(m, n, torch.bfloat16), x.scale_a, x.scale_b, None)
    scale_a, scale_b = given
    blocks, rows = num_blocks(k), -(-k // 512) * 4
    assert (scale_a.shape, scale_a.stride()) == ((m, blocks), (1, m))
    assert (scale_b.shape, scale_b.stride()) == ((rows, num_blocks(n)), (1, rows))
    assert scale_a.equal(x.scale_a)
    assert scale_b[:blocks].equal(x.scale_b[:blocks])
    if layout == "torch":
        pointers = [one.data_ptr() for one in (scale_a, scale_b)]
        assert pointers == [x.scale_a.data_ptr(), x.scale_b.data_ptr()], "copied for nothing"


@pytest.mark.parametrize("layout", ["torch", "padded", "dense", "strided"])
def test_torch_is_given_the_scales_of_columns_as_those_of_rows(monkeypatch, layout):
    m, n, k, given = 8, 288, 640, []

    def scaled_mm_v2(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, *rest, out):
        given.extend([*scale_a, *scale_b])
        assert recipe_a == recipe_b == [4]  # BlockWise1x128

    monkeypatch.setattr(torch, "_scaled_mm_v2", scaled_mm_v2)
    x = block_scaled_operands(m, n, k, layout=layout, is_1d=True)
    problem = laid_out(Problem.dense(m=m, n=n, k=k, scales="block_1d"), x.scale_a, x.scale_b)
    vendor.BACKEND.plan(problem, VENDOR, CPU)(x.a, x.b, poisoned(m, n, torch.bfloat16), x.scale_a, x.scale_b, None)
    scale_a, scale_b = given
    assert scale_a.equal(x.scale_a) and scale_a.stride() == (1, m)
    assert scale_b.equal(x.scale_b.t()) and scale_b.stride() == (1, n)
    is_copied = [one.data_ptr() != other.data_ptr() for one, other in ((scale_a, x.scale_a), (scale_b, x.scale_b))]
    assert is_copied == {"torch": [False, False], "dense": [True, False]}.get(layout, [layout != "padded", True])
    conversion = vendor.BACKEND.conversion(problem)
    assert (conversion is None) == (layout == "torch")
    assert not is_copied[1] or f"scale_b with strides (n, 1)=({n}, 1) instead of" in conversion.text


def test_no_kernel_of_ours_is_for_scales_of_columns():
    problem = Problem.dense(m=4096, n=4096, k=8192, scales="block_1d")
    assert {config.backend for config in OPERATION.candidates(problem, H200)} == {"vendor"}


@pytest.mark.parametrize("k", [128, 256])
def test_rows_beyond_a_multiple_of_4_are_a_second_matmul(monkeypatch, k):
    m, n = 1029, 32

    def scaled_mm_v2(a, b, scale_a, recipe_a, swizzle_a, scale_b, *rest, out):
        assert a.shape[0] % 4 == 0 and scale_a[0].stride() == (1, a.shape[0])
        scale = scale_a[0].repeat_interleave(128, dim=1)
        out.copy_((a.float() * scale) @ b.float())

    monkeypatch.setattr(torch, "_scaled_mm_v2", scaled_mm_v2)
    x = block_scaled_operands(m, n, k, layout="torch")
    problem = laid_out(Problem.dense(m=m, n=n, k=k, scales="block"), x.scale_a, x.scale_b)
    out = poisoned(m, n, torch.bfloat16)
    vendor.BACKEND.plan(problem, VENDOR, CPU)(x.a, x.b, out, x.scale_a, x.scale_b, None)
    expected = (x.a.float() * x.scale_a.repeat_interleave(128, dim=1)) @ x.b.float()
    torch.testing.assert_close(out, expected.bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("m", "runs"), [(1023, False), (1024, True), (1025, True), (1026, True), (64, True)])
def test_torchs_kernel_runs_an_m_that_is_no_multiple_of_4_from_1024_on(m, runs):
    reason = vendor.BACKEND.supports(Problem.dense(m=m, n=256, k=256, scales="block"), H200)
    assert (reason is None) == runs
    assert runs or f"m={m} must be a multiple of 4" in reason


def test_the_second_matmul_is_counted_and_explained(monkeypatch):
    found, _ = decide(monkeypatch, row_major(4097, 4096, 7168), vendor_us=300.0, ours_us=400.0)
    assert found.config == VENDOR
    assert (
        "runs a second matmul for the last 4 rows" in found.reason
        and "rows of zeros up to a multiple of 4" in found.reason
    )
    found, ours = decide(monkeypatch, row_major(4097, 4096, 7168), vendor_us=390.0, ours_us=400.0)
    assert found.config == ours


def decide(monkeypatch, problem: Problem, vendor_us: float, ours_us: float, **asked):
    """The decision where these two times were measured at the problem's key, and the config of ours."""
    ours = next(one for one in OPERATION.candidates(problem, H200) if one.backend == "sm90")
    texts = dict.fromkeys(("driver", "cuda", "torch", "triton", "python", "date", "commit", "command"), "")
    clocks = {f"{of}_clock_mhz_{when}": 0 for of in ("sm", "memory") for when in ("before", "after")}
    run = Run(id="r", device=H200.fingerprint, **texts, **clocks)
    samples = [
        Sample(
            key=problem.key,
            config=config,
            median_us=us,
            spread_us=0.1,
            count=9,
            status="ok",
            run="r",
            kernel_sha256=dispatch.manifest.packaged().kernels[config.kernel].measured_sha256 if config is ours else "",
        )
        for config, us in ((VENDOR, vendor_us), (ours, ours_us))
    ]
    table = entries.table_of_samples("scaled_mm", [(run, one) for one in samples])

    def answers(key, device, **_):
        return lookup.answers(key, device.fingerprint, [Source("wheel", table)])

    monkeypatch.setattr(dispatch, "_answers", answers)
    return OPERATION.decide(problem, H200, **asked), ours


def test_a_copy_that_costs_less_than_torchs_kernel_saves_is_made_and_explained(monkeypatch):
    found, _ = decide(monkeypatch, row_major(4096, 4096, 7168), vendor_us=300.0, ours_us=400.0)
    assert found.config == VENDOR
    assert f"each call copies scale_a ({4096 * 56} floats) and scale_b ({56 * 32} floats)" in found.reason
    assert "scale_a with strides (1, m)=(1, 4096) instead of (56, 1)" in found.reason
    assert "scale_b with 56 rows and strides (1, 56) instead of (32, 1)" in found.reason


def test_a_copy_that_costs_more_than_torchs_kernel_saves_is_not_made(monkeypatch):
    problem = row_major(128, 4096, 7168)
    found, ours = decide(monkeypatch, problem, vendor_us=20.0, ours_us=22.0)
    assert found.config == ours
    [refusal] = [one for one in found.refusals if one.what == str(VENDOR)]
    assert "each call copies" in refusal.reason and f"{ours} is faster than both together" in refusal.reason


def test_the_layout_that_torch_takes_costs_nothing(monkeypatch):
    dense = Problem.dense(m=128, n=4096, k=7168, scales="block")
    found, _ = decide(monkeypatch, dense, vendor_us=20.0, ours_us=22.0)
    assert found.config == VENDOR
    assert "copies" not in found.reason


def test_a_backend_that_was_asked_for_runs_whatever_it_copies(monkeypatch):
    found, _ = decide(monkeypatch, row_major(128, 4096, 7168), 20.0, 22.0, backend="vendor")
    assert found.config == VENDOR
    assert "each call copies" in found.reason


def test_what_is_measured_for_the_key_is_of_the_layout_that_torch_takes():
    problem = row_major(128, 4096, 7040)
    dense = Problem.dense(m=128, n=4096, k=7040, scales="block")
    assert problem != dense and problem.key == dense.key
    assert problem.representative == dense
    assert dataclasses.replace(problem, has_bias=True).representative == dataclasses.replace(dense, has_bias=True)
    plain = Problem.dense(m=128, n=4096, k=7040)
    assert plain.representative is plain
