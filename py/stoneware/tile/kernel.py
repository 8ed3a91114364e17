"""Launches a linked kernel on torch tensors, through the driver module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stoneware.errors import UnsupportedError, quoted
from stoneware.kernels.launch_description import LaunchDescription
from stoneware.runtime.device import cuda_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from stoneware.tile.ptx import Function


class LinkedKernels(Protocol):
    """What `sw.tile.link` returns."""

    @property
    def cubin(self) -> bytes: ...
    @property
    def arch(self) -> str: ...
    @property
    def kernels(self) -> Mapping[str, Function]: ...
    @property
    def threads(self) -> int: ...


class Kernel:
    """A kernel of a linked module; call it to launch it.

        kernel(a, b, c, n, k, 0.5, grid=(m // 64, n // 64))

    Args:
      linked: of `sw.tile.link`.
      name: the kernel; None if there is one only.
      shared_bytes: dynamic shared memory of a block.
      threads: of a block, along x; None for the matmuls' threads.

    Raises:
      ValueError: an argument breaks its rule, or the kernel has a parameter that is neither a pointer nor a
        number of 32 or 64 bits.
      UnsupportedError: the driver module is missing.
    """

    def __init__(
        self, linked: LinkedKernels, name: str | None = None, *, shared_bytes: int = 0, threads: int | None = None
    ) -> None:
        names = list(linked.kernels)
        if name is None and len(names) == 1:
            name = names[0]
        if name is None or name not in linked.kernels:
            raise ValueError(f"name={quoted(name)} must be one of the linked kernels {', '.join(names)}; pass one")
        function = linked.kernels[name]
        if "?" in function.parameters:
            raise ValueError(
                f"parameter {function.parameters.index('?')} of {name} must be a pointer or a number of 32 or 64 "
                "bits; pass a structure by a pointer to global memory"
            )
        threads = linked.threads if threads is None else threads
        if function.most_threads and threads > function.most_threads:
            raise ValueError(
                f"threads={threads} must be at most {function.most_threads}, the __launch_bounds__ of {name}; raise "
                "these"
            )
        self.name, self.arch, self.parameters = name, linked.arch, function.parameters
        description = LaunchDescription(
            symbol=name, parameters=function.parameters, block_threads=threads, shared_bytes=shared_bytes
        )
        self._launch = description.load(linked.cubin).launch
        self._fitting: set[int] = set()  # devices on which it runs

    def __call__(self, *args: torch.Tensor | int | float, grid: Sequence[int]) -> None:
        """Queues the kernel on torch's current stream of the tensors' device.

        Args:
          *args: one for each parameter: a CUDA tensor or an int for a pointer, an int or a float for a number.
            A pointer is the address of the tensor's first element, whatever its strides.
          grid: blocks along x, or along x and y, or along x, y and z.

        Raises:
          TypeError, ValueError: an argument is missing, of the wrong type, or not on one device.
          UnsupportedError: the kernel was linked for another GPU.
          DriverError: the driver refuses the launch.
        """
        if len(args) != len(self.parameters):
            raise TypeError(
                f"{self.name} must have {len(self.parameters)} arguments, and got {len(args)}; pass one for each "
                f"parameter"
            )
        import torch

        ordinal: int | None = None
        values: list[Any] = []
        for i, (value, letter) in enumerate(zip(args, self.parameters)):
            if isinstance(value, torch.Tensor):
                ordinal = self._checked_tensor(i, value, letter, ordinal)
                values.append(value.data_ptr())
            elif letter == "P" and type(value) is int and value < 0:
                values.append(value % 2**64)
            else:
                values.append(value)
        if ordinal is None:
            ordinal = torch.cuda.current_device()
        if ordinal not in self._fitting:
            self._check_device(ordinal)
            self._fitting.add(ordinal)
        extents = tuple(grid)
        if not 1 <= len(extents) <= 3 or not all(type(extent) is int and extent > 0 for extent in extents):
            raise ValueError(f"grid={quoted(extents)} must be one to three positive ints; pass the number of blocks")
        x, y, z = (*extents, 1, 1)[:3]
        stream = torch.cuda.current_stream(ordinal).cuda_stream
        self._launch(ordinal, stream, x, y, z, *values)

    def _checked_tensor(self, i: int, tensor: torch.Tensor, letter: str, ordinal: int | None) -> int:
        """The ordinal of a tensor's device; raises TypeError or ValueError."""
        if letter != "P":
            raise TypeError(
                f"argument {i} of {self.name} must be a number of 32 bits, and is a tensor; pass tensor.item() or "
                "another argument"
            )
        if tensor.device.type != "cuda":
            raise ValueError(f"argument {i} of {self.name} must be on a GPU, and is on {tensor.device}; move it there")
        if ordinal is not None and tensor.device.index != ordinal:
            raise ValueError(
                f"argument {i} of {self.name} is on {tensor.device}, and an earlier one on cuda:{ordinal}; all "
                "tensors must be on one device, move them"
            )
        return int(tensor.device.index)

    def _check_device(self, ordinal: int) -> None:
        major, minor = cuda_device(ordinal).compute_capability
        number, exact = re.fullmatch(r"sm_(\d+)(a?)", self.arch).groups()  # type: ignore[union-attr]
        built = divmod(int(number), 10)
        fits = built == (major, minor) if exact else built[0] == major and built[1] <= minor
        if not fits:
            raise UnsupportedError(
                f"{self.name} was linked for {self.arch}, and cuda:{ordinal} has compute capability {major}.{minor}; "
                f'describe its matmuls with arch="sm_{major}{minor}{"a" if (major, minor) == (9, 0) else ""}"'
            )
