"""Backend of Triton kernels compiled during the build: fp8 scaled matmul, sm_80 to sm_120.

The kernel is triton_kernel.py beside this file; Triton itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoneware.kernels import aot_kernels
from stoneware.kernels.config import Config
from stoneware.ops.scaled_mm.problem import Problem
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = aot_kernels.BACKEND

_NUM_ARGUMENTS = 15  # of scaled_mm in triton_kernel.py, its constants not counted

_LDD_MULTIPLE = 16
"""Triton knows one promise of alignment, multiples of 16; without it, stores are two bytes each."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    if problem.ldd % _LDD_MULTIPLE:
        return (
            f"ldd={problem.ldd} must be a multiple of {_LDD_MULTIPLE} for {NAME}; "
            "pass an out with such rows, or none"
        )
    return aot_kernels.why_unusable(problem.key, device)


def configs(problem: Problem, device: Device) -> list[Config]:
    """One config per kernel that fits, the one whose tile suits m first."""
    return aot_kernels.configs(problem.key, device)


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, scale_a, scale_b, bias), which launches on torch's current stream.

    Raises:
      UnsupportedError, TableError: see `aot_kernels.load`.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    kernel = aot_kernels.load(config.kernel, _NUM_ARGUMENTS)
    launch, ordinal = kernel.launch, device.ordinal
    grid_x = kernel.grid_x(problem.m, problem.n)
    sizes_and_strides = (
        problem.m,
        problem.n,
        problem.k,
        problem.lda,
        problem.ldb,
        problem.ldd,
        int(problem.scale_a == "row"),
        int(problem.scale_b == "row"),
    )
    scratch = (0,) * kernel.num_scratch

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        launch(
            ordinal,
            current_stream(ordinal),
            grid_x,
            1,
            1,
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            scale_a.data_ptr(),
            scale_b.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *sizes_and_strides,
            int(bias is not None),
            *scratch,
        )

    return run
