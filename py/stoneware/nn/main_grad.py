"""Gradients of weights that are added to a buffer, `weight.main_grad`, for optimizers like Megatron-LM's.

A matmul in 16 bits adds to the buffer as it is computed (beta = 1); an fp8 matmul is added after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoneware.nn.arguments import BITS_16, FLOATS, is_distributed
from stoneware.ops.backward import in_state_of_call, refuse_second
from stoneware.ops.matmul.api import matmul
from stoneware.tuning import policy

Compute = Callable[[torch.Tensor], torch.Tensor]
"""weight -> y."""


def is_enabled(layer: torch.nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a call of the layer adds the gradient of this weight to its buffer."""
    return bool(layer.fuse_wgrad_accumulation) and parameter.requires_grad and torch.is_grad_enabled()


def linear(compute: Compute, x: torch.Tensor, parameter: torch.Tensor, *, is_quantized: bool) -> torch.Tensor:
    """The matmul, whose gradient of the weight goes into `parameter.main_grad`.

    Args:
      compute: computes y of x.
      x: [..., k], in the dtype of the matmul.
      parameter: [n, k].
      is_quantized: whether the gradient of the weight is an fp8 matmul of the recipe.

    Raises:
      TypeError, ValueError: see `with_main_grad`.
    """
    if is_quantized:
        return compute(with_main_grad(parameter))
    _check(parameter)
    return _accumulate(compute(parameter.detach()), x.detach(), parameter)


def with_main_grad(parameter: torch.Tensor) -> torch.Tensor:
    """The weight, whose gradient is added to `parameter.main_grad`.

    `parameter.grad` stays None. If the parameter has an attribute `grad_added_to_main_grad`, it becomes True,
    and `grad` an uninitialized tensor, for hooks that wait for one.

    Raises:
      ValueError: `parameter.main_grad` is missing, or not a dense buffer of its shape.
      TypeError: its dtype is not allowed for parameters.
    """
    _check(parameter)
    return _accumulate(parameter.detach(), None, parameter)


# Like torch.compiler.disable, which would import all of Dynamo: the backward writes to memory outside of the graph.
linear._torchdynamo_disable = with_main_grad._torchdynamo_disable = True  # type: ignore[attr-defined]


def _check(parameter: torch.Tensor) -> None:
    remedy = "give each weight such a buffer, or set fuse_wgrad_accumulation=False"
    if is_distributed(parameter) or type(parameter.detach()) is not torch.Tensor:
        raise ValueError(f"weight must be a plain tensor on one rank, not {type(parameter.data).__name__}; {remedy}")
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or main_grad.shape != parameter.shape or not main_grad.is_contiguous():
        actual = "missing" if main_grad is None else f"of shape {list(main_grad.shape)}, strides {main_grad.stride()}"
        raise ValueError(
            f"weight.main_grad must be a contiguous tensor of the weight's shape {list(parameter.shape)}, but is "
            f"{actual}; {remedy}"
        )
    if main_grad.dtype not in FLOATS or main_grad.device != parameter.device:
        raise TypeError(
            f"weight.main_grad must be of float32, bfloat16 or float16 on {parameter.device}, but is of "
            f"{main_grad.dtype} on {main_grad.device}; {remedy}"
        )


def _placeholder(parameter: Any) -> torch.Tensor | None:
    """The gradient for autograd."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(parameter)


class _Accumulate(torch.autograd.Function):
    """y, or the weight itself if x is None. Its backward is the only gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, parameter: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.state = policy.state()
        ctx.parameter = parameter
        return y.view_as(y)

    @staticmethod
    @in_state_of_call
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dw = None
        *_, (of_weight, _), _ = ctx.next_functions
        # False in torch.autograd.grad(y, x) and backward(inputs=[x]), which need no gradient of the weight.
        if torch._C._will_engine_execute_node(of_weight):
            with torch.no_grad():
                if x is None:
                    ctx.parameter.main_grad.add_(gradient)
                else:
                    _add_matmul(ctx.parameter.main_grad, gradient, x)
            dw = _placeholder(ctx.parameter)
        if torch.is_grad_enabled():  # create_graph=True; what follows depends on the weight, which y has detached
            (gradient,) = refuse_second((gradient.detach(),), (gradient, ctx.parameter))
        return gradient, None, dw, None


def _accumulate(y: torch.Tensor, x: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    # The node of a view, since torch refuses the question whether a leaf's node will run in autograd.grad.
    result: torch.Tensor = _Accumulate.apply(y, x, parameter.view_as(parameter), parameter)
    return result


def _add_matmul(main_grad: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor) -> None:
    """main_grad += gradient^T @ x, of the rows of both."""
    rows = [matrix.reshape(-1, matrix.shape[-1]) for matrix in (gradient, x)]
    gradient, x = (matrix if matrix.dtype in BITS_16 else matrix.bfloat16() for matrix in rows)
    # In batch-invariant mode only kernels of ours run, of which few add.
    if main_grad.dtype in (gradient.dtype, torch.float32) and not policy.is_batch_invariant():
        matmul(gradient.t(), x, out=main_grad, accumulate=True)
    else:
        main_grad += matmul(gradient.t(), x, out_dtype=torch.float32)
