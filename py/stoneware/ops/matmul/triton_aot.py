"""Backend of Triton kernels compiled during the build: bf16 and fp16 matmul, sm_80 to sm_120.

The kernel is triton_kernel.py beside this file; Triton itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoneware.kernels import aot_kernels
from stoneware.kernels.config import Config
from stoneware.ops.matmul.problem import Problem
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = aot_kernels.BACKEND

_NUM_ARGUMENTS = 11  # of matmul in triton_kernel.py, its constants not counted

_MULTIPLE = 16
"""Of n, k and the leading dimensions: Triton knows one promise of alignment, and without it the
kernel would load two bytes at a time in place of sixteen."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    reason = aot_kernels.why_unusable(problem.key, device)
    if reason is not None:
        return reason
    if problem.batch != 1:
        return f"batch={problem.batch} must be 1 for {NAME}, whose kernels compute one product"
    for name in ("n", "k", "lda", "ldb", "ldd"):
        value = getattr(problem, name)
        if value % _MULTIPLE:
            return f"{name}={value} must be a multiple of {_MULTIPLE} for {NAME}; pad the tensors"
    if not problem.is_aligned:
        return f"a, b and out must begin at multiples of 16 bytes for {NAME}; copy the views"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    """One config per kernel that fits, the one whose tile suits m first."""
    return aot_kernels.configs(problem.key, device)


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, bias), which launches on torch's current stream.

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
    )
    scratch = (0,) * kernel.num_scratch

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        launch(
            ordinal,
            current_stream(ordinal),
            grid_x,
            1,
            1,
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            *sizes_and_strides,
            int(bias is not None),
            *scratch,
        )

    return run
