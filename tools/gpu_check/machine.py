"""The machine of a benchmark or a check, as its document has it."""

from __future__ import annotations

import platform
from typing import Any

import torch

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
