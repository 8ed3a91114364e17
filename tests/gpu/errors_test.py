"""Mistakes on a GPU give errors with rule, value and remedy, and leave the GPU usable."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import stoneware
from stoneware.errors import DriverError
from stoneware.kernels import aot_kernels, manifest
from stoneware.measuring import operands
from stoneware.runtime import package_files
from stoneware.specs.scaled_mm_problem import Problem


@pytest.fixture
def tensors(device) -> operands.Operands:
    return operands.make(Problem.dense(m=48, n=512, k=1024), "cuda")


@pytest.fixture(autouse=True)
def _gpu_works_afterwards(device):
    yield
    after = operands.make(Problem.dense(m=48, n=512, k=1024), "cuda")
    result = stoneware.scaled_mm(after.a, after.b, *after.scales)
    comparison = operands.compare(result, operands.reference(after), after.problem)
    assert comparison.is_right, str(comparison)


def test_a_cubin_that_does_not_fit_the_gpu(device):
    from stoneware.runtime import _driver

    unfit = [
        kernel
        for kernel in manifest.packaged().select(op="scaled_mm", backend="triton_aot")
        if not aot_kernels.fits(kernel.compute_capability, device.compute_capability)
        and kernel.compute_capability != device.compute_capability
    ]
    if not unfit:
        pytest.skip("the wheel has kernels for this GPU's arch only")
    for kernel in unfit:
        cubin = package_files.path("cubins", f"{kernel.id}.cubin").read_bytes()
        text = package_files.path("cubins", f"{kernel.id}.json").read_text()
        description = json.loads(text)
        loaded = _driver.Kernel(
            cubin,
            description["symbol"],
            description["parameters"],
            description["block_threads"],
            description["shared_bytes"],
        )
        arguments = [0] * len(description["parameters"])
        with pytest.raises(DriverError) as caught:
            loaded.launch(0, 0, 1, 1, 1, *arguments)
        assert caught.value.call.startswith("cu")
        assert caught.value.code_name in (
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            "CUDA_ERROR_INVALID_IMAGE",
            "CUDA_ERROR_INVALID_SOURCE",
        )
        assert caught.value.code_name in str(caught.value) and ";" in str(caught.value)


def test_a_cpu_tensor_beside_gpu_tensors(tensors):
    for position in range(4):
        arguments = [tensors.a, tensors.b, *tensors.scales]
        arguments[position] = arguments[position].cpu()
        with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
            stoneware.scaled_mm(*arguments)


def test_a_cpu_tensor_after_a_good_call(tensors):
    """The plan cache must not take a CPU tensor for the GPU tensor of the same shape."""
    stoneware.scaled_mm(tensors.a, tensors.b, *tensors.scales)
    with pytest.raises(ValueError, match="cpu"):
        stoneware.scaled_mm(tensors.a, tensors.b.cpu(), *tensors.scales)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_tensors_on_two_gpus(tensors):
    with pytest.raises(ValueError, match=r"cuda:1"):
        stoneware.scaled_mm(tensors.a, tensors.b.to("cuda:1"), *tensors.scales)


def test_a_pointer_that_is_not_aligned(tensors):
    base = torch.zeros(48, 1040, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"data_ptr.*multiple of 16"):
        stoneware.scaled_mm(base[:, 8:1032], tensors.b, *tensors.scales)


def test_a_leading_dimension_that_is_not_aligned(tensors):
    base = torch.zeros(48, 1032, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"lda=1032 must be at least k=1024 and a multiple of 16"):
        stoneware.scaled_mm(base[:, :1024], tensors.b, *tensors.scales)


def test_wrong_dtypes_and_shapes(tensors):
    a, b, (scale_a, scale_b) = tensors.a, tensors.b, tensors.scales
    mistakes = [
        ((a.float(), b, scale_a, scale_b), TypeError, "float32"),
        ((a[:, :512], b, scale_a, scale_b), ValueError, "512"),
        ((a, b, scale_a[:47], scale_b), ValueError, "47"),
        ((a, b, scale_a.double(), scale_b), TypeError, "float64"),
        ((a, b.t().contiguous(), scale_a, scale_b), ValueError, "1024"),
    ]
    for arguments, error, value in mistakes:
        with pytest.raises(error, match=value):
            stoneware.scaled_mm(*arguments)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-rs"]))
