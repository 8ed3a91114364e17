"""Backend of the vendor library: torch._grouped_mm and torch._scaled_grouped_mm."""

from __future__ import annotations

import torch

from stoneware.ops.backend import Plan, TorchBackend
from stoneware.ops.grouped_mm.problem import Problem
from stoneware.ops.grouped_mm.spec import VENDOR
from stoneware.runtime.device import Device


def _why_not(problem: Problem, device: Device) -> str | None:
    """The restrictions of `_grouped_mm_cuda` and `_scaled_grouped_mm_cuda`
    (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    if device.compute_capability != (9, 0):
        return f"torch._grouped_mm has kernels of its own for compute capability 9.0 only, the device is {device}"
    if problem.out_dtype != "bf16":
        return f"torch._grouped_mm writes bf16 only, out_dtype is {problem.out_dtype}"
    return None


def _plan(problem: Problem) -> Plan:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor, *scales: torch.Tensor) -> None:
        # torch takes no out: the result is copied, with what it has in the rows after the last offset.
        if problem.scales == "row":
            d = torch._scaled_grouped_mm(a, b, *scales, offs=offs, out_dtype=out.dtype, use_fast_accum=True)
        else:
            d = torch._grouped_mm(a, b, offs=offs)
        out.copy_(d)

    return run


BACKEND = TorchBackend(VENDOR, _plan, _why_not)
