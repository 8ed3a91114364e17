"""A norm whose result is quantized on the way, for the fp8 layers that take it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from stoneware.nn import frozen_product
from stoneware.nn.arguments import autocast_dtype, check_x
from stoneware.nn.native_chain import Call, chain, dense, rows_of
from stoneware.nn.recipes import RECIPES
from stoneware.quantizing import fused


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, over one dimension, with a weight and an epsilon.

    Its result carries itself in fp8 with scales of its rows, which one kernel writes. A rowwise
    `Float8InferenceLinear` or `SwiGLU` that is called with the very result takes these in place of
    quantizing it, and so do several of them (q, k and v). Whoever changes the result in place loses them.

    Where a gradient is needed, in torch.compile, under autocast and in torch.inference_mode, which does not
    count changes, it is torch's norm alone.

    Args:
      hidden_size: elements of the last dimension.
      eps: what is added to the mean of squares.
      device, dtype: of the weight.

    Shapes:
      x: [..., hidden_size].
      y: the same, of x's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled() or autocast_dtype(x) is not None:
            return super().forward(x)
        assert self.eps is not None  # as __init__ has it
        y, values, scale = _chained(self.eps)(x, self.weight)
        if values is not None:
            frozen_product.attach(y, values, scale)
        return y


@functools.cache
def _chained(epsilon: float) -> Call:
    """call(x, weight) -> (y, y8, scale); the last two are None for autograd and for torch dispatch modes."""
    cast = RECIPES["rowwise"].forward[0]

    def make(x: torch.Tensor, weight: torch.Tensor) -> Any:
        check_x(x, weight.shape[0], (x.dtype,))
        rows = rows_of(x)
        plan = fused.rms_norm_plan(rows, weight, epsilon, cast.power_of_two)
        step = plan, ("x.rows", "weight", "y.rows", "y8.rows", "scale.rows")
        of_scale = (*(x.shape[:-1] or (1,)), 1)
        outputs = [dense(x.shape, x.dtype), dense(x.shape, cast.dtype), dense(of_scale, torch.float32)]
        return [step], x.device, outputs, rows.data_ptr() == x.data_ptr()

    def slow(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.nn.functional.rms_norm(x, (weight.shape[0],), weight, epsilon), None, None

    return chain(("x", "weight"), ("y", "y8", "scale"), make, slow, num_results=3)
