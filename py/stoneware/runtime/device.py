"""Devices: the identity of a GPU to the tuner, its names, and the similarity of two GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from stoneware.runtime.canonical import check_count, check_name
from stoneware.runtime.fast_dataclass import dataclass, field_names

DRIVER_MODULE = "stoneware.runtime._driver"


@dataclass(frozen=True, kw_only=True)
class DeviceFingerprint:
    """The properties of a GPU that decide which config is fast, and its name.

    The name is a label: two GPUs are one device if their numbers agree (`by_hardware`). An H100 and an
    H200 share no entry, nor do an H200 and a slice of it.

    Attributes:
      name: as the driver gives it, such as "NVIDIA H200".
      compute_capability: (major, minor).
      num_sms: streaming multiprocessors.
      l2_bytes: size of the L2 cache.
      memory_clock_khz: peak memory clock.
      power_limit_w: what the board may draw; 0 if unknown. Only NVML provides it, which needs a library
        and time, so it is read only to measure, to explain a measurement, or to distinguish two known
        devices that are otherwise equal.
    """

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    l2_bytes: int
    memory_clock_khz: int
    power_limit_w: int = 0

    def __post_init__(self) -> None:
        capability = self.compute_capability
        if (
            not isinstance(capability, (list, tuple))
            or len(capability) != 2
            or not all(type(part) is int and 0 <= part < 1000 for part in capability)
        ):
            raise ValueError(f"compute_capability={capability!r:.60} must be two integers, as (9, 0)")
        object.__setattr__(self, "compute_capability", tuple(capability))
        check_name("name", self.name)
        for field in ("num_sms", "l2_bytes", "memory_clock_khz", "power_limit_w"):
            check_count(field, getattr(self, field))

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return (
            f"{self.name} (sm_{major}{minor}, {self.num_sms} SMs, "
            f"{self.l2_bytes / 2**20:g} MiB L2, memory at {self.memory_clock_khz / 1000:g} MHz"
            + (f", {self.power_limit_w} W)" if self.power_limit_w else ")")
        )

    @property
    def numbers(self) -> tuple[tuple[int, int], int, int, int]:
        """All but the name and the power limit."""
        return self.compute_capability, self.num_sms, self.l2_bytes, self.memory_clock_khz

    def same_hardware(self, other: DeviceFingerprint) -> bool:
        """Whether the two may be one device: all numbers agree, and an unknown power limit agrees with
        any. This is not transitive; to group devices, use `by_hardware`."""
        return self.numbers == other.numbers and (
            self.power_limit_w == other.power_limit_w or not self.power_limit_w or not other.power_limit_w
        )

    def distance(self, other: DeviceFingerprint) -> float:
        """The sum of |log ratio| of SMs, L2, memory clock and, if both are known, power limit.

        Infinite between compute capabilities: kernels and their speed do not carry over.
        """
        if self.compute_capability != other.compute_capability:
            return math.inf
        compared = ["num_sms", "l2_bytes", "memory_clock_khz"]
        if self.power_limit_w and other.power_limit_w:
            compared.append("power_limit_w")
        return sum(abs(math.log(max(getattr(self, field), 1) / max(getattr(other, field), 1))) for field in compared)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "compute_capability": list(self.compute_capability)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceFingerprint:
        """Makes the fingerprint from `to_json` or from `_driver.device_attributes` (a superset)."""
        names = field_names(cls)
        missing = [name for name in names if name not in data and name != "power_limit_w"]
        if missing:
            raise ValueError(f"a device fingerprint lacks {missing}; found {sorted(data)}")
        return cls(**{name: data[name] for name in names if name in data})


def by_hardware(fingerprints: Iterable[DeviceFingerprint]) -> dict[DeviceFingerprint, DeviceFingerprint]:
    """Each fingerprint -> that of its device; the order does not matter.

    Devices differ in a number or in a known power limit. A fingerprint without a limit joins the only
    device with the same numbers and a known limit; if there are several, it is a separate device.
    A device has the alphabetically first of its names.
    """
    fingerprints = set(fingerprints)
    limits: dict[tuple[Any, ...], set[int]] = {}
    for fingerprint in fingerprints:
        limits.setdefault(fingerprint.numbers, set()).update({fingerprint.power_limit_w} - {0})
    devices: dict[tuple[Any, ...], list[DeviceFingerprint]] = {}
    for fingerprint in fingerprints:
        only, *others = limits[fingerprint.numbers] or {0}
        limit_w = fingerprint.power_limit_w or (0 if others else only)
        devices.setdefault((fingerprint.numbers, limit_w), []).append(fingerprint)
    return {
        fingerprint: replace(fingerprint, name=min(member.name for member in members), power_limit_w=limit_w)
        for (_, limit_w), members in devices.items()
        for fingerprint in members
    }


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a problem runs, or would run.

    Attributes:
      ordinal: torch's and the driver's number of the GPU; None for a CPU and for a GPU that is only
        described (`explain(..., device="NVIDIA H200")`).
      fingerprint: None for a CPU.
      driver_version: (major, minor) of the CUDA version that the driver serves; None without one.
    """

    ordinal: int | None = None
    fingerprint: DeviceFingerprint | None = None
    driver_version: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
        return "cpu" if self.fingerprint is None else "cuda"

    def __str__(self) -> str:
        return "CPU" if self.fingerprint is None else str(self.fingerprint)

    @property
    def is_described(self) -> bool:
        """Whether this is a GPU that is only described, with no hardware behind it."""
        return self.kind == "cuda" and self.ordinal is None

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of a GPU; (0, 0) of a CPU."""
        return (0, 0) if self.fingerprint is None else self.fingerprint.compute_capability


CPU = Device()


@functools.cache
def cuda_device(ordinal: int) -> Device:
    """The GPU with this number, its fingerprint read from the driver once per process.

    Raises:
      DriverError: the driver is missing or refuses.
      UnsupportedError: the driver module is not in this installation.
    """
    from stoneware.runtime import native

    driver = native.load(DRIVER_MODULE)
    return Device(
        ordinal=ordinal,
        fingerprint=DeviceFingerprint.from_json(driver.device_attributes(ordinal)),
        driver_version=tuple(driver.driver_version()),
    )


def normalized_name(name: str) -> str:
    """A device's name for comparisons: the same for "NVIDIA H200", "nvidia_h200" and "H200"."""
    words = name.lower().replace("_", " ").replace("-", " ").split()
    return " ".join(word for word in words if word != "nvidia")
