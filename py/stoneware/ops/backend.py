"""What an op asks of each of its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stoneware.kernels.config import Config
from stoneware.runtime.device import Device


class Backend(Protocol):
    """A module `ops/<op>/<backend>.py`.

    `problem` is the Problem of the op. A device may be described only, with no hardware behind it:
    `supports` and `configs` then answer for an installation like this one on that device.

    A backend with many kernels may have `runs(problem, kernel)`, too: whether `configs` has one of
    them, of a problem that is supported.
    """

    NAME: str

    def supports(self, problem: Any, device: Device) -> str | None:
        """None if the backend can run the problem, else why not, with the value."""

    def configs(self, problem: Any, device: Device) -> list[Config]:
        """The candidates for a problem that is supported, the canonical one first."""

    def plan(self, problem: Any, config: Config, device: Device) -> Callable[..., None]:
        """A callable that takes the op's tensors and launches on torch's current stream."""
