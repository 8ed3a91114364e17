"""Low-rank adapters over a frozen layer (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.nn import frozen_linear
from stoneware.nn.arguments import autocast_dtype, check_no_transform, has_hooks, is_distributed
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.recipes import check_is_built
from stoneware.nn.steps import rows_of
from stoneware.ops.backward import differentiable_once, in_state_of_call
from stoneware.tuning import policy


class Lora(torch.nn.Module):
    """y = base(x) + alpha / rank * b(a(x)), where only a and b are trained.

    Over a `Float8InferenceLinear` the weight exists only in fp8; the gradient of x is an fp8 matmul with
    it. b is initialized to zero, so y is base(x) at first.

    Args:
      base: the layer, which is frozen: requires_grad of its parameters becomes False.
      rank: rank of the adapter.
      alpha: weight of the adapter; the default is rank.
      dtype: dtype of the adapter; the default is that of x in `base`.

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
        base = self.base
        if type(base) is Float8InferenceLinear and self._is_plain(x):
            frozen_linear.check(x, base.weight, base.bias)
            check_no_transform()
            check_is_built(base.recipe, x.dtype, x.requires_grad, False, False)
            return _LoraFunction.apply(
                x,
                base.weight,
                base.weight_scale_inv,
                base.bias,
                self.a.weight,
                self.b.weight,
                self.scaling,
                base.recipe,
            )
        y, narrow = base(x), self.a(x)
        if has_hooks(self.b):
            return y + self.scaling * self.b(narrow)
        # The matmul of b adds to y; a separate sum would read and write y again.
        sums = torch.addmm(rows_of(y), rows_of(narrow), self.b.weight.t(), alpha=self.scaling)
        # Not a view for autograd, or FSDP's hooks warn; torch's linear does the same.
        return torch.ops.aten._unsafe_view(sums, y.shape)

    def _is_plain(self, x: torch.Tensor) -> bool:
        """Whether the calls of the layers are only their matmuls, which `_LoraFunction` computes."""
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_dynamo_compiling()
            and autocast_dtype(x) is None
            and not is_distributed(self.a.weight)
            and not (self.base.bias is not None and self.base.bias.requires_grad)
            and not any(has_hooks(module) for module in (self.base, self.a, self.b))
        )


class _LoraFunction(torch.autograd.Function):
    """The layer as one autograd function, which adds in place. Separate sums of tensors as large as y and dx, and the
    calls of four more functions, took as long as the fp8 matmul saves."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        recipe: str,
    ) -> torch.Tensor:
        ctx.state = policy.state()
        y: torch.Tensor = policy.run_in(None, frozen_linear.native_linear(recipe, False), x, weight, scale, bias)
        narrow = rows_of(x) @ a.t()
        if scaling != 1:
            narrow *= scaling
        rows_of(y).addmm_(narrow, b.t())
        needs_a, needs_b = ctx.needs_input_grad[4:6]
        # grad_b depends on x too, for which no second derivative is computed.
        ctx.save_for_backward(x if needs_a or needs_b else None, narrow if needs_b else None, weight, scale, a, b)
        ctx.scaling, ctx.recipe = scaling, recipe
        return y

    @staticmethod
    @differentiable_once
    @in_state_of_call
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, narrow, weight, scale, a, b = ctx.saved_tensors
        needs_x, needs_a, needs_b = (ctx.needs_input_grad[idx] for idx in (0, 4, 5))
        gradient = gradient.contiguous()
        rows = rows_of(gradient)
        grad_x = grad_a = None
        if needs_x or needs_a:
            grad_narrow = rows @ b
            if ctx.scaling != 1:
                grad_narrow *= ctx.scaling
            if needs_x:
                grad_x = frozen_linear.grad_input(gradient, weight, scale, ctx.recipe)
                rows_of(grad_x).addmm_(grad_narrow, a)
            if needs_a:
                grad_a = grad_narrow.t() @ rows_of(x)
        grad_b = rows.t() @ narrow if needs_b else None
        return grad_x, None, None, None, grad_a, grad_b, None, None


class Adapter(torch.nn.Linear):
    """torch.nn.Linear, which has the least host overhead; a subclass, so `convert` leaves it alone."""
