"""The machine of a benchmark or a check and the kernels that it runs, as their documents have them.

python -m tools.gpu_check.machine prints both for all GPUs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stoneware.kernels import aot_kernels, manifest
from stoneware.kernels.manifest import KernelRecord
from stoneware.measuring.machine import UNKNOWN, driver, version_of
from stoneware.runtime.nvml import memory_clock_mhz, power_limit_w, sm_clock_mhz


def describe(ordinal: int | None) -> dict[str, Any]:
    """GPU, driver, versions and clocks, as JSON values; None: no GPU."""
    machine = {
        "gpu": "none",
        "power_limit_w": UNKNOWN,
        "driver": "none",
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda or UNKNOWN,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "stoneware": version_of("stoneware"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sm_clock_mhz": 0,
        "memory_clock_mhz": 0,
    }
    if ordinal is None:
        return machine
    properties = torch.cuda.get_device_properties(ordinal)
    return machine | {
        "gpu": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "power_limit_w": power_limit_w(ordinal) or UNKNOWN,
        "driver": driver(),
        "sm_clock_mhz": sm_clock_mhz(ordinal),
        "memory_clock_mhz": memory_clock_mhz(ordinal),
    }


def runnable(kernels: Iterable[KernelRecord], capability: tuple[int, int]) -> list[KernelRecord]:
    """Those that a GPU of this compute capability runs: Triton's for the nearest one below, all others for itself."""
    kernels = list(kernels)
    nearest: dict[str, tuple[int, int]] = {}
    for kernel in kernels:
        if kernel.backend == aot_kernels.BACKEND and aot_kernels.fits(kernel.compute_capability, capability):
            nearest[kernel.op] = max(nearest.get(kernel.op, (0, 0)), kernel.compute_capability)
    return [
        kernel
        for kernel in kernels
        if kernel.compute_capability
        == (nearest.get(kernel.op) if kernel.backend == aot_kernels.BACKEND else capability)
    ]


def digests(kernels: Iterable[KernelRecord], capabilities: Iterable[Sequence[int]]) -> dict[str, str]:
    """Id -> digest of the code, of the kernels that GPUs of these compute capabilities run."""
    kernels = list(kernels)
    run = [kernel for major, minor in capabilities for kernel in runnable(kernels, (major, minor))]
    return {kernel.id: kernel.measured_sha256 for kernel in sorted(run, key=lambda kernel: kernel.id)}


def packaged_digests(gpus: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The same of the installed wheel; without a GPU, none."""
    capabilities = [gpu["compute_capability"] for gpu in gpus if "compute_capability" in gpu]
    return digests(manifest.packaged().kernels.values(), capabilities) if capabilities else {}


if __name__ == "__main__":
    gpus = [describe(ordinal) for ordinal in range(torch.cuda.device_count())]
    print(json.dumps({"gpus": gpus, "kernels": packaged_digests(gpus)}))
