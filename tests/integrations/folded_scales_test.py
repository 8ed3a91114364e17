"""Weights in MXFP8 keep what they stand for in blocks of 128x128, and are restored bit by bit."""

from __future__ import annotations

import re

import pytest
import torch
from mxfp8 import mxfp8, spread

import stoneware as sw
from stoneware.nn import folded_scales
from stoneware.nn.inference import dequantize

N, K = 256, 384


def same_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(N, K), (3, N, K)], ids=["layer", "experts"])
@pytest.mark.parametrize("blocks", [(1, 32), (32, 32), (1, 128), (128, 32)])
def test_a_folded_weight_stands_for_the_same_values(shape, blocks, monkeypatch):
    monkeypatch.setattr(folded_scales, "_MOST_ELEMENTS", 128 * K)  # several slabs
    dense = torch.randn(shape) * torch.randn(*shape[:-1], 1).exp()
    weight, scale = mxfp8(dense, *blocks)
    loss = folded_scales.loss(weight, scale)
    folded = folded_scales.fold(weight, scale)
    before, after = weight.double() * spread(scale, shape), folded.weight.double() * spread(folded.scale, shape)
    rounded = before != after
    assert folded.scale.shape == (*shape[:-2], N // 128, K // 128)
    assert loss.share_rounded == float(rounded.double().mean()) == len(folded.before.positions) / weight.numel() < 0.01
    # Below 2**-6 of a block's scale the format has steps of 2**-9; larger values are exact.
    small = spread(folded.scale, shape) * 2.0**-6
    assert bool((before.abs()[rounded] < small[rounded]).all())
    assert bool(((before - after).abs() <= small * 2.0**-4).all())
    slabs = [some.reshape(-1, 128, K) for some in (before - after, before)]
    error = max(float((change.norm(dim=dim) / some.norm(dim=dim)).max()) for dim in (1, 2) for change, some in [slabs])
    assert loss.error == pytest.approx(error, rel=1e-3) and error < folded_scales.MOST_ERROR
    assert same_bytes(folded_scales.unfold(*folded), weight)


def test_a_product_is_not_less_accurate_than_mxfp8s_own():
    """x has a float32 scale for 128 elements, instead of a power of two for 32."""
    x = torch.randn(64, 1024) * torch.randn(1, 1024).exp()
    dense = torch.randn(N, 1024)
    weight, scale = mxfp8(dense)
    values, x_scale = mxfp8(x)
    expected = x.double() @ dense.double().t()
    own = (values.double() * spread(x_scale, x.shape)) @ (weight.double() * spread(scale, weight.shape)).t()
    folded = folded_scales.fold(weight, scale)
    x_values, x_scale = sw.quantize(x, "block")
    y = sw.scaled_mm(x_values, folded.weight.t(), x_scale, folded.scale.t(), out_dtype=torch.float32)
    error, own_error = (float((some - expected).norm() / expected.norm()) for some in (y, own))
    assert 0.02 < error < own_error < 0.05


def test_every_value_of_the_format_at_every_ratio_of_scales():
    """All 254 finite values, one scale the largest of its block and one up to 2**-20 of it."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[values.float().isfinite()]
    for exponent in range(21):
        weight = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
        weight.view(torch.uint8)[0, :1] = torch.tensor([448.0]).to(torch.float8_e4m3fn).view(torch.uint8)
        weight.view(torch.uint8)[1:3, :127] = values.view(torch.uint8).reshape(2, 127)
        scale = torch.full((128, 1), 2.0**-exponent)
        scale[0] = 1.0
        folded = folded_scales.fold(weight, scale)
        expected = (weight.double() * scale).to(torch.float32).to(torch.float8_e4m3fn)
        assert folded.scale.item() == 1.0 and same_bytes(folded.weight, expected)
        assert same_bytes(folded_scales.unfold(*folded), weight)


def test_a_block_whose_values_leave_room_gets_a_smaller_scale():
    """Then fewer values lose bits than with the largest of the old scales."""
    weight = torch.full((128, 128), 2.0**-9).to(torch.float8_e4m3fn)
    folded = folded_scales.fold(weight, torch.full((128, 4), 2.0**30))
    assert folded.weight.float().max() == 256.0 and folded.scale.item() == 2.0**13
    empty = folded_scales.fold(torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.full((128, 4), 2.0**30))
    assert empty.scale.isfinite().all() and not empty.weight.float().any()


SCALES = torch.ones(N, K // 32)
CHANGED = "change a row or a column of the weight by 1 of its norm, more than 0.016"
REFUSED = {
    "not a power of two": (SCALES * 0.3, "1x32 have scales that are not powers of two"),
    "NaN": (SCALES * torch.nan, "not powers of two"),
    "far out": (SCALES * 2.0**120, r"from 2\*\*-100 to 2\*\*100"),
    "a width that does not divide 128": (torch.ones(N, K // 48), r"\[256, 8\], which does not divide blocks of 128"),
    "rows that differ too much": (SCALES * torch.tensor([1.0, 2.0**-30]).repeat(N // 2)[:, None], CHANGED),
    "rows whose squares are not in float32": (SCALES * torch.tensor([1.0, 2.0**-80]).repeat(N // 2)[:, None], CHANGED),
    "columns that differ too much": (SCALES * torch.tensor([2.0**-30] + [1.0] * (K // 32 - 1)), CHANGED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_the_same_weight_is_refused(name):
    scale, message = REFUSED[name]
    reason = folded_scales.loss(torch.randn(N, K).to(torch.float8_e4m3fn), scale)
    assert isinstance(reason, str) and re.search(message, reason)


@pytest.mark.parametrize("scale_of_zeros", [2.0**-127, 0.0, torch.nan])
def test_blocks_of_zeros_may_have_any_scale(scale_of_zeros):
    weight, scale = mxfp8(torch.randn(N, K))
    weight[:, :32], scale[:, 0] = 0, scale_of_zeros
    folded = folded_scales.fold(weight, scale)
    assert isinstance(folded_scales.loss(weight, scale), folded_scales.Loss)
    dense = weight.float() * spread(scale, weight.shape).nan_to_num()
    after = dequantize(folded.weight, folded.scale, torch.float32)
    assert not after[:, :32].any() and (after - dense).norm() < 1e-5 * dense.norm()
    assert same_bytes(folded_scales.unfold(*folded), weight)


def test_nan_is_refused():
    weight = torch.full((128, 128), torch.nan).to(torch.float8_e4m3fn)
    assert "nan of its norm" in folded_scales.loss(weight, torch.ones(128, 4))
