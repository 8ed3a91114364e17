"""The gated feed-forward that trains, down(silu(gate(x)) * up(x)), as one node of autograd with rowwise fp8.

    forward    x, gate, up, down     -> z = x @ [gate; up]^T -> h in fp8 -> y
    backward   dy, all of these, z   -> dh -> dz in fp8 -> dx, [dgate; dup], ddown

gate and up are quantized into one operand, so each direction has one matmul for both, and x is quantized once. h exists
in fp8 alone: backward computes it again from z while it computes dz. Weights that were gathered in fp8 are used as they
are; the scales of their rows go into dy and dz for dh and dx. The recipes that have no kernels for this run the layers
one by one, with the activation and its gradient as a kernel each.

    call               a call of any kind; what runs is decided once for each kind
    activation         silu(gate) * up in 16 bits
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from stoneware.nn import frozen_linear, steps, trained_linear, trained_node
from stoneware.nn.arguments import BITS_16, autocast_dtype, check, is_distributed
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import check_is_built
from stoneware.nn.steps import Step, Steps
from stoneware.nn.trained_node import CAST, gradient_matmul
from stoneware.ops import native_call
from stoneware.ops.backward import differentiable_once
from stoneware.tuning import policy


def _steps(is_joined: bool) -> tuple[Steps, Steps]:
    """Forward and backward.

    Args:
      is_joined: whether gate and up are the rows of one weight.
    """
    gate_up: tuple[str, ...] = ("gate_up",) if is_joined else ("gate", "up")
    weights = (*gate_up, "down")

    def quantize(name: str, **options: Any) -> Step:
        return steps.quantize(name, CAST, shares=True, parts=gate_up if name == "gate_up" else (), **options)

    forward = (
        steps.together(quantize("x"), quantize("gate_up"), quantize("down")),
        steps.scaled_mm("x", "gate_up", "z"),
        Step(steps.SiluMul(CAST), ("z",), ("h8", "scale_h")),
        steps.scaled_mm("h", "down", "y"),
    )
    saved = ("z", *(steps.shared(name, CAST) for name in ("x", "gate_up", "down")))
    operands = [quantize(name, transpose=True) for name in ("down", "x", "gate_up")]
    backward = (
        steps.together(steps.quantize("dy", CAST, transpose="both"), *operands),
        gradient_matmul("dy", "down_t", "dh"),
        Step(steps.SwiGLUGrad(CAST), ("z", "dh"), _GRADIENTS),
        gradient_matmul("dy_t", "h_t", "ddown"),
        gradient_matmul("dz_t", "x_t", "dgate_up"),
        gradient_matmul("dz", "gate_up_t", "dx"),
    )
    return (
        Steps(("x", *weights), ("y", *saved), forward, rows=("y",)),
        Steps(("dy", "x", *weights, *saved), ("dx", "dgate_up", "ddown"), backward, rows=("dx",)),
    )


def _gathered_steps(num_parts: int) -> tuple[Steps, Steps]:
    """The same for weights that were gathered in fp8, gate and up in `num_parts`; dh is an input of backward."""
    forward = (
        steps.quantize("x", CAST, shares=True),
        steps.scaled_mm("x", "gate_up", "z"),
        Step(steps.SiluMul(CAST), ("z",), ("h8", "scale_h")),
        steps.scaled_mm("h", "down", "y"),
    )
    scale_x = steps.shared("x", CAST)
    parts = tuple(f"part_{position}" for position in range(num_parts))
    operands = steps.quantize("dy", CAST, transpose=True), steps.quantize("x", CAST, transpose=True, shares=True)
    backward = (
        steps.together(*operands),
        Step(steps.SwiGLUGrad(CAST), ("z", "dh", "scale_weight"), _GRADIENTS),
        gradient_matmul("dy_t", "h_t", "ddown"),
        gradient_matmul("dz_t", "x_t", "dgate_up"),
        *frozen_linear.dx_steps(CAST, "dz", parts),
    )
    weights, results = ("gate_up8", "scale_gate_up", "down8", "scale_down"), ("dx", "dgate_up", "ddown")
    return (
        Steps(("x", *weights), ("y", "z", scale_x), forward, rows=("y",)),
        Steps(("dy", "dh", "x", *parts, "scale_weight", "z", scale_x), results, backward, rows=("dx",)),
    )


_GRADIENTS = ("dz8", "scale_dz", "dz_t8", "scale_dz_t", "h_t8", "scale_h_t", "amax_dz", "amax_dz_t", "amax_h_t")
"""Results of `steps.SwiGLUGrad`."""


class _Kind(NamedTuple):
    """What is known of a kind of call before it is made.

    Attributes:
      state: `policy.state()` of the call.
      num_gate: rows of gate; None if gate and up are one weight.
      needs_x: whether x needs a gradient.
      forward: call(x, *operands) -> (y, *saved), with `trained_node.forward_operands` of gate and up, and of down.
      backward: call(dy, x, *operands, *saved) -> (dx, dgate_up, ddown), with `trained_node.backward_operands`.
    """

    state: Any
    num_gate: int | None
    needs_x: bool
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: _Kind, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        *gate_up, down = weights
        operands = *trained_node.forward_operands(gate_up), *trained_node.forward_operands([down])
        y, *saved = policy.run_in(None, kind.forward, x, *operands)
        ctx.kind = kind
        ctx.save_for_backward(x, *weights, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results: tuple[torch.Tensor | None, ...] = policy.run_in(ctx.kind.state, _gradients, ctx, dy)
        return results


_apply = trained_node.apply_of(_SwiGLU)


@differentiable_once
def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kind = ctx.kind
    x, *tensors = ctx.saved_tensors
    count = 1 if kind.num_gate is None else 2
    operands = (
        *trained_node.backward_operands(tensors[:count]),
        *trained_node.backward_operands(tensors[count : count + 1]),
    )
    dx, dgate_up, ddown = kind.backward(dy.resolve_neg().contiguous(), x, *operands, *tensors[count + 1 :])
    of_weights = (dgate_up,) if kind.num_gate is None else (dgate_up[: kind.num_gate], dgate_up[kind.num_gate :])
    return None, dx if kind.needs_x else None, *of_weights, ddown


@functools.cache
def _native(num_parts: int, is_gathered: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    forward, backward = map(trained_node.native, _gathered_steps(num_parts) if is_gathered else _steps(num_parts == 1))
    if not is_gathered:
        return forward, backward
    grad_input = frozen_linear.native_grad_input(trained_node.RECIPE, True)

    def gathered_backward(dy: torch.Tensor, x: torch.Tensor, *tensors: torch.Tensor) -> Any:
        *gate_up, down, scale_down, z, scale_x = tensors
        return backward(dy, steps.rows_of(grad_input(dy, down, scale_down)), x, *gate_up, z, scale_x)

    return forward, gathered_backward


def _kind(x: torch.Tensor, gate_up: Sequence[torch.Tensor], is_gathered: bool) -> _Kind:
    check_is_built(trained_node.RECIPE, x.dtype, x.requires_grad, True, False)
    num_gate = None if len(gate_up) == 1 else len(gate_up[0])
    return _Kind(policy.state(), num_gate, x.requires_grad, *_native(len(gate_up), is_gathered))


_gathered_kind = trained_node.kind_lookup(lambda x, values: _kind(x, values[:-1], True), 3, 0)


def _make(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, y: None, recipe: str
) -> tuple[Any, ...]:
    """The plan of `call`; see `native_call.build`."""
    weights = [weight for weight in (gate, up, down) if weight is not None]
    for weight in weights[:-1]:
        check(x, weight, (x.dtype,))
    function: Callable[..., Any]
    positions: tuple[int, ...] = (0, 1, 2, 3)
    if recipe != trained_node.RECIPE or not trained_node.fits(x, weights):
        function = functools.partial(_by_layers, trained_linear.call, activation, recipe)
    else:
        function = functools.partial(_apply, _kind(x, weights[:-1], False))
        positions = (0, 1, 3) if up is None else positions
    output = native_call.dense((*x.shape[:-1], len(down)), x.dtype)
    return native_call.Direct(function, positions), native_call.is_kept(), x.device, (output,)


def _by_layers(
    linear: Callable[..., torch.Tensor],
    activate: Callable[..., torch.Tensor],
    recipe: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: torch.Tensor,
) -> torch.Tensor:
    """The layers one by one, with `trained_linear.call` and `activation`, or functions like these."""

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, None, None, recipe)

    halves = layer(x, gate).chunk(2, -1) if up is None else (layer(x, gate), layer(x, up))
    return layer(activate(*halves), down)


def _general(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, y: None, recipe: str
) -> torch.Tensor:
    weights = [weight for weight in (gate, up, down) if weight is not None]
    dtype = autocast_dtype(x)
    if torch.compiler.is_dynamo_compiling() or any(is_distributed(weight) for weight in weights):
        return _layers(x, gate, up, down, None, recipe)
    if any(isinstance(weight, GatheredWeight) for weight in weights):
        x = x if dtype is None else x.to(dtype)
        if recipe == trained_node.RECIPE and (kind := _gathered_kind(x, weights)) is not None:
            result: torch.Tensor = _apply(kind, x, *weights)
            return result
        return _by_layers(_general_linear, activation, recipe, x, gate, up, down)
    if dtype is not None:
        up = None if up is None else up.to(dtype)
        return _call_cast(x.to(dtype), gate.to(dtype), up, down.to(dtype), None, recipe)
    return _layers(x, gate, up, down, None, recipe)


def _layers(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, down: torch.Tensor, y: None, recipe: str
) -> torch.Tensor:
    return _by_layers(_general_linear, _activation_by_ops, recipe, x, gate, up, down)


def _general_linear(x: torch.Tensor, weight: torch.Tensor, bias: None, y: None, recipe: str) -> torch.Tensor:
    return trained_linear.general(x, weight, bias, recipe)


def _activation_by_ops(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def _built(slow: Callable[..., torch.Tensor], *, is_cast: bool) -> Callable[..., torch.Tensor]:
    fast, _ = native_call.build(
        _make, slow, num_tensors=5, outs=[4], optional=[2, 4], aligned=[0, 1, 2, 3], num_objects=1, is_layer=True,
        is_cast=is_cast,
    )  # fmt: skip
    return slow if fast is None else fast.call


_call_cast = _built(_layers, is_cast=True)

call = _built(_general, is_cast=False)
"""call(x, gate, up, down, None, recipe) -> y, of any kind.

