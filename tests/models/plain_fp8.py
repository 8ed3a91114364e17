"""A model with plain-PyTorch linears, to which a converted model is compared, and how far outputs are apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

FP8_MAX = 448.0
BLOCK = 128


def dequantized(x: torch.Tensor, scales: str) -> torch.Tensor:
    """x [..., k] rounded to fp8 e4m3 with one scale each "row", "block" of 1x128 or "block_2d" of 128x128; float32.

    Scales are rounded up to powers of two like those of frozen layers; only the blocks of activations have others.
    """
    x = x.float()
    if scales == "row":
        units, axes = x, (-1,)
    else:
        blocks = x.unflatten(-1, (-1, BLOCK))
        units, axes = (blocks, (-1,)) if scales == "block" else (blocks.unflatten(-3, (-1, BLOCK)), (-3, -1))
    amax = units.abs().amax(axes, keepdim=True)
    scale = amax / FP8_MAX
    if scales != "block":
        scale = torch.exp2(torch.log2(scale).ceil())
    scale = torch.where(amax == 0, 1.0, scale)
    # Multiplied by the inverse, like the kernels: a quotient rounds a few elements to the other neighbor.
    return ((units * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> torch.Tensor:
    """x [..., k] and weight [n, k] in fp8, or as they are for "bf16"; multiplied in float32 and rounded once."""
    operands = x.float(), weight.float()
    if recipe != "bf16":
        scales = ("row", "row") if recipe == "rowwise" else ("block", "block_2d")
        operands = dequantized(x, scales[0]), dequantized(weight, scales[1])
    return torch.nn.functional.linear(*operands, None if bias is None else bias.float()).to(x.dtype)


class _PlainLinears(TorchFunctionMode):
    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            with torch._C.DisableTorchFunction():
                return plain_linear(*args, *([None] if len(args) == 2 else []), self.recipe)
        return func(*args, **(kwargs or {}))


def use_plain_linears(model: torch.nn.Module, linears: Iterable[str], experts: Iterable[str], recipe: str) -> None:
    """Lets these modules of a model compute by `plain_linear`; other code reads their weights as they were."""
    for name in linears:
        layer = model.get_submodule(name)
        layer.forward = functools.partial(_plain_layer, layer, recipe)
    if experts := [*experts]:
        model.set_experts_implementation("eager")  # a loop of torch.nn.functional.linear
    for name in experts:
        module = model.get_submodule(name)
        module.forward = functools.partial(_plain_experts, module.forward, recipe)


def _plain_layer(layer: torch.nn.Linear, recipe: str, x: torch.Tensor) -> torch.Tensor:
    return plain_linear(x, layer.weight, layer.bias, recipe)


def _plain_experts(forward: Callable[..., torch.Tensor], recipe: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    with _PlainLinears(recipe):
        return forward(*args, **kwargs)


class Choices:
    """Records what topk and argmax choose in its context; `replayed` makes another model choose the same.

    A router's choice of experts is not continuous: rounding alone swaps two experts of nearly equal scores, and the
    outputs of such a token have nothing in common. So converted models and models in plain fp8 take the original's.
    """

    def __init__(self, chosen: list[torch.Tensor] | None = None) -> None:
        self.is_recorded = chosen is None
        self.chosen = [] if chosen is None else [*chosen]
        self.stack = contextlib.ExitStack()

    def replayed(self) -> Choices:
        return Choices(self.chosen)

    def __enter__(self) -> Choices:
        for owner in (torch, torch.Tensor):
            for name, choose in (("topk", self._topk), ("argmax", self._argmax)):
                changed = functools.partial(choose, getattr(owner, name))
                # A plain function, so that torch.Tensor.topk is a method.
                self.stack.enter_context(mock.patch.object(owner, name, lambda *a, _f=changed, **k: _f(*a, **k)))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _topk(self, function: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(x, *args, **kwargs)
        indices = self._chosen(result.indices)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        return type(result)((x.gather(dim, indices), indices))

    def _argmax(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._chosen(function(*args, **kwargs))

    def _chosen(self, indices: torch.Tensor) -> torch.Tensor:
        if not self.is_recorded:
            return self.chosen.pop(0)
        self.chosen.append(indices)
        return indices


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Floating point tensors of a model's output, without its caches."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [
            tensor
            for key, value in output.items()
            if "past" not in key and "cache" not in key
            for tensor in tensors_of(value)
        ]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


def deviation(output: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """||output - expected|| / ||expected||; of several tensors, the root of the mean of squares, by their sizes."""
    assert [tensor.shape for tensor in output] == [tensor.shape for tensor in expected]
    total = square = 0.0
    for ours, theirs in zip(output, expected):
        ours, theirs = ours.double(), theirs.double()
        kept = theirs.isfinite()  # -inf of masked logits
        assert torch.equal(ours.isfinite(), kept), "other elements are not finite"
        ours, theirs = ours[kept], theirs[kept]
        if (norm := theirs.norm()) > 0:
            square += theirs.numel() * float((ours - theirs).norm() / norm) ** 2
            total += theirs.numel()
    return (square / total) ** 0.5 if total else 0.0
