"""Backend of the CUTLASS kernels for Hopper, embedded in the native module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoneware.kernels import cutlass_kernels, manifest, split_k, tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.cutlass_kernels import COMPUTE_CAPABILITY, MAX_EXTENT
from stoneware.kernels.manifest import KernelRecord
from stoneware.ops.scaled_mm.problem import OP, Problem
from stoneware.runtime import native
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = cutlass_kernels.BACKEND


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    reason = cutlass_kernels.why_unusable(device)
    if reason is not None:
        return reason
    for name in ("m", "n"):
        if getattr(problem, name) > MAX_EXTENT:
            return (
                f"{name}={getattr(problem, name)} must be at most {MAX_EXTENT} for {NAME}, whose "
                "tiles count in 32 bits; split the problem"
            )
    key = problem.key
    if not any(
        tile_rule.fits(kernel, key, COMPUTE_CAPABILITY) for kernel in cutlass_kernels.kernels(OP)
    ):
        return (
            f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype} "
            f"for {key.scales} scales and {key.accumulation} accumulation"
        )
    return None


def runs(problem: Problem, kernel: KernelRecord) -> bool:
    """Whether `configs` has the kernel, for a problem that is supported."""
    return tile_rule.fits(kernel, problem.key, COMPUTE_CAPABILITY)


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits, with each number of splits that may be the fastest; the first that has
    CUTLASS's tile scheduler also with each larger swizzle that changes the order of its tiles."""
    found = tile_rule.by_tile_m(
        problem.key, device.compute_capability, cutlass_kernels.kernels(OP)
    )
    kernels = [manifest.packaged().kernels[config.kernel] for config in found]
    scheduled = (
        kernel for kernel in kernels
        if kernel.config["schedule"] in cutlass_kernels.TILE_SCHEDULED
    )
    return split_k.with_splits(
        found, problem.m, problem.n, problem.k, device.fingerprint.num_sms
    ) + [
        config for kernel in list(scheduled)[:1]
        for config in cutlass_kernels.swizzled(kernel, problem.m, problem.n)
    ]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, scale_a, scale_b, bias), which launches on torch's current stream.

    Raises:
      UnsupportedError, TableError: see `cutlass_kernels.check_cubin`.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    cutlass_kernels.check_cubin(config.kernel)
    ordinal = device.ordinal
    block_layouts = {
        name: getattr(problem, name)
        for name in ("scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b")
        if problem.scales == "block"
    }
    launch = native.load(cutlass_kernels.MODULE).Plan(
        config.kernel, m=problem.m, n=problem.n, k=problem.k, lda=problem.lda, ldb=problem.ldb,
        ldd=problem.ldd, scale_a=problem.scale_a, scale_b=problem.scale_b, device=ordinal,
        num_sms=device.fingerprint.num_sms, max_swizzle=config.max_swizzle, raster=config.raster,
        splits=config.splits,
        **block_layouts,
    )

    def run(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor,
        scale_b: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:
        launch(
            a.data_ptr(), b.data_ptr(), out.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr(),
            0 if bias is None else bias.data_ptr(), current_stream(ordinal),
        )

    run.native_launch = launch.native_launch(["a", "b", "d", "scale_a", "scale_b", "bias"])
    return run
