"""Nominal rates of GPUs, as NVIDIA publishes them: the roofs of a roofline."""

from __future__ import annotations

from typing import NamedTuple

from stoneware.runtime import gpu_models


class Nominal(NamedTuple):
    """Nominal rates of a GPU.

    Attributes:
      tflops_16_bit, tflops_8_bit: dense matmuls of bf16 or fp16 and of fp8 with fp32 accumulation,
        in 10^12 floating-point operations per second; equal where fp8 is widened to 16 bits.
      gbytes_per_s: bandwidth of DRAM in 10^9 bytes per second.
      source: publication.
    """

    tflops_16_bit: float
    tflops_8_bit: float
    gbytes_per_s: float
    source: str


NOMINAL = {
    model.fingerprint.numbers: nominal
    for model, nominal in (
        (
            gpu_models.A100,
            Nominal(312, 312, 2039, "NVIDIA A100 Tensor Core GPU Architecture whitepaper, A100 80GB data sheet"),
        ),
        (gpu_models.L4, Nominal(121, 242.5, 300, "NVIDIA L4 data sheet")),
        (gpu_models.L40S, Nominal(362, 733, 864, "NVIDIA L40S data sheet")),
        (
            gpu_models.RTX_4090,
            Nominal(165.2, 330.3, 1008, "NVIDIA Ada GPU Architecture whitepaper, appendix A, RTX 4090"),
        ),
        (gpu_models.H100, Nominal(989.4, 1978.9, 3352, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5")),
        (gpu_models.H100_PCIE, Nominal(756, 1513, 2039, "NVIDIA H100 Tensor Core GPU Architecture whitepaper, PCIe")),
        (gpu_models.H200, Nominal(989, 1979, 4800, "NVIDIA H200 data sheet")),
        (gpu_models.B200, Nominal(2250, 4500, 7700, "NVIDIA HGX B200 data sheet, an eighth of it")),
        (
            gpu_models.RTX_5090,
            Nominal(209.5, 419, 1792, "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A, RTX 5090"),
        ),
    )
}
"""By `DeviceFingerprint.numbers`, which are the driver's."""
