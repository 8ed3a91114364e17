"""Mixture of experts: each token goes through a few of many small MLPs, with grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from stoneware.nn import main_grad
from stoneware.nn.arguments import BITS_16, autocast_dtype, check_no_transform, check_size, check_x
from stoneware.nn.inference import FP8, KeepsFloat8, frozen_parameter
from stoneware.nn.recipes import UNIT
from stoneware.ops.backward import differentiable_once, in_state_of_call
from stoneware.ops.grouped_mm.api import grouped_mm
from stoneware.quantizing.api import quantize
from stoneware.tuning import policy

WEIGHTS = ("gate_up_proj", "down_proj")


class _Reorder(torch.autograd.Function):
    """Rows, each `copies` times, in another order: result[i] = rows[order[i] // copies].

    Its gradient sums the copies of each row in a fixed order, so it is deterministic. The gradient of an index is not:
    it adds rows in any order.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return gradient[place].view(-1, ctx.copies, gradient.shape[-1]).sum(1), None, None, None


def _reorder(rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor, copies: int) -> torch.Tensor:
    if torch._C._are_functorch_transforms_active():
        # They require setup_context, which would cost 20 us of host time per call.
        return rows[order // copies]
    y: torch.Tensor = _Reorder.apply(rows, order, place, copies)
    return y


def routed(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    feed_forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of each token's experts.

    Args:
      x, experts, weights: see `Experts`.
      num_experts: of which experts are numbers.
      feed_forward: (rows [m, k] sorted by expert, offs of `sw.grouped_mm`) -> [m, k].

    Returns:
      Like x.
    """
    rows = x.reshape(-1, x.shape[-1])
    by_expert, order = experts.reshape(-1).sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    numbers = torch.arange(num_experts, device=x.device)
    offs = torch.searchsorted(by_expert, numbers, right=True).to(torch.int32)
    y = feed_forward(_reorder(rows, order, place, experts.shape[-1]), offs)
    token_rows = _reorder(y, place, order, 1).view(*experts.shape, x.shape[-1])
    return (token_rows * weights.unsqueeze(-1).to(y.dtype)).sum(-2)


def check_routing(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> None:
    """Raises TypeError or ValueError if the arguments of `routed` do not fit each other."""
    if experts.dtype.is_floating_point or experts.dtype == torch.bool:
        raise TypeError(
            f"experts.dtype={experts.dtype} must be torch.int64 or another of integers; pass the numbers of the "
            "experts, then their weights"
        )
    if experts.shape != weights.shape or experts.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"experts.shape={list(experts.shape)} and weights.shape={list(weights.shape)} must be equal, and begin "
            f"as x.shape={list(x.shape)} does; reshape them to {[*x.shape[:-1], 'top_k']}"
        )
    if experts.device.type == "cpu" and not torch.compiler.is_compiling() and experts.numel():
        least, most = int(experts.min()), int(experts.max())
        if not 0 <= least <= most < num_experts:
            raise ValueError(
                f"experts has numbers from {least} to {most}, they must lie in 0 to {num_experts - 1}; give "
                "tokens that no expert takes any number, and the weight 0"
            )


class Experts(torch.nn.Module):
    """SwiGLU experts: down(silu(gate(x)) * up(x)) of each token's experts, summed with its weights.

    Gate and up projection are one matmul. The tokens are sorted by expert on the device without synchronizing,
    so one CUDA graph serves any routing.

    Args:
      num_experts, hidden_size, intermediate_size: sizes; multiples of 16.
      device, dtype: of the parameters, bfloat16 to be called.

    Attributes:
      dtypes: the dtypes that x may have.
      gate_up_proj: [num_experts, 2 * intermediate_size, hidden_size], gate first.
      down_proj: [num_experts, hidden_size, intermediate_size]; named like in transformers.
      fuse_wgrad_accumulation: whether the gradients of both are added to their `main_grad`, like that of `Linear`.

    Shapes:
      x: [..., hidden_size], bfloat16.
      experts: [..., top_k] integers from 0 to num_experts - 1, the experts of each token. On a GPU that is not
        checked, because the check would synchronize.
      weights: [..., top_k], the weights of these experts in the sum.
      y: [..., hidden_size], bfloat16.

    Raises:
      TypeError, ValueError: a size that breaks its rule, or a dtype or a shape that does not fit.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    fuse_wgrad_accumulation = False

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
        check_size("num_experts", num_experts)
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_size(name, size)
            if size % UNIT or size <= 0:
                raise ValueError(f"{name}={size} must be a positive multiple of {UNIT}; pad the experts")
        empty = torch.empty(0, device=device, dtype=dtype)
        self.gate_up_proj = torch.nn.Parameter(empty.new_empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = torch.nn.Parameter(empty.new_empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights like torch.nn.Linear."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if (dtype := autocast_dtype(x)) is not None:
            x = x.to(dtype)
        self._check(x, experts, weights)

        def feed_forward(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            gate, up = self.matmul(rows, "gate_up_proj", offs).chunk(2, dim=-1)
            return self.matmul(torch.nn.functional.silu(gate) * up, "down_proj", offs)

        return routed(x, experts, weights, self.down_proj.shape[0], feed_forward)

    def _check(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        num_experts, hidden_size, _ = self.down_proj.shape
        check_x(x, hidden_size, self.dtypes)
        check_routing(x, experts, weights, num_experts)

    def matmul(self, rows: torch.Tensor, name: str, offs: torch.Tensor) -> torch.Tensor:
        """rows @ weight[expert].t(), of the weight of this name; offs like in `sw.grouped_mm`."""
        weight = getattr(self, name)
        if main_grad.is_enabled(self, weight):
            weight = main_grad.with_main_grad(weight)
        if (dtype := autocast_dtype(rows)) is not None:
            weight = weight.to(dtype)
        if weight.dtype != rows.dtype:
            raise TypeError(
                f"{name}.dtype={weight.dtype} must be {rows.dtype}; cast the layer with .to({rows.dtype}), or call it "
                "under torch.autocast"
            )
        return grouped_mm(rows, weight.mT, offs)


class _FrozenMatmul(torch.autograd.Function):
    """rows @ weight[expert].t() in fp8, for rows [m, k] and a weight [num_experts, n, k].

    The scales of the weight are [num_experts, n] for rows, or [num_experts, n / 128, k / 128] for blocks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale, offs)
        if torch.compiler.is_dynamo_compiling():
            return _frozen_matmul(rows, weight, scale, offs)
        ctx.state = policy.state()
        y: torch.Tensor = policy.run_in(None, _frozen_matmul, rows, weight, scale, offs)
        return y

    @staticmethod
    @differentiable_once
    @in_state_of_call
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dy @ weight[expert]. A scale of the weight's rows is along the summed dimension, so it goes into dy, relative
        to the largest of its expert; float16 would overflow otherwise."""
        weight, scale, offs = ctx.saved_tensors
        if scale.ndim == 3:
            return _frozen_matmul(gradient.contiguous(), weight.mT.contiguous(), scale.mT, offs), None, None, None
        largest = scale.amax(1)
        expert = torch.searchsorted(offs, torch.arange(len(gradient), device=offs.device), right=True)
        relative = (scale / largest[:, None]).to(gradient.dtype)
        weight_t = weight.mT.contiguous()
        scale_t = largest[:, None].expand(-1, weight_t.shape[1]).contiguous()
        scaled_gradient = gradient * relative[expert.clamp_(max=len(offs) - 1)]
        return _frozen_matmul(scaled_gradient, weight_t, scale_t, offs), None, None, None


def _frozen_matmul(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    if scale.ndim == 3:
        values, block_scale = quantize(rows, "block")
        return grouped_mm(values, weight.mT, offs, block_scale, scale.mT, rows.dtype)
    values, row_scale = quantize(rows, "row")
    return grouped_mm(values, weight.mT, offs, row_scale.squeeze(-1), scale, rows.dtype)


def frozen_matmul(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """rows @ weight[expert].t() in fp8, with a gradient of the rows; see `_FrozenMatmul`."""
    if torch.is_grad_enabled() and rows.requires_grad:
        check_no_transform()
        y: torch.Tensor = _FrozenMatmul.apply(rows, weight, scale, offs)
        return y
    return _frozen_matmul(rows, weight, scale, offs)


class Float8InferenceExperts(KeepsFloat8, Experts):
    """`Experts` with frozen fp8 weights, a scale for each row of a weight and of x. A weight of `Experts`' checkpoint
    is quantized when it is loaded. The gradient of x is a matmul with the same weights. x may also be float16.

    Attributes:
      gate_up_proj_scale: [num_experts, 2 * intermediate_size] float32.
      down_proj_scale: [num_experts, hidden_size] float32.
    """

    recipe = "rowwise"
    dtypes = BITS_16

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, device="meta", dtype=dtype)
        for name in WEIGHTS:
            shape = getattr(self, name).shape
            values = torch.zeros(shape, device=device).to(torch.float8_e4m3fn)
            self._take(name, values, torch.ones(shape[:-1], device=device))

    @classmethod
    def from_experts(cls, experts: Experts) -> Float8InferenceExperts:
        """The experts with their weights quantized."""
        num_experts, hidden_size, intermediate_size = experts.down_proj.shape
        new = cls(num_experts, hidden_size, intermediate_size, device="meta")
        for name in WEIGHTS:
            new._take(name, *cls.quantized(getattr(experts, name).detach()))
        return new.train(experts.training)

    @staticmethod
    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight in fp8 and a scale for each of its rows."""
        values, scale = quantize(weight, "row")
        return values, scale.squeeze(-1)

    def _take(self, name: str, values: torch.Tensor, scale: torch.Tensor) -> None:
        setattr(self, name, frozen_parameter(values))
        self.register_buffer(f"{name}_scale", scale)

    def matmul(self, rows: torch.Tensor, name: str, offs: torch.Tensor) -> torch.Tensor:
        return frozen_matmul(rows, getattr(self, name), getattr(self, f"{name}_scale"), offs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Quantizes weights that are not fp8 yet."""
        state_dict = {**state_dict}
        for name in WEIGHTS:
            weight, own = state_dict.get(prefix + name), getattr(self, name)
            if weight is not None and weight.dtype not in FP8 and weight.shape == own.shape:
                values, scale = self.quantized(weight.detach().to(weight.device if own.is_meta else own.device))
                state_dict |= {prefix + name: values, f"{prefix}{name}_scale": scale}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def dequantized(self, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The weight of this name, multiplied by its scales."""
        scale: torch.Tensor = getattr(self, f"{name}_scale")
        return (getattr(self, name).float() * scale[..., None]).to(dtype)
