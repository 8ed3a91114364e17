"""Backend of the CUTLASS kernels for Hopper, embedded in the native module: every layout, batches,
and a result of 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoneware.kernels import cutlass_kernels, manifest, split_k, tile_rule
from stoneware.kernels.config import Config
from stoneware.kernels.cutlass_kernels import COMPUTE_CAPABILITY, TILE_SCHEDULED
from stoneware.kernels.manifest import KernelRecord
from stoneware.ops.matmul.problem import OP, WIDE_DTYPE, Problem
from stoneware.runtime import native
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = cutlass_kernels.BACKEND

OPERAND_MULTIPLE = 8
"""Elements of 16 bits in the 16 bytes that TMA moves at least: of contiguous extents and of strides
of a and b."""

_OUT_MULTIPLES = {WIDE_DTYPE: 4}
"""The same of d, where it is not OPERAND_MULTIPLE."""

MAX_TMA_STRIDE = 2**39
"""Elements of 16 bits; cuTensorMapEncodeTiled takes strides below 2**40 bytes."""

MAX_GRID_YZ = 65535
"""Blocks along y and z (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"), along which the kernels that are not persistent have the narrow side of their tiles
and the batch."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    reason = cutlass_kernels.why_unusable(device)
    if reason is not None:
        return reason
    key = problem.key
    kernels = [
        kernel for kernel in cutlass_kernels.kernels(OP)
        if tile_rule.fits(kernel, key, COMPUTE_CAPABILITY)
    ]
    if not kernels:
        return (
            f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype} of "
            f"layout {problem.layout}"
        )
    return _why_not_tma(problem) or _why_none_counts(problem, kernels)


def _why_not_tma(problem: Problem) -> str | None:
    """TMA moves whole units of 16 bytes, from addresses and by strides of such units."""
    if not problem.is_aligned:
        return f"a, b and out must begin at multiples of 16 bytes for {NAME}; copy the views"
    out_multiple = _OUT_MULTIPLES.get(problem.out_dtype, OPERAND_MULTIPLE)
    multiples = {"n": OPERAND_MULTIPLE}
    if problem.layout[0] == "t":
        multiples["m"] = OPERAND_MULTIPLE
    if problem.layout != "tn":  # there neither operand is contiguous along k
        multiples["k"] = OPERAND_MULTIPLE
    multiples |= {
        "lda": OPERAND_MULTIPLE, "batch_stride_a": OPERAND_MULTIPLE,
        "ldb": OPERAND_MULTIPLE, "batch_stride_b": OPERAND_MULTIPLE,
        "ldd": out_multiple, "batch_stride_d": out_multiple,
    }
    for name, multiple in multiples.items():
        value = getattr(problem, name)
        if value % multiple:
            return f"{name}={value} must be a multiple of {multiple} for {NAME}; pad the tensors"
        if name not in "mnk" and value >= MAX_TMA_STRIDE:
            return f"{name}={value} must be below {MAX_TMA_STRIDE} for {NAME}; copy the view"
    return None


def _why_none_counts(problem: Problem, kernels: list[KernelRecord]) -> str | None:
    for name in ("m", "n"):
        if getattr(problem, name) > cutlass_kernels.MAX_EXTENT:
            return (
                f"{name}={getattr(problem, name)} must be at most {cutlass_kernels.MAX_EXTENT} for "
                f"{NAME}, whose tiles count in 32 bits; split the problem"
            )
    if problem.batch > 1 and all(map(split_k.is_splitk_sm90, kernels)):
        return (
            f"batch={problem.batch} must be 1 for this build's kernels {problem.a_dtype}*"
            f"{problem.b_dtype}->{problem.out_dtype} of layout {problem.layout}, which take one "
            "product; use another backend"
        )
    if not any(_fits_grid(problem, kernel) for kernel in kernels):
        return (
            f"batch={problem.batch} and the tiles of m={problem.m}, n={problem.n} must fit a "
            f"kernel's grid, {MAX_GRID_YZ} blocks a side; split the problem"
        )
    return None


def _fits_grid(problem: Problem, kernel: KernelRecord) -> bool:
    if kernel.config["schedule"] in TILE_SCHEDULED:
        return True
    if split_k.is_splitk_sm90(kernel):
        return problem.batch == 1
    columns = problem.m if kernel.config["swap_ab"] else problem.n
    num_tiles = -(-columns // kernel.config["tile"][1]) + kernel.config["cluster"][1] - 1
    return num_tiles <= MAX_GRID_YZ and problem.batch <= MAX_GRID_YZ


def runs(problem: Problem, kernel: KernelRecord) -> bool:
    """Whether `configs` has the kernel, for a problem that is supported."""
    return tile_rule.fits(kernel, problem.key, COMPUTE_CAPABILITY) and _fits_grid(problem, kernel)


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits, with each number of splits that may be the fastest, then those whose
    tile is as tall as the first one's, or taller, with each larger swizzle that changes the order
    of their tiles."""
    found = tile_rule.by_tile_m(
        problem.key, device.compute_capability,
        [kernel for kernel in cutlass_kernels.kernels(OP) if _fits_grid(problem, kernel)],
    )
    if not found:
        return []
    kernels = [manifest.packaged().kernels[config.kernel] for config in found]
    least = tile_rule.tile_m(kernels[0])
    return split_k.with_splits(
        found, problem.m, problem.n, problem.k, device.fingerprint.num_sms
    ) + [
        config for kernel in kernels if tile_rule.tile_m(kernel) >= least
        for config in cutlass_kernels.swizzled(kernel, problem.m, problem.n)
    ]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, bias), which launches on torch's current stream.

    Raises:
      UnsupportedError, TableError: see `cutlass_kernels.check_cubin`.
    """
    from torch._C import _cuda_getCurrentRawStream as current_stream

    cutlass_kernels.check_cubin(config.kernel)
    ordinal = device.ordinal
    launch = native.load(cutlass_kernels.MODULE).Plan(
        config.kernel, m=problem.m, n=problem.n, k=problem.k, lda=problem.lda, ldb=problem.ldb,
        ldd=problem.ldd, batch=problem.batch, batch_stride_a=problem.batch_stride_a,
        batch_stride_b=problem.batch_stride_b, batch_stride_d=problem.batch_stride_d,
        device=ordinal, num_sms=device.fingerprint.num_sms, max_swizzle=config.max_swizzle,
        raster=config.raster, splits=config.splits,
    )

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        launch(
            a.data_ptr(), b.data_ptr(), out.data_ptr(), 0, 0,
            0 if bias is None else bias.data_ptr(), current_stream(ordinal),
        )

    run.native_launch = launch.native_launch(["a", "b", "d", "bias"])
    return run
