"""A fake GPU for tests of sw.autotune: Triton really compiles, nothing is run.

Stands in for Triton's driver, for `_driver`, for the functions of torch.cuda in use, and for tensors on
the GPU. Both stand-ins record each launch, so that a test sees who launched what, and with what.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from stoneware.kernels import launch_description
from stoneware.runtime.device import DeviceFingerprint
from stoneware.triton_autotune import decorator, plan

FINGERPRINT = DeviceFingerprint(
    name="Test GPU", compute_capability=(9, 0), num_sms=132, l2_bytes=50 << 20, memory_clock_khz=3_201_000
)
STREAM = 77


class Tensor:
    """As much of a tensor on a GPU as a launch looks at."""

    is_cuda = True

    def __init__(self, address: int = 4096, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self._address = dtype, address
        self.log: list[str] = []

    def data_ptr(self) -> int:
        return self._address

    def zero_(self) -> None:
        self.log.append("zeroed")

    def clone(self) -> Tensor:
        self.log.append("cloned")
        return Tensor(self._address, self.dtype)

    def copy_(self, other: Tensor) -> None:
        self.log.append("restored")


class _Launcher:
    """Triton's way to launch: (grid, stream, function, metadata, ..., arguments)."""

    def __init__(self, gpu: FakeGpu, source: Any) -> None:
        self._gpu, self._source = gpu, source

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        names = self._source.signature
        self._gpu.triton_launches.append(((x, y, z), dict(zip(names, rest[-len(names) :]))))
        self._gpu.order.append("triton")


class FakeGpu:
    """One GPU of compute capability 9.0.

    Attributes:
      launches: of `_driver`: (symbol, device, stream, grid, arguments).
      triton_launches: by Triton: (grid, arguments by name).
      order: "ours" and "triton", in the order of the launches.
      compiled: how many cubins Triton loaded.
      max_shared: bytes of shared memory of a block.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.triton_launches: list[tuple[Any, ...]] = []
        self.order: list[str] = []
        self.compiled = 0
        self.max_shared = 232448
        self.ordinal = 0
        self.capability = (9, 0)
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": self.max_shared},
            load_binary=self._load_binary,
            unload_module=lambda module: None,
        )

    def _load_binary(self, *_: Any) -> tuple[Any, ...]:
        self.compiled += 1
        return object(), object(), 32, 0, 1024

    # Triton's driver.
    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        return _Launcher(self, source)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)

    def get_current_device(self) -> int:
        return self.ordinal

    def get_current_stream(self, device: int) -> int:
        return STREAM

    # _driver.
    def Kernel(self, cubin: bytes, symbol: str, parameters: str, *_: Any) -> Any:
        def launch_kernel(device: int, stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
            assert len(arguments) == len(parameters)
            self.launches.append((symbol, device, stream, (x, y, z), arguments))
            self.order.append("ours")

        return types.SimpleNamespace(launch=launch_kernel)

    def install(self, monkeypatch: Any) -> None:
        """For the test that `monkeypatch` belongs to."""
        from triton.compiler import compiler
        from triton.runtime.driver import driver

        compiler.max_shared_mem.cache_clear()
        monkeypatch.setattr(driver, "_active", self)
        monkeypatch.setattr(driver, "_default", self)
        monkeypatch.setattr(launch_description, "native", types.SimpleNamespace(load=lambda name: self))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(decorator, "_current_device", lambda: self.ordinal)
        monkeypatch.setattr(decorator, "_fingerprint", lambda ordinal: FINGERPRINT)
        gpu = self

        def start(fast: plan.FastPath) -> bool:
            fast._tensor_types = frozenset((Tensor,))
            fast._device, fast.stream = (lambda: gpu.ordinal), (lambda device: STREAM)
            return fast._is_possible

        is_started = functools.cached_property(start)
        is_started.__set_name__(plan.FastPath, "_is_started")
        monkeypatch.setattr(plan.FastPath, "_is_started", is_started)
