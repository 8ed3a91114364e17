"""Backend of the vendor library: torch._scaled_mm, which is cuBLASLt or torch's own CUTLASS."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoneware.autotune.config import Config
from stoneware.ops.scaled_mm.heuristic import VENDOR
from stoneware.ops.scaled_mm.problem import Problem
from stoneware.runtime.device import Device

NAME = VENDOR.backend


def _version(text: str | None) -> tuple[int, int]:
    major, minor = (text or "0.0").split(".")[:2]
    return int(major), int(minor)


_CUDA = _version(torch.version.cuda)


def supports(problem: Problem, device: Device) -> str | None:
    """The restrictions of `_scaled_mm_out_cuda` (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    if device.kind != "cuda":
        return f"torch._scaled_mm is the vendor library on GPUs only, the device is {device}"
    if device.compute_capability < (8, 9):
        return (
            f"torch._scaled_mm needs compute capability 8.9 or later, {device} has "
            f"{_dotted(device.compute_capability)}"
        )
    if problem.scale_a != problem.scale_b:
        return (
            "torch._scaled_mm takes two scales of one kind, these are "
            f"scale_a={problem.scale_a} and scale_b={problem.scale_b}"
        )
    if problem.scale_a == "tensor" or device.is_described:
        return None
    return _row_scales(problem, device)


def _row_scales(problem: Problem, device: Device) -> str | None:
    """Restrictions of cuBLASLt behind row scales, and of the CUTLASS kernels that torch uses where
    cuBLASLt is older than 12.9 or the arch is not Hopper."""
    where = f"torch {torch.__version__} on compute capability {_dotted(device.compute_capability)}"
    if _CUDA >= (12, 9) and device.compute_capability[0] == 9:
        if problem.has_bias:
            # Seen with torch 2.11 and CUDA 13.0 at m=1 and 16, n=2112, k=7168 and six more shapes.
            return (
                f"torch._scaled_mm with row scales and a bias fails at some shapes in {where} "
                "(CUBLAS_STATUS_NOT_SUPPORTED)"
            )
        return None
    if problem.lda != problem.k or problem.ldb != problem.k:
        return (
            f"torch._scaled_mm with row scales takes no sliced views in {where}: lda={problem.lda} "
            f"and ldb={problem.ldb} must be k={problem.k}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def configs(problem: Problem, device: Device) -> list[Config]:
    return [VENDOR]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    scaled_mm = torch._scaled_mm

    def run(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor,
        scale_b: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:
        scaled_mm(
            a, b, scale_a, scale_b, bias=bias, out_dtype=out.dtype, use_fast_accum=True, out=out
        )

    def run_to_view(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor,
        scale_b: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:
        # torch's row-scale kernels write dense rows.
        out.copy_(scaled_mm(
            a, b, scale_a, scale_b, bias=bias, out_dtype=out.dtype, use_fast_accum=True
        ))

    return run if problem.ldd == problem.n else run_to_view
