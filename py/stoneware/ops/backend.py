"""The interface of an op's backends, and the two backends that run torch's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch

from stoneware.kernels.config import REFERENCE, VENDOR, Config
from stoneware.kernels.manifest import KernelRecord
from stoneware.ops.native_call import Direct
from stoneware.runtime.device import Device

Plan = Callable[..., None]
"""Takes the op's tensors in the order of its spec's `plan_order`, and launches on torch's current
stream."""


class Conversion(NamedTuple):
    """Work of a plan at each call before its kernel, for a layout that its key does not contain.

    Attributes:
      text: a clause: the work, its cost, the remedy.
      us: microseconds that this adds to the measured time.
    """

    text: str
    us: float


class TorchPlan(Protocol):
    """A plan that runs torch's own kernels.

    Attributes:
      direct: the same for calls without out, or None.
    """

    direct: Direct | None

    def __call__(self, *tensors: Any) -> None: ...


def torch_plan(run: Any, direct: Direct | None = None) -> TorchPlan:
    """The function as a TorchPlan: a call through an object with a method would be another call."""
    run.direct = direct
    plan: TorchPlan = run
    return plan


def is_torch_plan(plan: Plan) -> TypeGuard[TorchPlan]:
    return hasattr(plan, "direct")


class Backend:
    """One way to run an op's problems.

    A device may be described only, without hardware: `supports` and `configs` then answer for this
    installation on such a device.
    """

    name: str

    def supports(self, problem: Any, device: Device) -> str | None:
        """Why the backend cannot run the problem, with the value; None if it can."""
        raise NotImplementedError

    def configs(self, problem: Any, device: Device) -> list[Config]:
        """The candidates for a supported problem, the canonical config first."""
        raise NotImplementedError

    def runs(self, problem: Any, kernel: KernelRecord) -> bool | None:
        """Whether `configs` of a supported problem include this kernel; None if only `configs` can answer."""
        return None

    def conversion(self, problem: Any) -> Conversion | None:
        """What the plan of a supported problem converts at each call, or None."""
        return None

    def may_have_our_bits(self, problem: Any) -> bool:
        """Whether the vendor's kernels may be bitwise equal to ours (`vendor_bits.py`)."""
        return False

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        """The plan of a config for a problem.

        Raises:
          UnsupportedError, TableError: the kernel cannot be loaded.
        """
        raise NotImplementedError


class TorchBackend(Backend):
    """A backend with one config, which runs torch's kernels; the vendor library runs on GPUs only.

    Attributes:
      config: the config.
      make_plan: problem -> plan.
    """

    def __init__(self, config: Config, make_plan: Callable[[Any], Plan]) -> None:
        self.name = config.backend
        self.config, self.make_plan = config, make_plan

    def supports(self, problem: Any, device: Device) -> str | None:
        if self.name == VENDOR and device.kind != "cuda":
            return f"{self.config.kernel} is the vendor library on GPUs only, the device is {device}"
        return self.why_not(problem, device)

    def why_not(self, problem: Any, device: Device) -> str | None:
        """Further reasons why it cannot run the problem, or None."""
        return None

    def configs(self, problem: Any, device: Device) -> list[Config]:
        return [self.config]

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        return self.make_plan(problem)


def reference(make_plan: Callable[[Any], Plan]) -> TorchBackend:
    """The backend in plain torch, on any device: accurate, but slow; in float32."""

    def make(problem: Any) -> Plan:
        return without_autocast(make_plan(problem))

    return TorchBackend(Config(backend=REFERENCE, kernel="torch.matmul_float32"), make)


Run = TypeVar("Run", bound=Callable[..., Any])


def without_autocast(run: Run) -> Run:
    """Decorates a function whose first argument is a tensor: torch.autocast does not change the dtypes of its
    matmuls."""

    @functools.wraps(run)
    def plain(first: torch.Tensor, *others: Any) -> Any:
        if not torch.is_autocast_enabled(first.device.type):
            return run(first, *others)
        with torch.autocast(first.device.type, enabled=False):
            return run(first, *others)

    return cast(Run, plain)
