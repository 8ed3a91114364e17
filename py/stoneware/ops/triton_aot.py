"""Backend of an op's Triton kernels, compiled during the build for sm_80 to sm_120.

The kernel is `triton_kernel.py` in the op's folder; Triton itself is not needed. Its parameters are
the tensors in the order of a plan, m, n, k, lda, ldb, ldd, the op's `flags`, and has_bias if the op
has a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stoneware.kernels.config import TRITON_AOT, Config
from stoneware.ops.backend import Backend, Plan
from stoneware.runtime.device import Device
from stoneware.specs.op_spec import OpSpec

_MULTIPLE = 16
"""Required multiple of n, k and the leading dimensions. The kernels are compiled for this alignment; without it they
would load and store two bytes at a time instead of sixteen."""


class TritonAot(Backend):
    """The op's Triton kernels.

    Args:
      spec: of the op.
      flags: further int32 parameters of the kernel, by problem.
    """

    name = TRITON_AOT

    def __init__(self, spec: OpSpec, flags: Callable[[Any], Sequence[int]] = lambda problem: ()) -> None:
        self._order, self._flags = spec.plan_order, flags

    def supports(self, problem: Any, device: Device) -> str | None:
        from stoneware.kernels import aot_kernels  # the first call of another backend needs none

        reason = aot_kernels.why_unusable(problem.key, device)
        if reason is not None:
            return reason
        if getattr(problem, "accumulate", False):
            return f"{self.name} has no kernel that adds to out; use another backend"
        if getattr(problem, "batch", 1) != 1:
            return f"batch={problem.batch} must be 1 for {self.name}, whose kernels compute one matmul"
        for name in ("n", "k", "lda", "ldb", "ldd"):
            value = getattr(problem, name)
            if value % _MULTIPLE:
                remedy = "pass an out with such rows, or none" if name == "ldd" else "pad the tensors"
                return f"{name}={value} must be a multiple of {_MULTIPLE} for {self.name}; {remedy}"
        if not getattr(problem, "is_aligned", True):
            return f"a, b and out must begin at multiples of 16 bytes for {self.name}; copy the views"
        return None

    def configs(self, problem: Any, device: Device) -> list[Config]:
        """One config per kernel that fits, the one whose tile suits m first."""
        from stoneware.kernels import aot_kernels

        return aot_kernels.configs(problem.key, device)

    def plan(self, problem: Any, config: Config, device: Device) -> Plan:
        from stoneware.kernels import aot_kernels

        num_tensors = len(self._order)
        arguments: list[Any] = [("address", position) for position in range(num_tensors)]
        arguments += [problem.m, problem.n, problem.k, problem.lda, problem.ldb, problem.ldd, *self._flags(problem)]
        if "bias" in self._order:
            arguments.append(("presence", self._order.index("bias")))
        kernel = aot_kernels.load(config.kernel, len(arguments))
        grid = (kernel.grid_x(problem.m, problem.n), 1, 1)
        return aot_kernels.plan(device, num_tensors, [(kernel, grid, arguments)])
