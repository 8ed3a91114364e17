"""Triton kernels that were compiled during the build: which of them fit a GPU, and how to launch
one.

A kernel is two files, `cubins/<id>.cubin` and `cubins/<id>.json`; the manifest has the digests
of both. Triton is not needed, and is not imported, to run them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stoneware.errors import TableError
from stoneware.kernels import manifest, tile_rule
from stoneware.kernels.config import TRITON_AOT, Config
from stoneware.kernels.key import Key
from stoneware.kernels.launch_description import INT32_MAX, LaunchDescription
from stoneware.kernels.manifest import KernelRecord
from stoneware.runtime import native, package_files
from stoneware.runtime.device import DRIVER_MODULE, Device
from stoneware.runtime.fast_dataclass import dataclass

BACKEND = TRITON_AOT

FIRST_EXACT_MAJOR = 9
"""From this major on Triton compiles for the arch-specific target (sm_90a, sm_100a, sm_120a), and
such a cubin runs on that very compute capability alone (CUDA C++ Programming Guide, "Feature Set
Compiler Targets"; triton/backends/nvidia/compiler.py, sm_arch_from_capability)."""


def fits(built_for: tuple[int, int], compute_capability: tuple[int, int]) -> bool:
    """Whether a cubin for `built_for` runs on a GPU of `compute_capability`."""
    if built_for[0] >= FIRST_EXACT_MAJOR:
        return built_for == compute_capability
    return built_for[0] == compute_capability[0] and built_for[1] <= compute_capability[1]


def built_for(op: str, compute_capability: tuple[int, int]) -> tuple[int, int] | None:
    """For which compute capability the kernels are built that this GPU runs; None if none fits.

    Where several fit it is the highest: an sm_86 GPU runs the kernels for sm_86, not also those for
    sm_80, which would run there too.
    """
    return max((arch for arch in _by_arch(op) if fits(arch, compute_capability)), default=None)


def configs(key: Key, device: Device) -> list[Config]:
    """One config per kernel that runs the problem on the device, the best tile for its m first."""
    arch = built_for(key.op, device.compute_capability)
    if arch is None:
        return []
    kernels = [kernel for kernel in _by_arch(key.op)[arch] if _counts_in_32_bits(kernel, key)]
    return tile_rule.by_tile_m(key, arch, kernels)


def why_unusable(key: Key, device: Device) -> str | None:
    """None if a kernel can run the problem on the device; otherwise the reason."""
    if device.kind != "cuda":
        return f"{BACKEND} runs on NVIDIA GPUs, and the device is {device}"
    if not device.is_described and (reason := native.why_missing(DRIVER_MODULE)):
        return reason
    arch = built_for(key.op, device.compute_capability)
    if arch is None:
        archs = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(_by_arch(key.op)))
        major, minor = device.compute_capability
        return (
            f"compute capability {major}.{minor} runs no {BACKEND} kernel of {key.op}; the wheel "
            f"has them for {archs or 'no GPU'} (those from sm_{FIRST_EXACT_MAJOR}0 on run on exactly "
            "that capability, earlier ones from there up within the major); build the wheel for this "
            "arch"
        )
    fitting = [kernel for kernel in _by_arch(key.op)[arch] if tile_rule.fits(kernel, key, arch)]
    if not any(_counts_in_32_bits(kernel, key) for kernel in fitting):
        if fitting:
            return (
                f"{key.shape} must be below 2**31 in each size plus a tile, and have fewer than "
                f"2**31 tiles, because {BACKEND} counts both in 32 bits; split the problem"
            )
        if "block" in key.scales:
            return f"{BACKEND} has no {key.op} kernel with block scales; quantize with row or tensor scales"
        return (
            f"{BACKEND} has no {key.op} kernel for {key.a_dtype} x {key.b_dtype} -> "
            f"{key.out_dtype}, layout {key.layout}; cast or copy the tensors, or take another "
            "backend"
        )
    return None


def _counts_in_32_bits(kernel: KernelRecord, key: Key) -> bool:
    """Whether the kernel's int32 hold every index of the problem, and a grid its tiles.

    Sizes and leading dimensions are 32-bit parameters ("i"), and so is the grid. Indices go up to the
    end of the last tile, which is past the end of the matrix.
    """
    tile_m, tile_n, tile_k = kernel.config["tile"]
    num_tiles = -(-key.m // tile_m) * -(-key.n // tile_n)
    return num_tiles <= INT32_MAX and (max(key.m + tile_m, key.n + tile_n, key.k + tile_k) <= INT32_MAX + 1)


def _by_arch(op: str) -> Mapping[tuple[int, int], Sequence[KernelRecord]]:
    return manifest.packaged().by_arch(op=op, backend=BACKEND)


@dataclass(frozen=True)
class AotKernel:
    """A kernel ready to launch.

    Attributes:
      kernel: the native module's.
      tile: (m, n, k), in the caller's orientation also where the kernel works on the transpose.
      num_scratch: how many null pointers follow the arguments (Triton's scratch memory, unused).
    """

    kernel: Any
    tile: tuple[int, int, int]
    num_scratch: int

    def grid_x(self, m: int, n: int) -> int:
        """One program per output tile."""
        return -(-m // self.tile[0]) * -(-n // self.tile[1])


def plan(
    device: Device, num_tensors: int, steps: Sequence[tuple[AotKernel, tuple[int, int, int], Sequence[Any]]]
) -> Any:
    """Makes a plan that launches kernels one after another and takes `num_tensors` tensors.

    Args:
      device: where.
      num_tensors: that a call of the plan takes; each may be None.
      steps: (kernel, grid, arguments) of each launch. An argument is a number, ("address", i) for the
        address of tensor i, or ("presence", i) for 1 if there is one, else 0.
    """
    ordinal = device.ordinal
    assert ordinal is not None  # of a GPU that is here
    packed = [(kernel.kernel, grid, [*arguments, *[0] * kernel.num_scratch]) for kernel, grid, arguments in steps]
    return native.plan(native.load(DRIVER_MODULE).Plan(ordinal, num_tensors, packed), ordinal)


@functools.cache
def load(kernel_id: str, num_arguments: int) -> AotKernel:
    """Reads the kernel's files, once per process; the GPU is touched only at the first launch.

    Args:
      kernel_id: its id in the manifest.
      num_arguments: the number of arguments that the caller passes, without scratch pointers.

    Raises:
      UnsupportedError: the manifest has no such kernel, or the driver module is missing.
      TableError: the files are not those that the manifest describes.
    """
    record = manifest.packaged().kernel(kernel_id, BACKEND)
    cubin_path = package_files.path("cubins", f"{kernel_id}.cubin")
    json_path = package_files.path("cubins", f"{kernel_id}.json")
    cubin, text = (
        package_files.read_listed(cubin_path, record.sha256),
        package_files.read_listed(json_path, record.description_sha256),
    )
    try:
        description = LaunchDescription.from_json(json.loads(text))
        return AotKernel(
            tile=tile_rule.extents(record, "tile"),
            num_scratch=description.num_scratch(num_arguments),
            kernel=description.load(cubin),
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise TableError(
            f"{json_path}: it and the manifest do not describe a kernel that can be launched: {error}; "
            f"{package_files.REMEDY}"
        ) from error
