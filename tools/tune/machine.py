"""What a measurement records about the machine: GPU, driver, clocks, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

UNKNOWN = "unknown"


def describe(ordinal: int) -> dict[str, Any]:
    """GPU, driver, versions and clocks, as JSON values; what cannot be found out is "unknown"."""
    properties = torch.cuda.get_device_properties(ordinal)
    sm_clock_mhz, memory_clock_mhz = clocks_mhz(ordinal)
    return {
        "gpu": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "power_limit_w": _nvidia_smi(ordinal, "power.limit"),
        "driver": driver(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda or UNKNOWN,
        "triton": version_of("triton"),
        "stoneware": version_of("stoneware"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sm_clock_mhz": sm_clock_mhz,
        "memory_clock_mhz": memory_clock_mhz,
    }


def clocks_mhz(ordinal: int) -> tuple[int, int]:
    """Clocks of the SMs and of the memory at this moment; 0 where unknown."""
    sm_clock, memory_clock = _nvidia_smi(ordinal, "clocks.sm"), _nvidia_smi(ordinal, "clocks.mem")
    return _mhz(sm_clock), _mhz(memory_clock)


def _mhz(text: str) -> int:
    return int(text) if text.isdigit() else 0


def driver() -> str:
    """Version of the kernel driver, such as "580.65.06"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return _nvidia_smi(0, "driver_version")
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else UNKNOWN


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _nvidia_smi(ordinal: int, field: str) -> str:
    # By UUID, since CUDA_VISIBLE_DEVICES renumbers torch's GPUs and not those of nvidia-smi.
    uuid = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    which = f"GPU-{uuid}" if uuid is not None else str(ordinal)
    command = [
        "nvidia-smi",
        f"--id={which}",
        f"--query-gpu={field}",
        "--format=csv,noheader,nounits",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return result.stdout.strip() or UNKNOWN
