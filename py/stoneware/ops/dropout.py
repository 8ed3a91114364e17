"""dropout: a mask that depends on a seed and on each element's position, in an epilogue or outside of one."""

from __future__ import annotations

from typing import Any

import torch

from stoneware.epilogue import philox
from stoneware.errors import quoted
from stoneware.ops import dropout_kernel, registration, tensor_checks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dropout(x: torch.Tensor, p: float, seed: int | torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """Sets each element of x to 0 with the probability p, and multiplies the others by 1 / (1 - p).

    Whether an element is dropped depends on p, seed, offset, and its row and its column alone. So an epilogue of a
    matmul drops the same elements in every kernel as this function does outside of one, and backward computes the mask
    again. Philox-4x32-10 makes the random bits; docs/epilogues.md has its counter.

    Calls with another seed or another offset are independent. Give each layer its own offset, and each step another
    seed.

    Args:
      x: [..., m, n] or [n], float32, bfloat16, float16 or float64. Its leading dimensions together are the row. In an
        epilogue it has the shape of acc, or half of its columns; float64 is not possible there.
      p: 0 <= p < 1; it holds to within 2^-32.
      seed, offset: an int that int64 can have, or an int64 tensor with one element on x's device. A CUDA graph that has
        captured the call reads the tensor at each replay. In an epilogue, pass the tensor in `inputs`.

    Returns:
      x's shape and dtype. Its gradient is the dropout of the gradient with the same mask; it is differentiable any
      number of times.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: p, seed or offset is outside its range, or a tensor has several elements or another device.
      UnsupportedError: x has 2^31 rows or columns or more; or, in an epilogue, x has another shape, or seed is not
        among `inputs`.
      ForwardOnlyError: x has a tangent of forward-mode AD.
    """
    tensors = _check(x, p, seed, offset)
    numbers = [0 if isinstance(value, torch.Tensor) else value for value in (seed, offset)]
    result: torch.Tensor = _operator(x, *tensors, float(p), *numbers)
    return result


def _check(x: object, p: object, seed: object, offset: object) -> list[torch.Tensor | None]:
    """The tensors among seed and offset, or None; raises TypeError or ValueError."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x of dropout must be a torch.Tensor, not {type(x).__name__}; pass a tensor")
    tensor_checks.check_memory("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x.dtype={x.dtype} of dropout must be {' or '.join(map(str, DTYPES))}; cast it with x.float()")
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"p={quoted(p)} of dropout must be a number; pass a float")
    if not 0 <= p < 1:
        raise ValueError(
            f"p={p} of dropout must be at least 0 and less than 1; for a result of zeros use torch.zeros_like(x)"
        )
    return [_tensor(name, value, x.device) for name, value in (("seed", seed), ("offset", offset))]


def _tensor(name: str, value: object, device: torch.device) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64:
            raise TypeError(f"{name}.dtype={value.dtype} of dropout must be torch.int64; cast it before the call")
        if value.numel() != 1:
            raise ValueError(
                f"{name}.shape={list(value.shape)} of dropout must have one element; pass one of its views"
            )
        if value.device != device:
            raise ValueError(
                f"{name} of dropout is on {value.device} and x on {device}, both must be on one device; move it with "
                f"{name}.to({str(device)!r}), or pass an int"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}={quoted(value)} of dropout must be an int or an int64 tensor; pass one of these")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value} of dropout must be at least -2**63 and less than 2**63; pass it modulo 2**63")
    return None


def _eager(
    x: torch.Tensor,
    seed_tensor: torch.Tensor | None,
    offset_tensor: torch.Tensor | None,
    p: float,
    seed: int,
    offset: int,
) -> torch.Tensor:
    seeds = seed if seed_tensor is None else seed_tensor, offset if offset_tensor is None else offset_tensor
    result = dropout_kernel.run(x, p, *seeds) if x.is_cuda else None
    return philox.dropout(x, p, *seeds) if result is None else result


def _rule(needs_input_grad: Any, x: Any, seed_tensor: Any, offset_tensor: Any, *numbers: Any) -> Any:
    """The rule of `backward.Rule`: it saves neither x nor the mask."""

    def gradients(grad: torch.Tensor, seed_tensor: Any, offset_tensor: Any) -> tuple[torch.Tensor | None, ...]:
        return _operator(grad, seed_tensor, offset_tensor, *numbers), None, None

    return (seed_tensor, offset_tensor), gradients


_operator: Any = registration.define(
    "dropout(Tensor x, Tensor? seed_tensor, Tensor? offset_tensor, float p, SymInt seed, SymInt offset) -> Tensor",
    ["x", "seed_tensor", "offset_tensor"],
    _eager,
    lambda x, *_: torch.empty_like(x),
    rule=_rule,
)
