"""What Stoneware's layers are measured against, in torch's own operators.

`Float8Peer` is torchao's float8 training recipe of that name, from its published meaning
(torchao/float8/config.py, README): operands are cast at each use with scales of the values at hand,
input and weight are kept in 16 bits for backward, fast accumulation in forward alone. tensorwise has
e5m2 gradients; rowwise is e4m3 throughout, with scales that are powers of two. It is made to be
compiled: plain tensor operations, which Inductor fuses with each other and with the transpositions.

`ScaledMmLinear` is inference with torch._scaled_mm over a row quantizer in one Triton kernel.
"""

from __future__ import annotations

from typing import Any

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST_AMAX = 1e-12


def _cast_tensor(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and the scale that dequantizes it, one for the matrix."""
    most = torch.finfo(dtype).max
    scale = most / x.abs().amax().float().clamp_min(_LEAST_AMAX)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def _cast_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] in e4m3, and scales [rows, 1] that dequantize it, powers of two."""
    most = torch.finfo(E4M3).max
    scale = most / x.abs().amax(1, keepdim=True).float().clamp_min(_LEAST_AMAX)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-most, most).to(E4M3), scale.reciprocal()


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _rows_product(x, weight, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        transposed = [one.t().contiguous() for one in (weight, gradient, x)]
        return (
            _rows_product(gradient, transposed[0], use_fast_accum=False),
            _rows_product(transposed[1], transposed[2], use_fast_accum=False),
        )


def _rows_product(a: torch.Tensor, b: torch.Tensor, *, use_fast_accum: bool) -> torch.Tensor:
    """a [m, k] @ b [n, k]^T, both cast by rows."""
    (a8, scale_a), (b8, scale_b) = _cast_rows(a), _cast_rows(b)
    return torch._scaled_mm(
        a8, b8.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=a.dtype, use_fast_accum=use_fast_accum
    )


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        (x8, scale_x), (w8, scale_w) = _cast_tensor(x, E4M3), _cast_tensor(weight, E4M3)
        return torch._scaled_mm(x8, w8.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        g8, scale_g = _cast_tensor(gradient, E5M2)
        (x8, scale_x), (w8, scale_w) = _cast_tensor(x, E4M3), _cast_tensor(weight, E4M3)
        # fp8 operands are contiguous along the summed dimension: the first by rows, the second by columns.
        of_columns = [one.t().contiguous().t() for one in (w8, x8)]
        grad_x, grad_weight = (
            torch._scaled_mm(a, b, scale_a=scale_g, scale_b=scale_b, out_dtype=x.dtype, use_fast_accum=False)
            for a, b, scale_b in ((g8, of_columns[0], scale_w), (g8.t().contiguous(), of_columns[1], scale_x))
        )
        return grad_x, grad_weight


_PRODUCTS = {"rowwise": _Rowwise, "tensorwise": _Tensorwise}


class Float8Peer(torch.nn.Linear):
    """A layer by torchao's recipe "rowwise" or "tensorwise", without a bias.

    Shapes:
      x: [m, in_features]; y: [m, out_features].
    """

    recipe = "rowwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _PRODUCTS[self.recipe].apply(x, self.weight)


class ScaledMmLinear(torch.nn.Module):
    """x quantized by rows in one Triton kernel, times a frozen fp8 weight by torch._scaled_mm.

    Args:
      weight: [n, k], float8_e4m3fn.
      scale: [n, 1], float32, which dequantizes it.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        x8, scale = quantize_rows(rows)
        y = torch._scaled_mm(
            x8, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])


class TorchLora(torch.nn.Module):
    """y = base(x) + b(a(x)) in torch alone; alpha is the rank."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device, dtype = base.weight.device, base.weight.dtype
        self.a = torch.nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.b = torch.nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] of 16 bits in e4m3, and scales [m, 1] that dequantize it: amax / 448."""
    if not x.is_cuda:
        scale = x.float().abs().amax(1, keepdim=True).clamp_min(_LEAST_AMAX) / torch.finfo(E4M3).max
        return (x.float() / scale).to(E4M3), scale
    from tools.gpu_check.layers_quantizer import launch  # Triton, where there is a GPU for it

    return launch(x.contiguous())
