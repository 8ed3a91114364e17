"""The record of a run: GPU, driver, versions, and the clocks at its start and end."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import secrets

import torch

from stoneware.runtime.device import cuda_device
from stoneware.runtime.nvml import library_and_handle, memory_clock_mhz, power_limit_w, sm_clock_mhz
from stoneware.tuning.samples import Run

UNKNOWN = "unknown"


def driver() -> str:
    """Version of the kernel driver, such as "580.65.06"."""
    library = library_and_handle(0)
    return UNKNOWN if library is None else str(library[0].nvmlSystemGetDriverVersion())


def version_of(distribution: str) -> str:
    """Version of an installed distribution, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def new_run(ordinal: int, command: str, commit: str = UNKNOWN) -> Run:
    """A run that begins now on this GPU; `end_run` adds the clocks at its end."""
    now = datetime.datetime.now(datetime.UTC)
    device = cuda_device(ordinal).fingerprint
    assert device is not None  # only a CPU has none
    name = device.name.lower().replace(" ", "_")
    return Run(
        # Random digits: ranks and processes that start within a second are different runs.
        id=f"{now:%Y-%m-%dT%H%M%SZ}-{name}-{secrets.token_hex(2)}",
        device=dataclasses.replace(device, power_limit_w=power_limit_w(ordinal)),
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
    """The run that ends now."""
    return dataclasses.replace(
        run, sm_clock_mhz_after=sm_clock_mhz(ordinal), memory_clock_mhz_after=memory_clock_mhz(ordinal)
    )
