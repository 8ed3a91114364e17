"""Kernels of the native module for Hopper: which of them can run here, and their cubins.

What every op's backend `sm90.py` asks; what a kernel can compute is the op's to know.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from stoneware.errors import TableError
from stoneware.kernels import manifest
from stoneware.kernels.config import Config
from stoneware.kernels.manifest import KernelRecord
from stoneware.runtime import native, package_files
from stoneware.runtime.device import Device

BACKEND = "sm90"
MODULE = "stoneware.ops._sm90"
COMPUTE_CAPABILITY = (9, 0)

CUDA_MAJOR = 13
"""CUDA version of the toolkit that makes the cubins (third_party/cuda). Its cubins have a newer ELF ABI than those
of 12.x, and NVIDIA promises that a driver loads cubins of its own major version."""

MAX_EXTENT = 2**31 - 128
"""Of m and n: rounded up to the largest tile they must fit the int32 of a CUTLASS problem shape."""

TILE_SCHEDULED = ("pingpong", "cooperative")
"""Schedules whose blocks walk over tiles by CUTLASS's tile scheduler, so that the order of the tiles
is a choice; a block of persistent_mm_sm90.cuh has an order of its own."""

_LEAST_TILES_OF_SWIZZLE = ((2, 2), (4, 3), (8, 6))
"""(max_swizzle, the fewest tiles along both m and n at which it differs from the one before), from
`get_log_swizzle_size` in cutlass/gemm/kernel/tile_scheduler_params.h of CUTLASS 4.2."""


def kernels(op: str) -> Sequence[KernelRecord]:
    """Those of this build."""
    return manifest.packaged().by_arch(op=op, backend=BACKEND).get(COMPUTE_CAPABILITY, ())


def why_unusable(device: Device) -> str | None:
    """None if the device and this installation run kernels of the module; otherwise the reason."""
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
    return None


def swizzled(kernel: KernelRecord, m: int, n: int) -> list[Config]:
    """Configs of the kernel with each larger swizzle that changes the order of its tiles."""
    if kernel.config["schedule"] not in TILE_SCHEDULED:
        return []
    tile_m, tile_n, _ = kernel.config["tile"]
    along_m, along_n = (n, m) if kernel.config.get("swap_ab") else (m, n)
    num_tiles = min(-(-along_m // tile_m), -(-along_n // tile_n))
    return [
        Config.of_kernel(BACKEND, kernel.id, max_swizzle=max_swizzle)
        for max_swizzle, least in _LEAST_TILES_OF_SWIZZLE
        if num_tiles >= least
    ]


@functools.cache
def check_image(kernel: str) -> None:
    """Checks, once per kernel and process, that the module holds the bytes that the manifest lists.

    Raises:
      UnsupportedError: the manifest has no such kernel, or the native module is missing.
      TableError: the module has others.
    """
    record = manifest.packaged().kernel(kernel, BACKEND)
    try:
        found = "sha256=" + hashlib.sha256(native.load(MODULE).image(kernel)).hexdigest()
    except (AttributeError, ValueError) as error:
        found = f"none: {error}"
    if found != f"sha256={record.sha256}":
        raise TableError(
            f"{MODULE}: expected the image of {kernel} with sha256={record.sha256}, as "
            f"kernel_manifest.json says, found {found}; module and manifest are of different "
            f"builds, or damaged; {package_files.REMEDY}"
        )
