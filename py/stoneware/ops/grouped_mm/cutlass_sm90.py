"""Backend of the grouped kernels for Hopper, embedded in the native module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoneware.kernels import cutlass_kernels, tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.cutlass_kernels import COMPUTE_CAPABILITY
from stoneware.ops.grouped_mm.problem import OP, Problem
from stoneware.runtime import native
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = cutlass_kernels.BACKEND

MAX_GROUPS = 1024
"""A block's table of groups in shared memory (kMaxGroups in cc/gemm/grouped_tiles.h)."""

MAX_EXTENT = 2**30 - 1
"""Of m, n and k: a tile that reaches over an end still counts in int32 (CanImplement in
cc/gemm/grouped_mm_sm90.cc)."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    reason = cutlass_kernels.why_unusable(device)
    if reason is not None:
        return reason
    if problem.num_groups > MAX_GROUPS:
        return (
            f"num_groups={problem.num_groups} must be at most {MAX_GROUPS} for {NAME}; "
            "split the groups"
        )
    for name in ("m", "n", "k"):
        if getattr(problem, name) > MAX_EXTENT:
            return (
                f"{name}={getattr(problem, name)} must be at most {MAX_EXTENT} for {NAME}, whose "
                "tiles count in 32 bits; split the problem"
            )
    key = problem.key
    if not any(
        tile_rule.fits(kernel, key, COMPUTE_CAPABILITY) for kernel in cutlass_kernels.kernels(OP)
    ):
        return f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype}"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits."""
    return tile_rule.by_tile_m(
        problem.key, device.compute_capability, cutlass_kernels.kernels(OP)
    )


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, offs, scale_a, scale_b), which launches on torch's current stream and
    waits for nothing.

    Raises:
      UnsupportedError, TableError: see `cutlass_kernels.check_cubin`.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    cutlass_kernels.check_cubin(config.kernel)
    ordinal = device.ordinal
    launch = native.load(cutlass_kernels.MODULE).Plan(
        config.kernel, m=problem.m, n=problem.n, k=problem.k, num_groups=problem.num_groups,
        lda=problem.lda, ldb=problem.ldb, ldd=problem.ldd, batch_stride_b=problem.group_stride_b,
        scale_a=problem.scales, scale_b=problem.scales, device=ordinal,
        num_sms=device.fingerprint.num_sms, max_swizzle=config.max_swizzle, raster=config.raster,
    )

    def run(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
    ) -> None:
        launch(
            a.data_ptr(), b.data_ptr(), out.data_ptr(),
            0 if scale_a is None else scale_a.data_ptr(),
            0 if scale_b is None else scale_b.data_ptr(),
            0, current_stream(ordinal), offs.data_ptr(),
        )

    run.native_launch = launch.native_launch(["a", "b", "d", "offsets", "scale_a", "scale_b"])
    return run
