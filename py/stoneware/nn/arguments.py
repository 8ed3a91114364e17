"""Checks the arguments of layers, and casts them for torch.autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch

from stoneware.errors import ForwardOnlyError, quoted

BITS_16 = (torch.bfloat16, torch.float16)
FLOATS = (*BITS_16, torch.float32)
"""Dtypes of parameters."""


def check(x: torch.Tensor, weight: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if weight.dtype not in dtypes:
        raise TypeError(
            f"weight.dtype={weight.dtype} must be {_either(dtypes)}; cast the layer with .to(torch.bfloat16), or call "
            "it under torch.autocast"
        )
    check_x(x, weight.shape[1], (weight.dtype,))


def check_x(x: torch.Tensor, in_features: int, dtypes: Sequence[torch.dtype]) -> None:
    """Raises TypeError or ValueError if x has the wrong width or none of these dtypes."""
    if x.dtype not in dtypes:
        raise TypeError(
            f"x.dtype={x.dtype} must be {_either(dtypes)} for this layer; cast it with x.to({dtypes[0]}), or call the "
            f"layer under torch.autocast, with dtype={dtypes[0]}"
        )
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x.shape={list(x.shape)} must end with in_features={in_features}; reshape or pad x")


def check_size(name: str, size: object) -> None:
    """Raises TypeError unless a size of a layer is an integer."""
    if not isinstance(size, SupportsIndex):
        raise TypeError(f"{name}={quoted(size)} must be an int, not {type(size).__name__}; pass int({name})")


def _either(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(str, dtypes))


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of torch.autocast, if it is on for x's device."""
    kind = x.device.type
    # torch has no autocast for "meta", and raises an error.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def has_hooks(module: torch.nn.Module, *, is_forward_known: bool = False) -> bool:
    """Whether a call of the module does more than the forward of its class, or than its known forward."""
    own = vars(module)
    if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
        return True
    if "forward" not in own or is_forward_known:
        return False
    # accelerate replaces forward: it moves x to the module's device, and calls the old one.
    below = own.get("_old_forward") if "_hf_hook" in own else None
    return getattr(below, "__func__", None) is not type(module).forward


def check_no_transform() -> None:
    """Raises ForwardOnlyError in a transform of torch.func, before a gradient in fp8."""
    if torch._C._are_functorch_transforms_active():
        raise ForwardOnlyError(
            "fp8 layers have no gradients in a transform of torch.func (vmap, grad, vjp, jvp), and one is active with "
            "gradients enabled; use backward() or torch.autograd.grad, and call torch.func.vmap under torch.no_grad()"
        )


def is_distributed(weight: torch.Tensor) -> bool:
    """Whether it is a DTensor, without the slow import of its module."""
    return hasattr(weight, "device_mesh")
