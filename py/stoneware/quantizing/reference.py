"""Quantizing in plain torch, on any device: the same bits as the kernels."""

from __future__ import annotations

import torch

from stoneware.quantizing.layout import BLOCK, MAX, dense_shape


def scales_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """The scale of each unit from its largest |x|, float32."""
    # By a tensor: on a GPU torch divides by a number by multiplying with its inverse.
    largest = torch.full((), MAX[dtype], device=amax.device)
    scale = (amax / largest).clamp_min(torch.finfo(torch.float32).tiny)
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, float("nan"))


def quantize(x: torch.Tensor, scales: str, dtype: torch.dtype, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] as fp8 and its scales, in the layout of `layout.dense_shape`."""
    (m, k), x = x.shape, x.float()
    if scales == "tensor":
        scale = scales_of(x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1), dtype, power_of_two)
        return (x * (1 / scale)).to(dtype), scale
    if scales == "row":
        scale = scales_of(x.abs().amax(1, keepdim=True) if k else x.new_zeros(m, 1), dtype, power_of_two)
        return (x * (1 / scale)).to(dtype), scale
    rows, columns = (1, BLOCK) if scales == "block" else (BLOCK, BLOCK)
    padded = torch.nn.functional.pad(x, (0, -k % columns, 0, -m % rows))
    units = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = scales_of(units.abs().amax((1, 3)), dtype, power_of_two)
    values = (units * (1 / scale)[:, None, :, None]).reshape(padded.shape)[:m, :k].to(dtype)
    shape, strides = dense_shape(scales, m, k)
    return values.contiguous(), torch.empty_strided(shape, strides, device=x.device).copy_(scale)
