"""Backend of the CUTLASS kernels for Hopper, embedded in the native module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stoneware.autotune import tile_rule
from stoneware.autotune.config import Config
from stoneware.ops.scaled_mm.problem import OP, Problem
from stoneware.runtime import manifest, native
from stoneware.runtime.device import Device

if TYPE_CHECKING:
    import torch

NAME = "cutlass_sm90"
MODULE = "stoneware.ops.scaled_mm._cutlass_sm90"
COMPUTE_CAPABILITY = (9, 0)

_LEAST_TILES_OF_SWIZZLE = ((2, 2), (4, 3), (8, 6))
"""(max_swizzle, the fewest tiles along both m and n at which it differs from the one before), from
`get_log_swizzle_size` in cutlass/gemm/kernel/tile_scheduler_params.h of CUTLASS 4.2."""


def supports(problem: Problem, device: Device) -> str | None:
    """None if a kernel can run the problem on the device, else the reason."""
    if device.compute_capability != COMPUTE_CAPABILITY:
        return f"its kernels are built for sm_90a, compute capability 9.0, the device is {device}"
    missing = None if device.is_described else native.why_missing(MODULE)
    if missing is not None:
        return missing
    if not configs(problem, device):
        return f"this build has no kernel {problem.a_dtype}*{problem.b_dtype}->{problem.out_dtype}"
    return None


def configs(problem: Problem, device: Device) -> list[Config]:
    """Each kernel that fits; the first also with each larger swizzle that changes the order of its
    tiles."""
    records = manifest.packaged().select(op=OP, backend=NAME)
    found = tile_rule.by_tile_m(problem.key, device.compute_capability, records)
    if not found:
        return []
    tile = manifest.packaged().kernels[found[0].kernel].config["tile"]
    swap_ab = manifest.packaged().kernels[found[0].kernel].config["swap_ab"]
    along_m, along_n = (problem.n, problem.m) if swap_ab else (problem.m, problem.n)
    num_tiles = min(-(-along_m // tile[0]), -(-along_n // tile[1]))
    return found + [
        replace(found[0], max_swizzle=max_swizzle)
        for max_swizzle, least in _LEAST_TILES_OF_SWIZZLE if num_tiles >= least
    ]


def plan(problem: Problem, config: Config, device: Device) -> Callable[..., None]:
    """Returns run(a, b, out, scale_a, scale_b, bias), which launches on torch's current stream."""
    from torch._C import _cuda_getCurrentRawStream as current_stream

    ordinal = device.ordinal
    launch = native.load(MODULE).Plan(
        config.kernel, m=problem.m, n=problem.n, k=problem.k, lda=problem.lda, ldb=problem.ldb,
        ldd=problem.ldd, vector_scale_a=problem.scale_a == "row",
        vector_scale_b=problem.scale_b == "row", device=ordinal,
        num_sms=device.fingerprint.num_sms, max_swizzle=config.max_swizzle, raster=config.raster,
    )

    def run(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, scale_a: torch.Tensor,
        scale_b: torch.Tensor, bias: torch.Tensor | None,
    ) -> None:
        launch(
            a.data_ptr(), b.data_ptr(), out.data_ptr(), scale_a.data_ptr(), scale_b.data_ptr(),
            0 if bias is None else bias.data_ptr(), current_stream(ordinal),
        )

    return run
