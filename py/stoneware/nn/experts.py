"""The experts of a mixture: each token goes through a few of many small MLPs, by grouped products."""

from __future__ import annotations

import torch

from stoneware.nn.inference import KeepsFloat8
from stoneware.nn.recipes import UNIT
from stoneware.ops.grouped_mm.api import grouped_mm
from stoneware.quantizing.api import quantize


class Experts(torch.nn.Module):
    """SwiGLU experts: down(silu(gate(x)) * up(x)) of each token's experts, summed with its weights.

    Gate and up projection are one product. The tokens are sorted by expert on the device; nothing
    waits for it, so one CUDA graph serves any routing.

    Args:
      num_experts, hidden_size, intermediate_size: sizes; multiples of 16.
      device, dtype: of the parameters, bfloat16 to be called.

    Attributes:
      gate_up: [num_experts, 2 * intermediate_size, hidden_size], gate first.
      down: [num_experts, hidden_size, intermediate_size].

    Shapes:
      x: [..., hidden_size], bfloat16.
      experts: [..., top_k] integers, the experts of each token.
      weights: [..., top_k], theirs in the sum.
      y: [..., hidden_size], bfloat16.

    Raises:
      ValueError: a size that breaks its rule.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size % UNIT or size <= 0:
                raise ValueError(f"{name}={size} must be a positive multiple of {UNIT}; pad the experts")
        empty = torch.empty(0, device=device, dtype=dtype)
        self.gate_up = torch.nn.Parameter(empty.new_empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down = torch.nn.Parameter(empty.new_empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as torch.nn.Linear does."""
        for weight in (self.gate_up, self.down):
            bound = weight.shape[-1] ** -0.5
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        top_k = experts.shape[-1]
        by_expert, order = experts.reshape(-1).sort(stable=True)
        token = order // top_k
        numbers = torch.arange(self.down.shape[0], device=x.device)
        offs = torch.searchsorted(by_expert, numbers, right=True).to(torch.int32)
        gate, up = self.product(rows[token], "gate_up", offs).chunk(2, dim=-1)
        y = self.product(torch.nn.functional.silu(gate) * up, "down", offs)
        y = y * weights.reshape(-1, 1)[order].to(y.dtype)
        return torch.zeros_like(rows).index_add_(0, token, y).reshape(x.shape)

    def product(self, rows: torch.Tensor, name: str, offs: torch.Tensor) -> torch.Tensor:
        """rows @ weight[expert].t(), of the weight of this name; offs as in `sw.grouped_mm`."""
        return grouped_mm(rows, getattr(self, name).mT, offs)


class Float8InferenceExperts(KeepsFloat8, Experts):
    """`Experts` with frozen fp8 weights, a scale for each row of a weight and of x.

    Attributes:
      gate_up_scale: [num_experts, 2 * intermediate_size] float32.
      down_scale: [num_experts, hidden_size] float32.
    """

    @classmethod
    def from_experts(cls, experts: Experts) -> Float8InferenceExperts:
        """The experts with their weights quantized."""
        num_experts, hidden_size, intermediate_size = experts.down.shape
        new = cls(num_experts, hidden_size, intermediate_size, device="meta")
        for name in ("gate_up", "down"):
            values, scale = quantize(getattr(experts, name).detach(), "row")
            setattr(new, name, torch.nn.Parameter(values, requires_grad=False))
            new.register_buffer(f"{name}_scale", scale.squeeze(-1))
        return new.train(experts.training)

    def product(self, rows: torch.Tensor, name: str, offs: torch.Tensor) -> torch.Tensor:
        values, scale = quantize(rows, "row")
        weight, weight_scale = getattr(self, name), getattr(self, f"{name}_scale")
        return grouped_mm(values, weight.mT, offs, scale.squeeze(-1), weight_scale, rows.dtype)
