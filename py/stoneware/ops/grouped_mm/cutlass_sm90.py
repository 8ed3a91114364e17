"""Backend of the grouped kernels for Hopper, embedded in the native module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stoneware.autotune import tile_rule
from stoneware.autotune.config import Config
from stoneware.ops.grouped_mm.problem import OP, Problem
from stoneware.ops.scaled_mm.cutlass_sm90 import (
    COMPUTE_CAPABILITY, CUDA_MAJOR, MODULE, NAME, _check_cubin,
)
from stoneware.runtime import manifest, native
from stoneware.runtime.device import Device
from stoneware.runtime.manifest import KernelRecord

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 1024
"""A block's table of groups in shared memory (kMaxGroups in cc/gemm/grouped_mm_sm90.cuh)."""

MAX_EXTENT = 2**30 - 1
"""Of m, n and k: a tile that reaches over an end still counts in int32 (CanImplement in
cc/gemm/grouped_mm_sm90.cc)."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    if device.compute_capability != COMPUTE_CAPABILITY:
        return f"its kernels are built for sm_90a, compute capability 9.0, the device is {device}"
    missing = None if device.is_described else native.why_missing(MODULE)
    if missing is not None:
        return missing
    driver = device.driver_version
    if driver is not None and driver[0] < CUDA_MAJOR:
        return (
            f"its cubins are of CUDA {CUDA_MAJOR}.0 and the driver serves CUDA {driver[0]}."
            f"{driver[1]}; update the driver"
        )
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
    if not any(tile_rule.fits(kernel, key, COMPUTE_CAPABILITY) for kernel in _kernels()):
        return f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype}"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits."""
    return tile_rule.by_tile_m(problem.key, device.compute_capability, _kernels())


def _kernels() -> Sequence[KernelRecord]:
    return manifest.packaged().by_arch(op=OP, backend=NAME).get(COMPUTE_CAPABILITY, ())


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, offs, scale_a, scale_b), which launches on torch's current stream and
    waits for nothing.

    Raises:
      UnsupportedError: the manifest has no such kernel, or the native module is missing.
      TableError: the module's cubin is not the one that the manifest lists.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    _check_cubin(config.kernel)
    ordinal = device.ordinal
    launch = native.load(MODULE).Plan(
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

    return run
