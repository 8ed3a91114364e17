"""Clocks and power limit of a GPU, from NVML, through the package nvidia-ml-py.

NVML numbers all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES, so a GPU is found by its
UUID. Without NVML the results are 0, and one warning has the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger("stoneware.measuring")


def power_limit_w(ordinal: int) -> int:
    """Power limit of the board in watts; 0 if unknown."""
    milliwatts = _query(ordinal, lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementLimit(handle))
    return round(milliwatts / 1000)


def sm_clock_mhz(ordinal: int) -> int:
    """Current clock of the SMs; 0 if unknown."""
    return _query(ordinal, lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))


def memory_clock_mhz(ordinal: int) -> int:
    """Current clock of the memory; 0 if unknown."""
    return _query(ordinal, lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))


def _query(ordinal: int, query: Callable[[Any, Any], int]) -> int:
    nvml, handle = library_and_handle(ordinal) or (None, None)
    if nvml is None:
        return 0
    try:
        return int(query(nvml, handle))
    except nvml.NVMLError as error:
        _warn(str(error))
        return 0


@functools.cache
def library_and_handle(ordinal: int) -> tuple[Any, Any] | None:
    """(the module pynvml, its handle of the GPU), or None if NVML does not answer."""
    try:
        import pynvml
    except ImportError as error:
        _warn(f"{error}; pip install nvidia-ml-py")
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(ordinal), "uuid", None)
    try:
        pynvml.nvmlInit()
        if uuid is None:
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(ordinal)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        _warn(str(error))
        return None


@functools.cache
def _warn(reason: str) -> None:
    """Cached, so that each reason is logged once per process."""
    _LOG.warning("clocks and power limit of the GPU are not recorded, NVML says: %s", reason)
