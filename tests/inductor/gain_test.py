"""The prediction of what a fused call saves, from the wheel's table, for a GPU that is only described."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import utils

from stoneware.inductor import gain
from stoneware.runtime.device import Device
from stoneware.tuning import table_file

GBYTES_PER_S = 4800
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    [fingerprint] = [
        each.fingerprint for each in table_file.packaged("matmul").devices if "H200" in each.fingerprint.name
    ]
    monkeypatch.setattr(gain, "cuda_device", lambda ordinal: Device(fingerprint=fingerprint, driver_version=(13, 0)))
    monkeypatch.setattr(utils, "get_gpu_dram_gbps", lambda: GBYTES_PER_S)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def saved_us(m, n, k, saved_bytes, out_dtype=None):
    return gain.saved_us(
        "matmul", (empty(m, k), empty(n, k).t(), None), (out_dtype, False), CUDA, saved_bytes=saved_bytes
    )


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_bytes_count_by_the_bandwidth(out_dtype):
    none, some = (saved_us(256, 4096, 4096, saved_bytes, out_dtype) for saved_bytes in (0, 48_000_000))
    assert some - none == pytest.approx(10)


def test_fp8_with_a_bias_is_predicted():
    tensors = empty(64, 4096, dtype=torch.float8_e4m3fn), empty(4096, 4096, dtype=torch.float8_e4m3fn).t()
    scales = empty(64, 1, dtype=torch.float32), empty(1, 4096, dtype=torch.float32)
    arguments = torch.bfloat16, True
    bias = empty(4096)
    assert isinstance(gain.saved_us("scaled_mm", (*tensors, *scales, bias), arguments, CUDA, saved_bytes=0), float)


def test_a_float32_bias_which_no_open_kernel_has_is_not_predicted():
    a, b, bias = empty(64, 512), empty(4096, 512).t(), empty(4096, dtype=torch.float32)
    assert isinstance(gain.saved_us("matmul", (a, b, None), (torch.float32, False), CUDA, saved_bytes=0), float)
    assert gain.saved_us("matmul", (a, b, bias), (torch.float32, False), CUDA, saved_bytes=0) is None


def test_what_cannot_be_fused_is_not_predicted():
    assert saved_us(64, 4096, 4099, 0) is None
    batch = empty(4, 64, 512), empty(4, 512, 64), None
    assert gain.saved_us("matmul", batch, (None, False), CUDA, saved_bytes=0) is None
    assert gain.saved_us("matmul", batch, (None, False), torch.device("cpu"), saved_bytes=0) is None
