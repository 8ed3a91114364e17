"""Low-rank adapters over a frozen layer (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import torch

from stoneware.nn.linear import Linear


class Lora(torch.nn.Module):
    """y = base(x) + alpha / rank * b(a(x)), of which a and b alone are trained.

    Over a `Float8InferenceLinear` the weight is held in fp8 once; the gradient of x is an fp8 product
    with it. b begins at zero, so that y begins as base(x).

    Args:
      base: the frozen layer; its parameters get requires_grad False.
      rank: of the adapter.
      alpha: its weight; the default is rank.
      dtype: of the adapter; the default is the dtype that `base` is called with.

    Raises:
      ValueError: rank is below 1.
    """

    def __init__(
        self, base: torch.nn.Linear, rank: int, alpha: float | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1; leave the layer as it is for no adapter")
        self.base = base.requires_grad_(False)
        self.scaling = (rank if alpha is None else alpha) / rank
        device = base.weight.device
        dtype = dtype or getattr(base, "compute_dtype", base.weight.dtype)
        self.a = Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.b = Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scaling
