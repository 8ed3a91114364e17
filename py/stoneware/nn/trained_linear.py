"""The matmuls of a linear layer that trains, each direction as one native call.

    forward    x, weight     -> quantized -> y
    backward   dy, weight, x -> quantized, transposed where the matmul needs it -> dx, dw

"bf16" is the recipe that quantizes nothing. A tensor scale needs the largest element of the tensor, and column scales
the largest of each column. Forward returns these reductions of x and of the weight with y, so backward need not read
the tensors again; those of small tensors it finds again (`trained_steps.shares`).

    call               a layer's call with gradients enabled. What runs is decided once for each kind of call: torch's
                       own layer, if each of the three matmuls would run torch's kernel; otherwise `_KnownLinear`, or
                       `_Linear` if rows must be padded
    call_without_grad  the same under torch.no_grad
    general            a call of any kind: autocast, traces, DTensors, torch dispatch modes
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from stoneware.nn import frozen_linear, steps, traced_linear, trained_steps
from stoneware.nn.arguments import BITS_16, FLOATS, autocast, check, check_no_transform, is_distributed
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import BF16, RECIPES, UNIT, check_is_built, why_not
from stoneware.nn.steps import Matmul, Steps, rows_of
from stoneware.ops import native_call
from stoneware.ops.backend import is_torch_plan
from stoneware.ops.backward import differentiable_once, in_state_of_call
from stoneware.ops.matmul.api import matmul
from stoneware.tuning import policy


def general(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str) -> torch.Tensor:
    """x @ weight.t() + bias with the operands of the recipe, also in its gradients.

    Args:
      x: [..., k], bfloat16, float16 or float32, or any dtype under autocast.
      weight: [n, k] of that dtype.
      bias: [n] of that dtype, or None.
      recipe: a name of `stoneware.nn.recipes`, or BF16.

    Returns:
      [..., n] of that dtype.

    Raises:
      BackwardNotBuiltError: a gradient would be needed that this installation was built without.
      TypeError, ValueError: x or the weight breaks a rule.
    """
    if is_distributed(weight):
        from stoneware.nn import sharded

        return sharded.linear(functools.partial(_linear_of_part, recipe), *autocast(x, weight, bias))
    x, weight, bias = autocast(x, weight, bias)
    if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
        return _checked(x, weight, bias, None, recipe)
    return (_checked if isinstance(weight, GatheredWeight) else _call_cast)(x, weight, bias, None, recipe)


def check_x(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises TypeError or ValueError for an x that does not fit a layer of this recipe."""
    check(x, weight, BITS_16 if recipe == BF16 else FLOATS)


