"""Backend of the CUTLASS kernels for Hopper, embedded in the native module."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stoneware.autotune import tile_rule
from stoneware.autotune.config import Config
from stoneware.errors import TableError, UnsupportedError
from stoneware.ops import split_k
from stoneware.ops.scaled_mm.problem import OP, Problem
from stoneware.runtime import manifest, native, package_files
from stoneware.runtime.device import Device
from stoneware.runtime.manifest import KernelRecord

if TYPE_CHECKING:
    import torch

NAME = "cutlass_sm90"
MODULE = "stoneware.ops._cutlass_sm90"
COMPUTE_CAPABILITY = (9, 0)

CUDA_MAJOR = 13
"""Of the toolkit that makes the cubins (third_party/cuda). Its cubins have a newer ELF ABI than those
of 12.x, and NVIDIA promises that a driver loads cubins of its own major version."""

MAX_EXTENT = 2**31 - 128
"""Of m and n: rounded up to the largest tile they must fit the int32 of a CUTLASS problem shape."""

_LEAST_TILES_OF_SWIZZLE = ((2, 2), (4, 3), (8, 6))
"""(max_swizzle, the fewest tiles along both m and n at which it differs from the one before), from
`get_log_swizzle_size` in cutlass/gemm/kernel/tile_scheduler_params.h of CUTLASS 4.2."""


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
    for name in ("m", "n"):
        if getattr(problem, name) > MAX_EXTENT:
            return (
                f"{name}={getattr(problem, name)} must be at most {MAX_EXTENT} for {NAME}, whose "
                "tiles count in 32 bits; split the problem"
            )
    key = problem.key
    if not any(tile_rule.fits(kernel, key, COMPUTE_CAPABILITY) for kernel in _kernels()):
        return (
            f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype} "
            f"for {key.scales} scales and {key.accumulation} accumulation"
        )
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits, with each number of splits that may be the fastest; the first that has
    CUTLASS's tile scheduler also with each larger swizzle that changes the order of its tiles."""
    found = tile_rule.by_tile_m(problem.key, device.compute_capability, _kernels())
    kernels = manifest.packaged().kernels
    with_splits = [
        replace(config, splits=splits) for config in found
        for splits in split_k.splits_to_time(
            kernels[config.kernel], problem.m, problem.n, problem.k, device.fingerprint.num_sms
        )
    ]
    scheduled = next(
        (config for config in found if not split_k.is_split_k(kernels[config.kernel])), None
    )
    if scheduled is None:
        return with_splits
    built = kernels[scheduled.kernel].config
    along_m, along_n = (problem.n, problem.m) if built["swap_ab"] else (problem.m, problem.n)
    num_tiles = min(-(-along_m // built["tile"][0]), -(-along_n // built["tile"][1]))
    return with_splits + [
        replace(scheduled, max_swizzle=max_swizzle)
        for max_swizzle, least in _LEAST_TILES_OF_SWIZZLE if num_tiles >= least
    ]


def _kernels() -> Sequence[KernelRecord]:
    return manifest.packaged().by_arch(op=OP, backend=NAME).get(COMPUTE_CAPABILITY, ())


@functools.cache
def _check_cubin(kernel: str) -> None:
    """Checks, once per kernel and process, that the module holds the cubin the manifest lists."""
    record = manifest.packaged().kernels.get(kernel)
    if record is None or record.backend != NAME:
        raise UnsupportedError(
            f"kernel={kernel!r} must be the id of a {NAME} kernel in kernel_manifest.json; "
            "stoneware.explain(...) lists those that fit a problem"
        )
    try:
        found = "sha256=" + hashlib.sha256(native.load(MODULE).cubin(kernel)).hexdigest()
    except (AttributeError, ValueError) as error:
        found = f"none: {error}"
    if found != f"sha256={record.sha256}":
        raise TableError(
            f"{MODULE}: expected the cubin of {kernel} with sha256={record.sha256}, as "
            f"kernel_manifest.json says, found {found}; module and manifest are of different "
            f"builds, or damaged; {package_files.REMEDY}"
        )


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, scale_a, scale_b, bias), which launches on torch's current stream.

    Raises:
      UnsupportedError: the manifest has no such kernel, or the native module is missing.
      TableError: the module's cubin is not the one that the manifest lists.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    _check_cubin(config.kernel)
    ordinal = device.ordinal
    block_layouts = {
        name: getattr(problem, name)
        for name in ("scale_a_stride_m", "ld_scale_a", "scale_b_stride_n", "ld_scale_b")
        if problem.scales == "block"
    }
    launch = native.load(MODULE).Plan(
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
