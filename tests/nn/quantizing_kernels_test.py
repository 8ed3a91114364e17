"""Which calls of sw.quantize have a kernel on a GPU."""

from __future__ import annotations

import itertools

import h200
import pytest
import torch

from stoneware.quantizing import kernels, layout
from stoneware.runtime.device import Device

_H200 = Device(fingerprint=h200.H200)

_HAVE = {
    (scales, dtype, in_dtype)
    for scales, dtype, in_dtype in itertools.product(layout.SCALES, ("e4m3", "e5m2"), ("bf16", "fp16"))
    if dtype == "e4m3" or scales == "tensor"
}


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("in_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", layout.SCALES)
def test_all_kinds_but_wide_units_and_float32_have_one(scales, dtype, in_dtype, transposes):
    reason = kernels.why_not(torch.zeros(32, 64, dtype=in_dtype), scales, dtype, transposes, _H200)
    if (scales, dtype, kernels._name(torch.zeros(0, dtype=in_dtype))) in _HAVE:
        assert reason is None
    else:
        assert "the wheel has no kernel" in reason


@pytest.mark.parametrize(
    ("shape", "transposes", "said"),
    [((32, 60), False, "k=60 must be"), ((30, 64), True, "m=30 must be"), ((30, 64), False, None)],
)
def test_sizes_that_no_kernel_takes_are_named(shape, transposes, said):
    reason = kernels.why_not(torch.zeros(shape, dtype=torch.bfloat16), "row", "e4m3", transposes, _H200)
    assert reason is None if said is None else said in reason
