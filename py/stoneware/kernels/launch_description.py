"""How a cubin of Triton's is launched: of a kernel built ahead of time, or one that `sw.autotune` kept."""

from __future__ import annotations

from typing import Any

from stoneware.runtime import native
from stoneware.runtime.device import DRIVER_MODULE
from stoneware.runtime.fast_dataclass import dataclass, field_names

INT32_MAX = 2**31 - 1

MAX_GRID_YZ = 65535
"""Blocks along y and z (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

_MAX_BLOCK_THREADS = 1024
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


@dataclass(frozen=True, kw_only=True)
class LaunchDescription:
    """How a cubin is launched.

    Attributes:
      symbol: the kernel's name in the cubin.
      parameters: a letter for each parameter of the cubin (P pointer, i int32, q int64, f float32):
        the arguments, then pointers to Triton's scratch memory, which are null.
      block_threads: threads of a block.
      shared_bytes: dynamic shared memory of a block.
      arguments: names of the arguments; those of a kernel that was built ahead of time are known to
        its op.

    Raises:
      ValueError: a field breaks its rule.
    """

    symbol: str
    parameters: str
    block_threads: int
    shared_bytes: int
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        symbol, parameters, threads, shared = self.symbol, self.parameters, self.block_threads, self.shared_bytes
        for name, is_good, rule in (
            ("symbol", isinstance(symbol, str) and symbol, "a non-empty str"),
            ("parameters", isinstance(parameters, str) and not parameters.strip("Piqf"), "a str of the letters Piqf"),
            (
                "block_threads",
                type(threads) is int and 1 <= threads <= _MAX_BLOCK_THREADS,
                f"an int from 1 to {_MAX_BLOCK_THREADS}",
            ),
            ("shared_bytes", type(shared) is int and 0 <= shared <= INT32_MAX, f"an int from 0 to {INT32_MAX}"),
            (
                "arguments",
                isinstance(self.arguments, tuple) and all(isinstance(name, str) for name in self.arguments),
                "a list of str",
            ),
        ):
            if not is_good:
                raise ValueError(f"{name}={getattr(self, name)!r:.300} must be {rule}")

    @classmethod
    def from_json(cls, data: Any) -> LaunchDescription:
        """Reads the fields of a JSON object, which may have more; raises ValueError."""
        *names, _ = field_names(cls)
        if not isinstance(data, dict) or not data.keys() >= set(names):
            raise ValueError(f"a launch must be a JSON object with {', '.join(names)}; found {data!r:.300}")
        arguments = data.get("arguments", [])
        if isinstance(arguments, list):
            arguments = tuple(arguments)
        return cls(**{name: data[name] for name in names}, arguments=arguments)

    def num_scratch(self, num_arguments: int) -> int:
        """The number of scratch pointers after `num_arguments` arguments; raises ValueError if
        other parameters follow."""
        scratch = self.parameters[num_arguments:]
        if len(self.parameters) < num_arguments or scratch.strip("P"):
            raise ValueError(f"parameters={self.parameters!r} must be {num_arguments} arguments and then only pointers")
        return len(scratch)

    def load(self, cubin: bytes) -> Any:
        """The driver module's Kernel; the GPU is touched at the first launch.

        Raises:
          UnsupportedError: the driver module is missing.
          TypeError, ValueError: it refuses the description, or the bytes are no cubin.
        """
        kernel = native.load(DRIVER_MODULE).Kernel
        return kernel(cubin, self.symbol, self.parameters, self.block_threads, self.shared_bytes)