def _linear_of_part(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out_features, in_features = weight.shape
    reason = why_not(recipe, in_features, out_features)
    if reason is not None:
        raise ValueError(f"{reason} on each rank; cut it among fewer ranks, or leave it a torch.nn.Linear")
    return _linear(recipe, x, weight, bias)


def _linear(recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if recipe == BF16:
        return matmul(x, weight.t(), bias)
    if not torch.is_grad_enabled():
        # Not _Linear: its ctx.needs_input_grad is True even under no_grad.
        if torch.compiler.is_dynamo_compiling():
            return traced_linear.forward(recipe, x, weight, bias)[0]
        y: torch.Tensor = _forward(recipe, False, False, x, weight, bias)
        return y
    check_no_transform()
    needs_bias = bias is not None and bias.requires_grad
    check_is_built(recipe, x.dtype, x.requires_grad, weight.requires_grad, needs_bias)
    return _Linear.apply(recipe, x, weight, bias)


def _forward(
    recipe: str, needs_x: bool, needs_weight: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    """The results of `_native_forward`; a weight that was gathered in fp8 has no reduction."""
    if isinstance(weight, GatheredWeight):
        forward = frozen_linear.native_linear(recipe, False, needs_weight and trained_steps.shares(recipe, x))
        return forward(x, weight.quantized, weight.scale, bias)
    return _native_forward(recipe, *_shared(recipe, x if needs_weight else None, weight if needs_x else None))(
        x, weight, bias
    )


def _shared(recipe: str, x: torch.Tensor | None, weight: torch.Tensor | None) -> tuple[bool, bool]:
    """Whether backward, which needs this x for dw and this weight for dx, takes a reduction of each from forward."""
    is_shared = trained_steps.shares
    return x is not None and is_shared(recipe, x), weight is not None and is_shared(recipe, weight)


class _Linear(torch.autograd.Function):
    """Saves x and weight before their casts, because backward casts them along the other dimension."""

    @staticmethod
    def forward(
        ctx: Any, recipe: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        if torch.compiler.is_dynamo_compiling():
            keeps_x = needs_weight and not _padding(recipe, x)
            results = traced_linear.forward(recipe, x, weight, bias, needs_x=needs_x, needs_weight=keeps_x)
        else:
            ctx.state = policy.state()
            results = policy.run_in(None, _forward, recipe, needs_x, needs_weight, x, weight, bias)
        shared: list[torch.Tensor]
        y, *shared = (results,) if isinstance(results, torch.Tensor) else results
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, *shared)
        ctx.recipe = recipe
        return y

    @staticmethod
    @differentiable_once
    @in_state_of_call
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *shared = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = dbias = None
        if x is not None or weight is not None:
            dx, dw = _gradients(ctx.recipe, dy, x, weight, shared)
        if ctx.needs_input_grad[3]:
            dbias = rows_of(dy).sum(0)
        return None, dx, dw, dbias


Gradients = Callable[[Any, torch.Tensor], tuple[torch.Tensor | None, ...]]
"""(ctx, dy) -> the gradients of the arguments of `apply`."""


class _Kind(NamedTuple):
    """What is known of a kind of call before it is made.

    Attributes:
      recipe: its name.
      state: `policy.state()` of the call.
      needs_x, needs_weight, needs_bias: whether these need a gradient.
      forward: see `_native_forward`.
      backward: see `trained_steps.native_backward`; None if only the bias needs a gradient.
    """

    recipe: str
    state: Any
    needs_x: bool
    needs_weight: bool
    needs_bias: bool
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


class _KnownLinear(torch.autograd.Function):
    """`_Linear` without what depends only on the kind of call. It saves what the backward takes, in this order."""

    @staticmethod
    def forward(
        ctx: Any, kind: _Kind, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        results = policy.run_in(None, kind.forward, x, weight, bias)
        ctx.kind = kind
        y: torch.Tensor
        if type(results) is tuple:
            y, *shared = results
        else:
            y, shared = results, []
        saved = [x] if kind.needs_weight else []
        if kind.needs_x:
            saved.append(weight)
        ctx.save_for_backward(*saved, *shared)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kind = ctx.kind
        gradients: Gradients = _known_gradients
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _differentiable_gradients if kind.recipe == BF16 else differentiable_once(_known_gradients)
        result: tuple[torch.Tensor | None, ...] = policy.run_in(kind.state, gradients, ctx, dy)
        return result


# torch.autograd.Function.apply without its checks for torch.func, whose calls never come here.
_apply = super(torch.autograd.Function, _KnownLinear).apply


def _known_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kind = ctx.kind
    if not dy.is_contiguous():
        dy = dy.contiguous()
    dx = dw = dbias = None
    if kind.backward is not None:
        results = kind.backward(dy, *ctx.saved_tensors)
        if not kind.needs_weight:
            dx = results
        elif not kind.needs_x:
            dw = results
        else:
            dx, dw = results
    if kind.needs_bias:
        dbias = rows_of(dy).sum(0)
    return None, dx, dw, dbias


def _differentiable_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients in 16 bits, as calls that have gradients themselves."""
    kind = ctx.kind
    saved = iter(ctx.saved_tensors)
    dw = matmul(rows_of(dy).t(), rows_of(next(saved))) if kind.needs_weight else None
    dx = matmul(dy, next(saved)) if kind.needs_x else None
    return None, dx, dw, rows_of(dy).sum(0) if kind.needs_bias else None


def _make(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: None, recipe: str) -> tuple[Any, ...]:
    """The plan of `call`; see `native_call.build`."""
    check_x(recipe, x, weight)
    is_enabled = torch.is_grad_enabled()
    needs_x, needs_weight = is_enabled and x.requires_grad, is_enabled and weight.requires_grad
    needs_bias = is_enabled and bias is not None and bias.requires_grad
    needs = needs_x, needs_weight, needs_bias
    function: Callable[..., Any]
    if not any(needs):
        function = _native_forward(recipe, False, False)
    elif recipe == BF16 and _runs_torch_kernels(x, weight, bias, needs):
        function = torch.nn.functional.linear
    elif needs_weight and _padding(recipe, x):
        function = functools.partial(_linear, recipe)
    else:
        check_is_built(recipe, x.dtype, *needs)
        shares_x, shares_weight = _shared(recipe, x if needs_weight else None, weight if needs_x else None)
        forward, backward = _native_forward(recipe, shares_x, shares_weight), None
        if needs_x or needs_weight:
            backward = trained_steps.native_backward(
                recipe, needs_x, needs_weight, shares_x=shares_x, shares_weight=shares_weight
            )
        function = functools.partial(
            _apply, _Kind(recipe, policy.state(), needs_x, needs_weight, needs_bias, forward, backward)
        )
    output = native_call.dense((*x.shape[:-1], weight.shape[0]), x.dtype)
    return native_call.Direct(function, (0, 1, 2)), native_call.is_kept(), x.device, (output,)


def _runs_torch_kernels(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: tuple[bool, ...]
) -> bool:
    """Whether each matmul in 16 bits would run torch's kernel, so that torch's layer is the same with less work.

    Not once a scope of `sw.tuning` or `sw.batch_invariant` was opened: those of the thread that calls backward()
    count in autograd's threads, where this decision does not see them.
    """
    if policy.has_had_scopes():
        return False
    dy = x.new_empty((*x.shape[:-1], weight.shape[0]))
    matmuls = [(Matmul("nt"), x, weight, bias)]
    matmuls += [(Matmul("nn"), dy, weight, None)] * needs[0] + [(Matmul("tn"), dy, x, None)] * needs[1]
    return all(is_torch_plan(op.plan(x.dtype, *operands)[0]) for op, *operands in matmuls)


def _checked(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: None, recipe: str) -> torch.Tensor:
    check_x(recipe, x, weight)
    return _linear(recipe, x, weight, bias)


def _general(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: None, recipe: str) -> torch.Tensor:
    return general(x, weight, bias, recipe)


def _built(slow: Callable[..., torch.Tensor], *, is_cast: bool) -> Callable[..., torch.Tensor]:
    """call(x, weight, bias, None, recipe) -> y, for usual calls as `_make` decides."""
    fast, _ = native_call.build(
        _make, slow, num_tensors=4, outs=[3], optional=[2, 3], aligned=[0, 1], num_objects=1, is_layer=True,
        is_cast=is_cast,
    )  # fmt: skip
    return slow if fast is None else fast.call


_call_cast = _built(_checked, is_cast=True)

call = _built(_general, is_cast=False)
"""call(x, weight, bias, None, recipe) -> y, of any kind; arguments as for `general`."""


@functools.cache
def call_without_grad(recipe: str) -> Callable[..., torch.Tensor]:
    """call(x, weight, bias) -> y, of any kind."""
    return steps.native_call(
        trained_steps.FORWARD[recipe],
        lambda x, weight, bias: general(x, weight, bias, recipe),
        optional=("bias",),
        check=lambda x, weight, bias: check_x(recipe, x, weight),
        is_layer=True,
    )


def _gradients(
    recipe: str, dy: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor | None, shared: list[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, if there is a weight, and of the weight, if there is an x.

    Args:
      shared: the reductions of x and of the weight, if `_native_forward` returned them; in a trace what
        `traced_linear.forward` returned.
    """
    dx: torch.Tensor | None
    if isinstance(weight, GatheredWeight):
        if x is not None and not _padding(recipe, dy) and not torch.compiler.is_dynamo_compiling():
            backward = native_gathered_backward(recipe, bool(shared))
            dx, dw = backward(dy, x, weight.quantized, weight.scale, *shared)
            return dx, dw
        dx = frozen_linear.grad_input(dy, weight.quantized, weight.scale, recipe, is_trained=True)
        return dx, None if x is None else _gradients(recipe, dy, x, None, shared)[1]
    if x is not None and (padding := _padding(recipe, dy)):
        of_weight = shared[-1:] if weight is not None and trained_steps.shares(recipe, weight) else []
        dx = None if weight is None else _gradients(recipe, dy, None, weight, of_weight)[0]
        dy, x = (torch.nn.functional.pad(rows_of(tensor), (0, 0, 0, padding)) for tensor in (dy, x))
        return dx, _gradients(recipe, dy, x, None, [])[1]
    tensors = [tensor for tensor in (dy, x, weight) if tensor is not None]
    needs = weight is not None, x is not None
    if torch.compiler.is_dynamo_compiling():
        results = traced_linear.backward(recipe, dy, x, weight, shared)
    else:
        shares_x, shares_weight = _shared(recipe, x, weight) if shared else (False, False)
        call = trained_steps.native_backward(recipe, *needs, shares_x=shares_x, shares_weight=shares_weight)
        results = call(*tensors, *shared)
    if len(tensors) == 3:
        dx, dw = results
        return dx, dw
    (result,) = results if isinstance(results, list) else (results,)
    return (result, None) if weight is not None else (None, result)


@functools.cache
def _native_forward(recipe: str, shares_x: bool, shares_weight: bool) -> Callable[..., Any]:
    """call(x, weight, bias) -> y, or (y, *reductions) of what backward shares.

    Unusual calls return only y.
    """
    forward = trained_steps.forward_steps(recipe, shares_x, shares_weight)
    return steps.native_call(forward, functools.partial(traced_linear.forward_by_ops, recipe), optional=("bias",))


@functools.cache
def native_gathered_backward(recipe: str, shares: bool, num_parts: int = 1) -> Callable[..., Any]:
    """call(dy, x, *parts of the weight in fp8, scale, *reduction of x) -> (dx, dw).

    The call has the reduction if `shares`.
    """
    (cast, _), grad_weight = RECIPES[recipe].grad_input, RECIPES[recipe].grad_weight
    parts = [f"part_{position}" for position in range(num_parts)]
    quantized, reductions, wgrad = [frozen_linear.gradient_quantization(cast)], [], trained_steps.WGRAD
    if grad_weight is not None:
        quantize_dy = steps.quantize("dy", grad_weight[0], transpose=True)
        if cast == grad_weight[0] and cast.scales != "row":  # one cast for both
            quantized, quantize_dy = [], steps.quantize("dy", cast, transpose="both")
        quantize_x = steps.quantize("x", grad_weight[1], transpose=True, shares=shares)
        quantized.append(steps.together(quantize_dy, quantize_x))
        reductions = [steps.shared("x", grad_weight[1])] * shares
        wgrad = steps.scaled_mm("dy_t", "x_t", "dw", use_fast_accum=False)
    sequence = *quantized, *frozen_linear.dx_steps(cast, parts=parts), wgrad
    backward = Steps(("dy", "x", *parts, "scale_weight", *reductions), ("dx", "dw"), sequence, rows=("dx",))
    return steps.native_call(backward, lambda *tensors: tuple(backward.run(*tensors)))


def _padding(recipe: str, x: torch.Tensor) -> int:
    """How many rows of zeros x and dy get for an fp8 dw, which sums over them; 0 rows are padded too."""
    if recipe == BF16 or RECIPES[recipe].grad_weight is None:
        return 0
    num_rows = x.numel() // x.shape[-1]
    return -num_rows % UNIT if num_rows else UNIT
