"""Plans that quantize what they compute: rows of silu(gate) * up, of a norm, and of a gradient times the scales
of a weight; and the transpose of what is fp8 already.

The first two give the values that torch has in x's dtype, and those in fp8 with a scale for each row, as
`sw.quantize` gives them.
"""

from __future__ import annotations

from typing import Any

import torch

from stoneware.ops import tensor_checks
from stoneware.quantizing import kernels, reference
from stoneware.runtime.device import Device

_DTYPE = torch.float8_e4m3fn


def silu_mul_plan(z: torch.Tensor, power_of_two: bool) -> Any:
    """plan(z, y8, scale): y = silu(z[:, :k]) * z[:, k:], each of the two rounded to z's dtype.

    Args:
      z: like that of the calls, [m, 2 k].
    """
    device = tensor_checks.check_one_device([("z", z)])
    if _has_kernel(z, z.shape[1] // 2, device):
        return kernels.silu_mul_plan(z, power_of_two, device)

    def run(z: torch.Tensor, y8: torch.Tensor, scale: torch.Tensor) -> None:
        _store(silu_mul(z), power_of_two, y8, scale)

    return run


def silu_mul(z: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [..., k] in torch, from z [..., 2 k]: gate, then up."""
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rms_norm_plan(x: torch.Tensor, weight: torch.Tensor, epsilon: float, power_of_two: bool) -> Any:
    """plan(x, weight, y, y8, scale): y = rms_norm(x) * weight, computed in float32 and rounded once.

    Args:
      x, weight: like those of the calls, [m, k] and [k].
    """
    device = tensor_checks.check_one_device([("x", x), ("weight", weight)])
    k = x.shape[1]
    is_plain = weight.dtype == x.dtype and weight.data_ptr() % kernels.MULTIPLE == 0 and weight.stride() == (1,)
    if is_plain and k <= kernels.ROW_BLOCKS[-1] and _has_kernel(x, k, device):
        return kernels.rms_norm_plan(x, epsilon, power_of_two, device)

    def run(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, y8: torch.Tensor, scale: torch.Tensor) -> None:
        y.copy_(torch.nn.functional.rms_norm(x, (k,), weight, epsilon))
        _store(y, power_of_two, y8, scale)

    return run


def scaled_rows_plan(x: torch.Tensor, factors: torch.Tensor, power_of_two: bool) -> Any:
    """plan(x, factors, x8, scale): x * factors in float32, quantized with a scale for each row.

    Args:
      x, factors: like those of the calls, [m, k], and [k] float32 of any shape.
    """
    device = tensor_checks.check_one_device([("x", x), ("factors", factors)])
    is_plain = factors.is_contiguous() and factors.data_ptr() % kernels.MULTIPLE == 0
    if is_plain and _has_kernel(x, x.shape[1], device):
        return kernels.scaled_rows_plan(x, power_of_two, device)

    def run(x: torch.Tensor, factors: torch.Tensor, x8: torch.Tensor, scale: torch.Tensor) -> None:
        _store(x.float() * factors.reshape(1, -1), power_of_two, x8, scale)

    return run


def transpose_plan(x8: torch.Tensor) -> Any:
    """plan(x8, xt8, ones): x8.t(), dense, and 1 for each of its rows.

    Args:
      x8: like that of the calls, [m, k] fp8.
    """
    device = tensor_checks.check_one_device([("x8", x8)])
    is_dense = x8.is_contiguous() and not any(size % kernels.MULTIPLE for size in (*x8.shape, x8.data_ptr()))
    if is_dense and x8.numel() and kernels.is_built(device):
        return kernels.transpose_plan(x8, device)

    def run(x8: torch.Tensor, xt8: torch.Tensor, ones: torch.Tensor) -> None:
        xt8.copy_(x8.t())
        ones.fill_(1)

    return run


def _has_kernel(x: torch.Tensor, k: int, device: Device) -> bool:
    is_dense = x.stride(1) == 1 and k % kernels.MULTIPLE == 0
    return bool(x.numel()) and is_dense and kernels.why_not(x, "row", "e4m3", False, device) is None


def _store(y: torch.Tensor, power_of_two: bool, y8: torch.Tensor, scale: torch.Tensor) -> None:
    values, scales = reference.quantize(y, "row", _DTYPE, power_of_two)
    y8.copy_(values)
    scale.copy_(scales)
