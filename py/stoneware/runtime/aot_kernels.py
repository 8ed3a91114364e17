"""Triton kernels that were compiled during the build: which of them fit a GPU, and how to launch
one.

A kernel is two files, `kernels/<id>.cubin` and `kernels/<id>.json`; the manifest lists them all
with their digests. Triton is not needed, and is not imported, to run them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from stoneware.autotune import tile_rule
from stoneware.autotune.config import Config
from stoneware.autotune.key import Key
from stoneware.errors import TableError, UnsupportedError
from stoneware.runtime import manifest, native, package_files
from stoneware.runtime.device import DRIVER_MODULE, Device
from stoneware.runtime.manifest import KernelRecord

BACKEND = "triton_aot"

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
    built = {kernel.compute_capability for kernel in _kernels(op)}
    return max((arch for arch in built if fits(arch, compute_capability)), default=None)


def configs(key: Key, device: Device) -> list[Config]:
    """One config per kernel that runs the problem on the device, the best tile for its m first."""
    arch = built_for(key.op, device.compute_capability)
    return [] if arch is None else tile_rule.by_tile_m(key, arch, _kernels(key.op))


def why_unusable(key: Key, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    if device.kind != "cuda":
        return f"{BACKEND} runs on NVIDIA GPUs, and the device is {device}"
    if not device.is_described and (reason := native.why_missing(DRIVER_MODULE)):
        return reason
    if built_for(key.op, device.compute_capability) is None:
        archs = sorted({kernel.compute_capability for kernel in _kernels(key.op)})
        known = ", ".join(f"sm_{major}{minor}" for major, minor in archs)
        major, minor = device.compute_capability
        return (
            f"compute capability {major}.{minor} runs no {BACKEND} kernel of {key.op}; the wheel "
            "has "
            f"them for {known or 'no GPU'} (those from sm_{FIRST_EXACT_MAJOR}0 on run on exactly "
            "that "
            "capability, earlier ones from there up within the major); build the wheel for this "
            "arch"
        )
    if not configs(key, device):
        return (
            f"{BACKEND} has no {key.op} kernel for {key.a_dtype} x {key.b_dtype} -> "
            f"{key.out_dtype}, layout {key.layout}; cast or copy the tensors, or take another "
            "backend"
        )
    return None


def _kernels(op: str) -> list[KernelRecord]:
    return manifest.packaged().select(op=op, backend=BACKEND)


@dataclass(frozen=True)
class AotKernel:
    """A kernel ready to launch.

    Attributes:
      launch: `_driver.Kernel.launch`: (device, stream, grid_x, grid_y, grid_z, *arguments).
      tile: (m, n, k), in the caller's orientation also where the kernel works on the transpose.
      num_scratch: how many null pointers follow the arguments (Triton's scratch memory, unused).
    """

    launch: Any
    tile: tuple[int, int, int]
    num_scratch: int

    def grid_x(self, m: int, n: int) -> int:
        """One program per output tile."""
        return -(-m // self.tile[0]) * -(-n // self.tile[1])


@functools.cache
def load(kernel_id: str, num_arguments: int) -> AotKernel:
    """Reads the kernel's files, once per process; the GPU is touched only at the first launch.

    Args:
      kernel_id: its id in the manifest.
      num_arguments: how many arguments the caller passes, scratch pointers not counted.

    Raises:
      UnsupportedError: the manifest has no such kernel, or the driver module is missing.
      TableError: the files are not those that the manifest describes.
    """
    record = manifest.packaged().kernels.get(kernel_id)
    if record is None or record.backend != BACKEND:
        raise UnsupportedError(
            f"kernel={kernel_id!r} must be the id of a {BACKEND} kernel in kernel_manifest.json; "
            "stoneware.explain(...) lists those that fit a problem"
        )
    cubin_path = package_files.path("kernels", f"{kernel_id}.cubin")
    json_path = package_files.path("kernels", f"{kernel_id}.json")
    try:
        cubin = cubin_path.read_bytes()
        description = json.loads(json_path.read_text(encoding="utf-8"))
        symbol, parameters = description["symbol"], description["parameters"]
        block_threads, shared_bytes = description["block_threads"], description["shared_bytes"]
        tile = tuple(description["config"]["tile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(
            f"{json_path}: kernel {kernel_id} cannot be read: {type(error).__name__}: {error}; "
            f"{package_files.REMEDY}"
        ) from error
    digest = hashlib.sha256(cubin).hexdigest()
    if digest != record.sha256:
        raise TableError(
            f"{cubin_path}: its sha256={digest} must be {record.sha256}, as the manifest says; "
            f"{package_files.REMEDY}"
        )
    scratch = parameters[num_arguments:]
    if len(parameters) < num_arguments or scratch.strip("P"):
        raise TableError(
            f"{json_path}: parameters={parameters!r} must be {num_arguments} arguments and then "
            "only "
            f"pointers; {package_files.REMEDY}"
        )
    kernel = native.load(DRIVER_MODULE).Kernel(
        cubin, symbol, parameters, block_threads, shared_bytes
    )
    return AotKernel(launch=kernel.launch, tile=tile, num_scratch=len(scratch))
