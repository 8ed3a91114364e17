"""Low-rank adapters over a frozen layer (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import torch


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
        self.a = Adapter(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.b = Adapter(rank, base.out_features, bias=False, device=device, dtype=dtype)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, narrow = self.base(x), self.a(x)
        # b's product is added where it is computed: a sum of its own would read and write y once more.
        rows, narrow_rows = (one.reshape(-1, one.shape[-1]) for one in (y, narrow))
        return torch.addmm(rows, narrow_rows, self.b.weight.t(), alpha=self.scaling).reshape(y.shape)


class Adapter(torch.nn.Linear):
    """torch's product, which costs the host least; a class of its own, which `convert` leaves as it is."""
