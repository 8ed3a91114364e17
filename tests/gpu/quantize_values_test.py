"""The kernels that quantize give the bits of plain torch, at any shape, on views and in graphs."""

from __future__ import annotations

import sys

import pytest
import torch

import stoneware as sw
from stoneware.kernels import aot_kernels
from stoneware.quantizing import kernels, layout, reference
from stoneware.runtime.dtypes import DTYPE_NAMES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

SHAPES = [(1, 16), (3, 4096), (16, 4112), (17, 16384), (5, 28672), (128, 128), (144, 272), (8192, 1024), (1000, 7168)]


def expected(x, scales, transpose, dtype=E4M3, power_of_two=False):
    sources = [x] * (transpose is not True) + [x.t()] * (transpose is not False)
    return [one for source in sources for one in reference.quantize(source, scales, dtype, power_of_two)]


def assert_same_bits(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        one, other = one.float(), other.float()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def poison(device):
    """Leaves memory that a call may get full of something else."""
    torch.full((2**24,), float("nan"), device=device)


@pytest.fixture
def on(device):
    if aot_kernels.built_for(kernels.OP, device.compute_capability) is None:
        pytest.skip(f"{device} runs no kernel that quantizes: they are built from compute capability 8.9 on")
    return torch.device("cuda", device.ordinal)


@pytest.mark.parametrize("transpose", [False, True, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_dtype", [torch.bfloat16, torch.float16])
def test_bits_are_those_of_the_reference(on, device, scales, transpose, shape, in_dtype):
    m = shape[0] if transpose is False else -(-shape[0] // 16) * 16
    x = (torch.randn(m, shape[1], device=on) * torch.rand(m, 1, device=on)).to(in_dtype)
    for dtype, power_of_two in ((E4M3, False), (E4M3, True), *([(E5M2, False)] if scales == "tensor" else [])):
        assert kernels.why_not(x, scales, DTYPE_NAMES[dtype], transpose is not False, device) is None
        poison(on)
        found = sw.quantize(x, scales, transpose=transpose, dtype=dtype, power_of_two=power_of_two)
        assert_same_bits(found, expected(x, scales, transpose, dtype, power_of_two))


@pytest.mark.parametrize("transpose", [False, True, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
def test_zeros_infinities_nans_and_subnormal_numbers(on, scales, transpose):
    x = torch.randn(272, 400, device=on).bfloat16()
    x[3], x[:, 5] = 0, 0
    x[20, 7], x[130, 250], x[140, 100] = float("nan"), float("inf"), -float("inf")
    x[60] = 2.0**-133
    assert_same_bits(sw.quantize(x, scales, transpose=transpose), expected(x, scales, transpose))


@pytest.mark.parametrize("transpose", [False, "both"])
@pytest.mark.parametrize("scales", layout.SCALES)
def test_views_and_what_no_kernel_takes(on, scales, transpose):
    whole = torch.randn(96, 2048, device=on).bfloat16()
    for x in (whole[::2, 512:1024], whole[:, 3:300], whole[:48].t(), whole[:33, :50].float()):
        assert_same_bits(sw.quantize(x, scales, transpose=transpose), expected(x, scales, transpose))


@pytest.mark.parametrize("scales", layout.SCALES)
def test_a_graph_quantizes_what_its_input_holds(on, scales):
    x = torch.randn(256, 512, device=on).bfloat16()
    sw.quantize(x, scales, transpose="both")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sw.quantize(x, scales, transpose="both")
    x.copy_(torch.randn_like(x) * 7)
    graph.replay()
    assert_same_bits(results, expected(x, scales, "both"))


def test_streams_do_not_share_partial_results(on):
    xs = [torch.randn(2048, 4096, device=on).bfloat16() * 10**i for i in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for x, stream in zip(xs, streams):
            with torch.cuda.stream(stream):
                results.append((x, sw.quantize(x, "tensor")))
    torch.cuda.synchronize()
    for x, found in results:
        assert_same_bits(found, expected(x, "tensor", False))


def test_the_wheel_has_each_kernel(device, on):
    arch = aot_kernels.built_for(kernels.OP, device.compute_capability)
    names = {DTYPE_NAMES[E4M3], DTYPE_NAMES[E5M2]}
    assert names == {kernel.config["out"] for kernel in aot_kernels._by_arch(kernels.OP)[arch]}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
