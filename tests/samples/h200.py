"""An H200, and runs of the tuner on it, for tests that need some."""

from __future__ import annotations

from typing import Any

from stoneware.runtime.device import DeviceFingerprint
from stoneware.tuning.samples import Run

H200 = DeviceFingerprint(
    name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    l2_bytes=62914560,
    memory_clock_khz=3201000,
    power_limit_w=700,
)


def run(id: str = "run-1", device: DeviceFingerprint = H200, date: str = "2026-11-21", **changes: Any) -> Run:
    """A run with some of its values changed."""
    values: dict[str, Any] = {
        "driver": "580.95",
        "cuda": "13.0",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "python": "3.12.3",
        "sm_clock_mhz_before": 1980,
        "sm_clock_mhz_after": 1965,
        "memory_clock_mhz_before": 3201,
        "memory_clock_mhz_after": 3201,
        "commit": "0" * 40,
        "command": "tune",
    }
    return Run(id=id, device=device, date=date, **values | changes)
