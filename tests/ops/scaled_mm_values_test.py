"""scaled_mm against float64 on the reference backend, which a machine without a GPU runs."""

from __future__ import annotations

import itertools
import logging
import types

import pytest
import torch
from operands import OUT_DTYPES, block_scaled_operands, poisoned, relative_error, scaled_operands

import stoneware as sw
from stoneware.ops import dispatch
from stoneware.specs.tolerance import tolerance
from stoneware.tuning.lookup import Refusal

SHAPES = [(1, 16, 16), (17, 48, 32), (64, 2112, 512), (300, 256, 1008)]


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("scale_a", ["row", "tensor"])
@pytest.mark.parametrize("scale_b", ["row", "tensor"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_result_is_near_float64(m, n, k, out_dtype, scale_a, scale_b, has_bias):
    dtype = OUT_DTYPES[out_dtype]
    x = scaled_operands(m, n, k, scale_a=scale_a, scale_b=scale_b, bias_dtype=dtype if has_bias else None)
    out = poisoned(m, n, dtype)
    result = sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, x.bias, dtype, out=out)
    assert result is out
    assert relative_error(out, x.expected) <= tolerance(out_dtype, k)
    assert torch.equal(sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, x.bias, dtype), out)


BLOCK_SHAPES = [(1, 16, 128), (1, 144, 384), (17, 48, 128), (64, 2112, 512), (130, 272, 256), (5, 128, 640)]


@pytest.mark.parametrize("layout", ["torch", "dense", "padded", "strided"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), BLOCK_SHAPES)
@pytest.mark.parametrize("is_1d", [False, True])
def test_block_scales_of_any_layout_are_near_float64(m, n, k, has_bias, layout, is_1d):
    x = block_scaled_operands(m, n, k, layout=layout, bias_dtype=torch.bfloat16 if has_bias else None, is_1d=is_1d)
    out = poisoned(m, n, torch.bfloat16, n + 8)
    sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, x.bias, out=out)
    assert relative_error(out, x.expected) <= tolerance("bf16", k)


def test_layouts_of_block_scales_do_not_share_a_plan():
    """Same shapes and dtypes, other strides, one after the other."""
    for layout, is_1d in itertools.product(("torch", "padded", "dense", "strided", "torch"), (False, True)):
        x = block_scaled_operands(24, 256, 512, layout=layout, is_1d=is_1d)
        result = sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
        assert relative_error(result, x.expected) <= tolerance("bf16", 512)


@pytest.mark.parametrize("use_fast_accum", [True, False])
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
)
def test_gradients_in_e5m2_give_float32(a_dtype, b_dtype, use_fast_accum):
    x = scaled_operands(33, 64, 256)
    a, b = torch.randn(33, 256).to(a_dtype), torch.randn(64, 256).to(b_dtype).t()
    result = sw.scaled_mm(a, b, x.scale_a, x.scale_b, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
    expected = a.double() @ b.double() * x.scale_a.double() * x.scale_b.double()
    assert result.dtype == torch.float32
    assert relative_error(result, expected) <= tolerance("fp32", 256)


def test_sliced_views_give_the_result_of_their_copies():
    x = scaled_operands(80, 96, 128)
    a, b = x.a[3:40, 32:112], x.b[32:112, 16:64]
    scale_a, scale_b = x.scale_a[3:40], x.scale_b[:, 16:64]
    base = torch.full((37, 64), float("nan"), dtype=torch.bfloat16)
    sw.scaled_mm(a, b, scale_a, scale_b, out=base[:, :48])
    dense = sw.scaled_mm(a.contiguous(), b.t().contiguous().t(), scale_a.clone(), scale_b.clone())
    assert torch.equal(base[:, :48], dense)
    assert base[:, 48:].isnan().all(), "columns outside the view were written"


def test_strided_scales_and_bias_count_by_value_not_by_memory():
    x = scaled_operands(40, 64, 128, bias_dtype=torch.bfloat16)
    wide_a = torch.randn(40, 3)
    wide_a[:, 1:2] = x.scale_a
    wide_b = torch.randn(1, 128)
    wide_b[:, ::2] = x.scale_b
    wide_bias = torch.randn(128, dtype=torch.bfloat16)
    wide_bias[::2] = x.bias
    strided = sw.scaled_mm(x.a, x.b, wide_a[:, 1:2], wide_b[:, ::2], wide_bias[::2])
    assert torch.equal(strided, sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, x.bias))
    expanded = x.scale_a[:1].expand(40, 1)
    assert torch.equal(sw.scaled_mm(x.a, x.b, expanded, x.scale_b), sw.scaled_mm(x.a, x.b, expanded.clone(), x.scale_b))


@pytest.mark.parametrize(("m", "n"), [(0, 32), (16, 0), (0, 0)])
def test_no_rows_or_columns_give_an_empty_result(m, n):
    x = scaled_operands(m, n, 64, scale_a="tensor", scale_b="tensor")
    result = sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b, out_dtype=torch.float16)
    assert result.shape == (m, n)
    assert result.dtype == torch.float16


def test_row_of_a_taller_matrix_may_have_any_row_stride():
    x = scaled_operands(1, 32, 64)
    odd = torch.zeros(3, 80, dtype=torch.float8_e4m3fn)[1:2, :64].as_strided((1, 64), (7, 1))
    odd.copy_(x.a)
    assert torch.equal(sw.scaled_mm(odd, x.b, x.scale_a, x.scale_b), sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b))


def test_reference_on_a_cpu_is_announced_once_in_one_sentence(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_subjects", set())
    with caplog.at_level(logging.WARNING, logger="stoneware"):
        for m in (1029, 1031, 1033):
            x = scaled_operands(m, 16, 16)
            sw.scaled_mm(x.a, x.b, x.scale_a, x.scale_b)
        y = torch.randn(1029, 16).bfloat16()
        sw.matmul(y, y.t())
    (record,) = caplog.records
    assert record.getMessage() == (
        "sw.scaled_mm runs on the CPU with the reference backend, which is slow and meant for checking results"
    )


def test_reference_on_a_gpu_is_announced_with_the_reasons(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_subjects", set())
    device = types.SimpleNamespace(kind="cuda")
    decision = types.SimpleNamespace(refusals=[Refusal(what="vendor", reason="needs compute capability 8.9")])
    for _ in range(2):
        dispatch._warn_of_reference("scaled_mm", device, decision)
    (record,) = caplog.records
    assert "no other backend can: vendor: needs compute capability 8.9" in record.getMessage()


def test_vendor_function_takes_the_arguments_that_its_backend_passes():
    """torch._scaled_mm has a CPU version: the same signature, scales and bias, other kernels."""
    from stoneware.ops.scaled_mm import vendor
    from stoneware.runtime.device import CPU
    from stoneware.specs.scaled_mm_problem import Problem

    x = scaled_operands(32, 64, 128, scale_a="tensor", scale_b="tensor", bias_dtype=torch.bfloat16)
    problem = Problem.dense(m=32, n=64, k=128, scales="tensor", has_bias=True)
    for ldd in (64, 72):
        out = poisoned(32, 64, torch.bfloat16, ldd)
        run = vendor.BACKEND.plan(
            Problem(**{**vars(problem), "ldd": ldd}), vendor.BACKEND.configs(problem, CPU)[0], CPU
        )
        run(x.a, x.b, out, x.scale_a, x.scale_b, x.bias)
        # The CPU version may add the bias in bf16, after a rounding of its own.
        assert relative_error(out, x.expected) <= 2 * tolerance("bf16", 128)
