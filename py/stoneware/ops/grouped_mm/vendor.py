"""Backend of the vendor library: torch._grouped_mm and torch._scaled_grouped_mm."""

from __future__ import annotations

import torch

from stoneware.ops.backend import TorchBackend, without_autocast
from stoneware.runtime.device import Device
from stoneware.specs.grouped_mm import VENDOR
from stoneware.specs.grouped_mm_problem import Problem


class _Vendor(TorchBackend):
    def why_not(self, problem: Problem, device: Device) -> str | None:
        """The restrictions of `_grouped_mm_cuda` and `_scaled_grouped_mm_cuda`
        (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
        function = "torch._grouped_mm" if problem.scales == "none" else "torch._scaled_grouped_mm"
        if device.compute_capability != (9, 0):
            return f"{function} has kernels of its own for compute capability 9.0 only, the device is {device}"
        if problem.has_block_scales:
            return f"{function} has no block scales for compute capability 9.0"
        if problem.out_dtype != "bf16":
            return f"{function} writes bf16 only, out_dtype is {problem.out_dtype}"
        return None


@without_autocast
def _run(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    offs: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> None:
    # torch has no out= here: the whole result is copied, also the rows after the last offset.
    if scale_a is None or scale_b is None:
        out.copy_(torch._grouped_mm(a, b, offs=offs))
    else:
        out.copy_(torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=out.dtype, use_fast_accum=True))


BACKEND = _Vendor(VENDOR, lambda problem: _run)
