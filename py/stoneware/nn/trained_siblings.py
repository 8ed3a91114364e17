"""Layers that read the same argument of a module's forward, as q, k and v of attention do, trained as one node of
autograd with rowwise fp8: their weights are one operand, and x is quantized once.

The first layer that the module calls computes them all, and the others take their results if they are called with the
same tensor during that call of the module. Nothing is stored on a tensor, or beyond the call. That the module calls
each of them with its argument is proved by its code (`data_flow.siblings`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from stoneware.nn import conditions, frozen_linear, steps, trained_linear, trained_node
from stoneware.nn.arguments import autocast_dtype, check
from stoneware.nn.gathered_weight import GatheredWeight
from stoneware.nn.recipes import check_is_built
from stoneware.nn.steps import Step, Steps
from stoneware.nn.trained_node import CAST, gradient_matmul
from stoneware.ops import native_call
from stoneware.ops.backward import differentiable_once
from stoneware.tuning import policy

MOST = 4
"""Layers of a node."""


class _Computed(NamedTuple):
    """The results for x in a thread, by the id of the layer; each is taken once."""

    thread: int
    x: torch.Tensor
    version: int
    results: dict[int, torch.Tensor]


class Siblings:
    """The layers of a module, and their results during one of its calls.

    Args:
      owner: the module.
      names: of the layers in it.

    Attributes:
      thread: where a call of the owner runs; None outside of calls. If two threads call the owner at once, only the
        call that started last computes its layers together.
    """

    def __init__(self, owner: torch.nn.Module, names: Sequence[str]) -> None:
        self.owner, self.names = owner, tuple(names)
        self.thread: int | None = None
        self._computed: _Computed | None = None

    def begin(self) -> None:
        self.thread, self._computed = get_ident(), None

    def end(self) -> None:
        self.thread = self._computed = None

    def take(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """y of one of the layers, or None if it must compute y itself."""
        thread = get_ident()
        if self.thread != thread:
            return None
        computed = self._computed  # read once: another thread may write its own
        if computed is None or computed.thread != thread or computed.x is not x or computed.version != x._version:
            results = self._compute(x) if type(x) is torch.Tensor and self.holds() else {}
            computed = self._computed = _Computed(thread, x, x._version, results)
        return computed.results.pop(id(layer), None)

    def _compute(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        layers = self._layers
        weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
        if any(weight is None for weight in weights):  # parametrized
            return {}
        biases: list[Any] = [layer._parameters["bias"] for layer in layers]
        dtype, is_gathered = autocast_dtype(x), isinstance(weights[0], GatheredWeight)
        if dtype is not None:
            x = x.to(dtype)
            biases = [None if bias is None else bias.to(dtype) for bias in biases]
            weights = weights if is_gathered else [weight.to(dtype) for weight in weights]
        absent = [None] * (MOST - len(layers))
        if is_gathered:
            results = _call_gathered(x, weights, *biases, *absent)
        else:
            call = _call if dtype is None else _call_cast
            results = call(x, *weights, *absent, *biases, *absent, None)
        return {} if results is None else {id(layer): y for layer, y in zip(layers, results)}

    @functools.cached_property
    def _layers(self) -> list[Any]:
        return [self.owner.get_submodule(name) for name in self.names]

    @functools.cached_property
    def holds(self) -> Callable[[], bool]:
        """holds() returns whether the layers are unchanged and have no hooks."""
        layers = self._layers
        submodules = [(self.owner, name, layer) for name, layer in zip(self.names, layers)]
        return conditions.check(submodules=submodules, **conditions.of_layers(layers))

    def __getstate__(self) -> dict[str, Any]:
        """The state of a running call is not copied."""
        return {"owner": self.owner, "names": self.names, "thread": None, "_computed": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Siblings | None:
        """The siblings in a copy of the owner; a layer copied without its owner has none."""
        if id(self.owner) not in memo:
            return None
        new = memo[id(self)] = Siblings(memo[id(self.owner)], self.names)
        return new


class _Kind(NamedTuple):
    """What is known of a kind of call before it is made.

    Attributes:
      state: `policy.state()` of the call.
      sizes: out_features of each layer.
      has_bias: whether the layers have biases.
      forward: call(x, *`trained_node.forward_operands(weights)`, bias) -> (y of all layers, *saved).
      backward: call(dy of all layers, x, *`trained_node.backward_operands(weights)`, *saved) -> (dx, dw of all layers).
    """

    state: Any
    sizes: tuple[int, ...]
    has_bias: bool
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _Siblings(torch.autograd.Function):
    """Of kind, x, the weights and the biases."""

    @staticmethod
    def forward(ctx: Any, kind: _Kind, x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(kind.sizes)
        weights, biases = parameters[:count], parameters[count:]
        bias = torch.cat(biases) if kind.has_bias else None
        y, *saved = policy.run_in(None, kind.forward, x, *trained_node.forward_operands(weights), bias)
        ctx.kind = kind
        ctx.save_for_backward(x, *weights, *saved)
        return _columns(y, kind.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results: tuple[torch.Tensor | None, ...] = policy.run_in(ctx.kind.state, _gradients, ctx, *gradients)
        return results


_apply = trained_node.apply_of(_Siblings)


def _columns(y: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """y [..., n] in parts along n, in the same memory, but not views: those of a node may not be changed in place."""
    parts, first = [], y.storage_offset()
    for size in sizes:
        part = torch.empty(0, dtype=y.dtype, device=y.device)
        parts.append(part.set_(y.untyped_storage(), first, (*y.shape[:-1], size), y.stride()))
        first += size
    return tuple(parts)


@differentiable_once
def _gradients(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kind = ctx.kind
    dy = torch.cat(gradients, -1)
    x, *tensors = ctx.saved_tensors
    count = len(kind.sizes)
    dx, dw = kind.backward(dy, x, *trained_node.backward_operands(tensors[:count]), *tensors[count:])
    of_biases: tuple[torch.Tensor, ...] = ()
    if kind.has_bias:
        of_biases = steps.rows_of(dy).sum(0).split(kind.sizes)
    return None, dx, *dw.split(kind.sizes), *of_biases


@functools.cache
def _native(count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    weights = tuple(f"weight_{position}" for position in range(count))
    saved = tuple(steps.shared(name, CAST) for name in ("x", "weight"))

    def quantize(name: str, transpose: bool | str = False) -> Step:
        parts = weights if name == "weight" else ()
        return steps.quantize(name, CAST, shares=name != "dy", parts=parts, transpose=transpose)

    forward = Steps(
        ("x", *weights, "bias"),
        ("y", *saved),
        (steps.together(quantize("x"), quantize("weight")), steps.scaled_mm("x", "weight", "y", bias="bias")),
        rows=("y",),
    )
    operands = steps.together(quantize("dy", "both"), quantize("weight", True), quantize("x", True))
    backward = Steps(
        ("dy", "x", *weights, *saved),
        ("dx", "dw"),
        (operands, gradient_matmul("dy", "weight_t", "dx"), gradient_matmul("dy_t", "x_t", "dw")),
        rows=("dx",),
    )

    return trained_node.native(forward, ("bias",)), trained_node.native(backward)


def _native_gathered(count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    recipe = trained_node.RECIPE
    backward = trained_linear.native_gathered_backward(recipe, True, count)
    return frozen_linear.native_linear(recipe, False, True), backward


def _make(x: torch.Tensor, *tensors: Any) -> tuple[Any, ...]:
    """The plan of `_call`; see `native_call.build`."""
    weights = [weight for weight in tensors[:MOST] if weight is not None]
    biases = [bias for bias in tensors[MOST : 2 * MOST] if bias is not None]
    for weight in weights:
        check(x, weight, (x.dtype,))
    count, output = len(weights), native_call.dense((*x.shape[:-1], 1), x.dtype)
    if not trained_node.fits(x, weights) or (kind := _kind(_native, x, weights, biases)) is None:
        return native_call.Direct(_no_results, ()), native_call.is_kept(), x.device, (output,)
    positions = [0, *range(1, 1 + count), *range(1 + MOST, 1 + MOST + len(biases))]
    function = functools.partial(_apply, kind)
    return native_call.Direct(function, positions), native_call.is_kept(), x.device, (output,)


def _kind(
    native: Callable[..., Any], x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> _Kind | None:
    """The kind of a call; None if the layers must be called one by one."""
    needs_all = x.requires_grad and all(bias.requires_grad for bias in biases)
    if not needs_all or len(biases) not in (0, len(weights)):
        return None
    check_is_built(trained_node.RECIPE, x.dtype, True, True, bool(biases))
    return _Kind(policy.state(), tuple(map(len, weights)), bool(biases), *native(len(weights)))


def _make_gathered(x: torch.Tensor, values: Sequence[torch.Tensor], *biases: torch.Tensor | None) -> _Kind | None:
    return _kind(_native_gathered, x, values, [bias for bias in biases if bias is not None])


_gathered_kind = trained_node.kind_lookup(_make_gathered, MOST, MOST)


def _call_gathered(x: torch.Tensor, weights: Sequence[Any], *biases: torch.Tensor | None) -> Any:
    """The results of `_call` for weights that were gathered in fp8."""
    kind = _gathered_kind(x, weights, *biases)
    return None if kind is None else _apply(kind, x, *weights, *(bias for bias in biases if bias is not None))


def _no_results() -> None:
    """Of layers that are not computed together."""


def _not_usual(*tensors: Any) -> None:
    """A call in Python: traces, torch dispatch modes, subclasses. The layers are called one by one."""


def _built(*, is_cast: bool) -> Callable[..., Any]:
    num_tensors = 2 + 2 * MOST
    fast, _ = native_call.build(
        _make,
        _not_usual,
        num_tensors=num_tensors,
        outs=[num_tensors - 1],
        optional=range(2, num_tensors),
        aligned=range(1 + MOST),
        is_layer=True,
        is_cast=is_cast,
    )
    return _not_usual if fast is None else fast.call


_call, _call_cast = _built(is_cast=False), _built(is_cast=True)
"""call(x, *weights, *biases, None) -> y of each layer, or None; MOST weights and biases, the last of which are None.
The second is for what was cast for torch.autocast."""
