"""GPU models by name, with the properties that the driver reports: to explain a choice without having the GPU."""

from __future__ import annotations

import re

from stoneware.runtime.device import DeviceFingerprint, normalized_name
from stoneware.runtime.fast_dataclass import dataclass


@dataclass(frozen=True)
class GpuModel:
    """A GPU model.

    Attributes:
      fingerprint: its properties; the power limit is unknown.
      aliases: other names.
    """

    fingerprint: DeviceFingerprint
    aliases: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fingerprint.name, *self.aliases)

    @property
    def short_name(self) -> str:
        """Its name in lists."""
        return self.aliases[0] if self.aliases else self.fingerprint.name.removeprefix("NVIDIA ")


def _model(
    name: str, capability: tuple[int, int], num_sms: int, l2_bytes: int, memory_khz: int, *aliases: str
) -> GpuModel:
    fingerprint = DeviceFingerprint(
        name=name, compute_capability=capability, num_sms=num_sms, l2_bytes=l2_bytes, memory_clock_khz=memory_khz
    )
    return GpuModel(fingerprint, aliases)


A100 = _model("NVIDIA A100-SXM4-80GB", (8, 0), 108, 41943040, 1593000, "A100")
A10 = _model("NVIDIA A10", (8, 6), 72, 6291456, 6251000)
L40S = _model("NVIDIA L40S", (8, 9), 142, 100663296, 9001000)
L4 = _model("NVIDIA L4", (8, 9), 58, 50331648, 6251000)
RTX_4090 = _model("NVIDIA GeForce RTX 4090", (8, 9), 128, 75497472, 10501000, "RTX 4090", "RTX4090")
H100 = _model("NVIDIA H100 80GB HBM3", (9, 0), 132, 52428800, 2619000, "H100")
H100_PCIE = _model("NVIDIA H100 PCIe", (9, 0), 114, 52428800, 1593000)
H200 = _model("NVIDIA H200", (9, 0), 132, 62914560, 3201000)
B200 = _model("NVIDIA B200", (10, 0), 148, 132644864, 3996000)
RTX_5090 = _model("NVIDIA GeForce RTX 5090", (12, 0), 170, 100663296, 14001000, "RTX 5090", "RTX5090")

GPU_MODELS = (A100, A10, L40S, L4, RTX_4090, H100, H100_PCIE, H200, B200, RTX_5090)
"""The first of a compute capability represents it."""


def compute_capability(name: str) -> tuple[int, int] | None:
    """The compute capability in a name such as "sm_90", "sm90" or "sm_90a"; None if it is another name."""
    match = re.fullmatch(r"sm ?([0-9]{1,2})([0-9])[af]?", normalized_name(name))
    return (int(match[1]), int(match[2])) if match else None


def of_compute_capability(capability: tuple[int, int]) -> GpuModel | None:
    """The model that represents a compute capability; None if none does."""
    return next((model for model in GPU_MODELS if model.fingerprint.compute_capability == capability), None)
