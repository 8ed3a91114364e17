"""Backend of the vendor library: torch._grouped_mm and torch._scaled_grouped_mm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.kernels.config import Config
from stoneware.ops.grouped_mm.heuristic import VENDOR
from stoneware.ops.grouped_mm.problem import Problem
from stoneware.runtime.device import Device

NAME = VENDOR.backend


def supports(problem: Problem, device: Device) -> str | None:
    """The restrictions of `_grouped_mm_cuda` and `_scaled_grouped_mm_cuda`
    (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
    if device.kind != "cuda":
        return f"torch._grouped_mm is the vendor library on GPUs only, the device is {device}"
    if device.compute_capability != (9, 0):
        return (
            "torch._grouped_mm has kernels of its own for compute capability 9.0 only, the device "
            f"is {device}"
        )
    if problem.out_dtype != "bf16":
        return f"torch._grouped_mm writes bf16 only, out_dtype is {problem.out_dtype}"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    return [VENDOR]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    return _run_scaled if problem.scales == "row" else _run


# torch takes no out: the result is copied, with what it has in the rows after the last offset.
def _run(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor, scale_a: None,
    scale_b: None,
) -> None:
    out.copy_(torch._grouped_mm(a, b, offs=offs))


def _run_scaled(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor,
    scale_a: torch.Tensor, scale_b: torch.Tensor,
) -> None:
    out.copy_(torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=offs, out_dtype=out.dtype, use_fast_accum=True
    ))