x is [..., k], gate and up [n, k], and down [k, n], of one dtype, or any under autocast. If up is None, gate is
[2 n, k], with the rows of up last. The recipe is a name of `stoneware.nn.recipes`, or BF16.
"""


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        h: torch.Tensor = _forward(gate, up)
        return h

    @staticmethod
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        gradients: tuple[torch.Tensor, ...]
        gradients = (_gradients_by_ops if torch.is_grad_enabled() else _backward)(dh, gate, up)
        return gradients


def _gradients_by_ops(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As ops that have gradients themselves, which torch's silu_backward has not."""
    sigmoid = gate.sigmoid()
    return dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid


_forward = steps.native_call(
    Steps(("gate", "up"), ("h",), (Step(steps.Activation(), ("gate", "up"), ("h",)),), rows=("h",)), _activation_by_ops
)

_backward = steps.native_call(
    Steps(
        ("dh", "gate", "up"),
        ("dgate", "dup"),
        (Step(steps.ActivationGrad(), ("dh", "gate", "up"), ("dgate", "dup")),),
        rows=("dgate", "dup"),
    ),
    _gradients_by_ops,
)


def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, with the bits of torch in 16 bits."""
    if gate.shape != up.shape or gate.dtype not in BITS_16 or gate.dtype != up.dtype:
        return _activation_by_ops(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        h: torch.Tensor = _Activation.apply(gate, up)
        return h
    result: torch.Tensor = _forward(gate, up)
    return result
