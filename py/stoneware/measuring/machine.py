"""What a measurement records about the machine: GPU, driver, clocks, power limit, versions."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import re
import secrets
from pathlib import Path
from typing import Any

import torch

from stoneware.runtime.device import DeviceFingerprint, cuda_device
from stoneware.runtime.nvml import library_and_handle, memory_clock_mhz, power_limit_w, sm_clock_mhz
from stoneware.tuning.samples import Run

UNKNOWN = "unknown"


def describe(ordinal: int) -> dict[str, Any]:
    """GPU, driver, versions and clocks, as JSON values."""
    properties = torch.cuda.get_device_properties(ordinal)
    return {
        "gpu": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "power_limit_w": power_limit_w(ordinal) or UNKNOWN,
        "driver": driver(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda or UNKNOWN,
        "triton": version_of("triton"),
        "stoneware": version_of("stoneware"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sm_clock_mhz": sm_clock_mhz(ordinal),
        "memory_clock_mhz": memory_clock_mhz(ordinal),
    }


def driver() -> str:
    """Version of the kernel driver, such as "580.65.06"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""  # as in some containers
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    if found:
        return found.group(1)
    asked = library_and_handle(0)
    return UNKNOWN if asked is None else str(asked[0].nvmlSystemGetDriverVersion())


def version_of(distribution: str) -> str:
    """Version of an installed distribution, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def fingerprint(ordinal: int) -> DeviceFingerprint:
    """The GPU's fingerprint with its power limit; raises as `cuda_device`."""
    known = cuda_device(ordinal).fingerprint
    assert known is not None  # only a CPU has none
    return dataclasses.replace(known, power_limit_w=power_limit_w(ordinal))


def new_run(ordinal: int, command: str, commit: str = UNKNOWN) -> Run:
    """The record of a run that begins now on this GPU; its clocks at the end are not known yet.

    Args:
      ordinal: torch's number of the GPU.
      command: as it was typed, without folders of this machine.
      commit: of the repository that the kernels are from.
    """
    now = datetime.datetime.now(datetime.UTC)
    device = fingerprint(ordinal)
    name = device.name.lower().replace(" ", "_")
    return Run(
        # Random digits: ranks and processes that start within a second are different runs.
        id=f"{now:%Y-%m-%dT%H%M%SZ}-{name}-{secrets.token_hex(2)}",
        device=device,
        driver=driver(),
        cuda=torch.version.cuda or UNKNOWN,
        torch=torch.__version__,
        triton=version_of("triton"),
        python=platform.python_version(),
        sm_clock_mhz_before=sm_clock_mhz(ordinal),
        sm_clock_mhz_after=0,
        memory_clock_mhz_before=memory_clock_mhz(ordinal),
        memory_clock_mhz_after=0,
        date=now.isoformat(timespec="seconds"),
        commit=commit,
        command=command,
    )


def end_run(run: Run, ordinal: int) -> Run:
    """The run with its clocks at the end, which is now."""
    return dataclasses.replace(
        run, sm_clock_mhz_after=sm_clock_mhz(ordinal), memory_clock_mhz_after=memory_clock_mhz(ordinal)
    )
