"""What a launch passes to the driver module, and what it refuses, on a GPU that is only described."""

from __future__ import annotations

import types

import pytest
import torch

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.runtime.device import Device, DeviceFingerprint
from stoneware.tile import kernel as kernel_module

_SOURCE = """
extern "C" __global__ void numbers(float* p, int i, long long q, float f) { *p = i + q + f; }
"""
STREAM = 77


def described(capability):
    fingerprint = DeviceFingerprint(
        name="NVIDIA H200", compute_capability=capability, num_sms=132, l2_bytes=1, memory_clock_khz=1
    )
    return Device(ordinal=0, fingerprint=fingerprint)


@pytest.fixture
def launches(monkeypatch):
    """A function that makes a kernel for an arch on a GPU of a capability, and the list of its launches."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: types.SimpleNamespace(cuda_stream=STREAM))

    def make(arch="sm_90a", capability=(9, 0)):
        monkeypatch.setattr(kernel_module, "cuda_device", lambda ordinal: described(capability))
        mm = sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", arch=arch)
        kernel = sw.tile.Kernel(sw.tile.link(_SOURCE, [mm]))
        launched: list[tuple] = []
        kernel._launch = lambda *arguments: launched.append(arguments)
        return kernel, launched

    return make


def test_arguments_and_grid_reach_the_driver(launches):
    kernel, launched = launches()
    kernel(4096, -1, -2, 0.5, grid=(3, 2))
    kernel(-1, 2**31 - 1, 2**63, 1, grid=[7])
    assert launched == [
        (0, STREAM, 3, 2, 1, 4096, -1, 2**64 - 2, 0.5),  # 64 bits are passed as they are
        (0, STREAM, 7, 1, 1, 2**64 - 1, 2**31 - 1, 2**63, 1),
    ]


@pytest.mark.parametrize(
    ("arch", "capability"),
    [("sm_90a", (9, 0)), ("sm_90", (9, 0)), ("sm_80", (8, 9)), ("sm_89", (8, 9)), ("sm_120", (12, 1))],
)
def test_a_kernel_runs_on_gpus_of_its_arch(arch, capability, launches):
    kernel, launched = launches(arch, capability)
    kernel(0, 1, 2, 3.0, grid=(1,))
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("arch", "capability", "remedy"),
    [
        ("sm_90a", (10, 0), "sm_100"),
        ("sm_80", (9, 0), "sm_90a"),
        ("sm_89", (8, 6), "sm_86"),
        ("sm_120", (10, 0), "sm_100"),
    ],
)
def test_a_kernel_for_another_gpu_is_refused(arch, capability, remedy, launches):
    kernel, launched = launches(arch, capability)
    with pytest.raises(UnsupportedError, match=f'linked for {arch}, and cuda:0 has .*arch="{remedy}"'):
        kernel(0, 1, 2, 3.0, grid=(1,))
    assert launched == []


@pytest.mark.parametrize(
    ("arguments", "grid", "error", "message"),
    [
        ((0, 1, 2), (1,), TypeError, "numbers must have 4 arguments, and got 3; pass one for each parameter"),
        ((torch.zeros(1), 1, 2, 3.0), (1,), ValueError, "argument 0 of numbers must be on a GPU, and is on cpu"),
        ((0, torch.zeros(1), 2, 3.0), (1,), TypeError, "argument 1 of numbers must be a number of 32 bits"),
        ((0, 1, 2, 3.0), (), ValueError, r"grid=\(\) must be one to three positive ints"),
        ((0, 1, 2, 3.0), (1, 1, 1, 1), ValueError, r"grid=\(1, 1, 1, 1\) must be one to three positive ints"),
        ((0, 1, 2, 3.0), (0,), ValueError, r"grid=\(0,\) must be one to three positive ints"),
        ((0, 1, 2, 3.0), (1.0,), ValueError, r"grid=\(1.0,\) must be one to three positive ints"),
    ],
)
def test_wrong_arguments_are_refused(arguments, grid, error, message, launches):
    kernel, launched = launches()
    with pytest.raises(error, match=message):
        kernel(*arguments, grid=grid)
    assert launched == []
