"""Blocks of other people's models whose calls are one kernel, or one native call.

`fuse` gives a block whose code is proved (`stoneware.nn.proofs`) a class that is derived from one of these and from
the block's own. The module stays what it is: its parameters, buffers, submodules, hooks, attributes, signature and
state_dict. A call that is not plain (keywords, autocast, hooks of submodules, a changed attribute or submodule) is the
block's own forward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from stoneware.nn import swiglu
from stoneware.nn.arguments import autocast_dtype
from stoneware.nn.experts import Experts, Float8InferenceExperts
from stoneware.nn.handover import Handover, Route
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.native_chain import Call, chain, dense, rows_of
from stoneware.nn.proofs import SwiGLUParts
from stoneware.nn.recipes import RECIPES
from stoneware.quantizing import fused
from stoneware.tuning import policy

_STATE = "_stoneware"

_ATTRIBUTES_OF_TORCH = frozenset(
    {
        "training", "__dict__", "_parameters", "_buffers", "_modules", "_former_parameters", "_is_replica", "_hf_hook",
        "_old_forward", "forward",
    }
)  # fmt: skip
"""What torch and accelerate set; forward is read where it is called."""


class FusedBlock(torch.nn.Module):
    """A block that has a proof, in its attribute `_stoneware`, a `State`.

    Attributes:
      free: names of attributes on which the proof does not depend.
    """

    free = _ATTRIBUTES_OF_TORCH

    def __init_subclass__(cls, **options: Any) -> None:
        """Hides the derived class from a block's own __init_subclass__."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Ends the proof if an attribute changes on which forward may depend."""
        self._end_proof(name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._end_proof(name, None)
        super().__delattr__(name)

    def _end_proof(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in self.free or _STATE not in own:
            return
        if not isinstance(value, torch.Tensor) or (name not in own["_parameters"] and name not in own["_buffers"]):
            own[_STATE].is_proved = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made anew where the block is loaded or copied."""
        mixin, kind, *others = type(self).__mro__[1:2] + type(self).__bases__[1:]
        if others or _fused_class(mixin, kind) is not type(self):  # a class that somebody derived from it
            return super().__reduce_ex__(protocol)
        own = getattr(kind, "__getstate__", None)
        state = own(self) if own is not None else None
        return _empty, (mixin, kind), vars(self) if state is None else state


def fuse(block: torch.nn.Module, mixin: type[FusedBlock], state: Any) -> None:
    """Adds a class to those of a block, in place."""
    state.kind, state.forward = type(block), type(block).forward
    vars(block)[_STATE] = state
    block.__class__ = _fused_class(mixin, type(block))  # type: ignore[arg-type]  # a class has a hash


def unfuse(block: torch.nn.Module) -> None:
    """Takes `fuse` back."""
    _, block.__class__ = type(block).__bases__
    del vars(block)[_STATE]


def _is_proved(state: State) -> bool:
    """Whether attributes and class of the block are those of the proof, so that its own forward computes the same."""
    kind: Any = state.kind
    if state.forward is None:  # in a pickle
        state.forward = kind.forward
    return state.is_proved and kind.forward is state.forward


def _is_watched(state: SwiGLUState) -> bool:
    """Whether a call of a submodule is more than its class's forward."""
    if torch_module._has_any_global_hook():
        return True
    if not state.hooks:
        own = [vars(module) for module in state.modules if module is not None]
        state.hooks = [one[name] for one in own for name in _HOOKS]
        state.attributes = own
    for attributes in state.attributes:
        if "forward" in attributes:
            return True
    return any(state.hooks)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def _fused_class(mixin: type[FusedBlock], kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    # A copy of the function, which has the signature of the block's own, and saves the call of a wrapper.
    call: Any = mixin.forward
    copied = FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    forward = functools.wraps(kind.forward)(copied)
    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), names)


def _empty(mixin: type[FusedBlock], kind: type[torch.nn.Module]) -> torch.nn.Module:
    fused_class = _fused_class(mixin, kind)  # type: ignore[arg-type]  # as above
    return fused_class.__new__(fused_class)


@dataclass(kw_only=True)
class State:
    """A proof.

    Attributes:
      is_proved: whether the block's attributes are those of the proof.
      kind, forward: the block's own class, and its forward as it was then.
    """

    is_proved: bool = True
    kind: Any = None
    forward: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickle has no functions of classes."""
        return {**vars(self), "forward": None}


@dataclass(kw_only=True)
class NormState(State):
    """What `FusedRMSNorm` was proved to compute.

    Attributes:
      eps: what is added to the mean of squares.
      dtype: of the weight.
      handover, route: where its result goes in fp8, and by which modules; None if nothing is proved of that.
    """

    eps: float
    dtype: torch.dtype
    handover: Handover | None = None
    route: Route | None = None


class FusedRMSNorm(FusedBlock):
    """x / sqrt(mean(x^2) + eps) * weight in float32, rounded once, by one kernel.

    Without a gradient to compute, that kernel also writes the result in fp8 for the layers at the end of its route.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: NormState = self._stoneware  # type: ignore[assignment]
        weight: torch.Tensor = self.weight  # type: ignore[assignment]
        if (
            kwargs
            or len(args) != 1
            or torch.compiler.is_compiling()
            or not _is_proved(state)
            or not isinstance(args[0], torch.Tensor)
            or args[0].dtype is not state.dtype
            or weight.dtype is not state.dtype
            or not args[0].ndim
            or args[0].size(-1) != weight.size(0)
            or autocast_dtype(args[0]) is not None
        ):
            return super().forward(*args, **kwargs)
        (x,) = args
        handover, route = state.handover, state.route
        if handover is None or route is None or not handover.is_open() or not route.is_open():
            return torch.nn.functional.rms_norm(x, weight.shape, weight, state.eps)
        y, values, scale = rms_norm_fp8(state.eps)(x, weight)
        if values is not None:
            handover.give(y, values, scale)
        return y


@functools.cache
def rms_norm_fp8(epsilon: float) -> Call:
    """call(x, weight) -> (y, y8, scale); the last two are None for autograd and for torch dispatch modes."""
    cast = RECIPES["rowwise"].forward[0]

    def make(x: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = rows_of(x)
        plan = fused.rms_norm_plan(rows, weight, epsilon, cast.power_of_two)
        step = plan, ("x.rows", "weight", "y.rows", "y8.rows", "scale.rows")
        of_scale = (*(x.shape[:-1] or (1,)), 1)
        outputs = [dense(x.shape, x.dtype), dense(x.shape, cast.dtype), dense(of_scale, torch.float32)]
        return [step], x.device, outputs, rows.data_ptr() == x.data_ptr()

    def slow(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None, None

    return chain(("x", "weight"), ("y", "y8", "scale"), make, slow, num_results=3)


@dataclass(kw_only=True)
class SwiGLUState(State):
    """What `FusedSwiGLU` was proved to compute, and its weights.

    Attributes:
      parts: which submodules are its layers.
      modules: all submodules, as they were then.
      handover: what may have x in fp8.
      joined: weight and scales of gate and up as one product, whose memory is that of the two layers.
      addresses: of the weights and the scales of the two in it.
      joined_parameters: weight and scales of gate, then of up.
      hooks, attributes: dicts of the submodules, found at the first call.
    """

    parts: SwiGLUParts
    modules: list[torch.nn.Module | None]
    handover: Handover | None = None
    joined: tuple[torch.Tensor, torch.Tensor] | None = None
    addresses: tuple[int, ...] = ()
    joined_parameters: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    attributes: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layers has memory of its own, which is joined anew."""
        return {
            **super().__getstate__(),
            "joined": None,
            "addresses": (),
            "joined_parameters": [],
            "hooks": [],
            "attributes": [],
        }


class FusedSwiGLU(FusedBlock):
    """down(silu(gate(x)) * up(x)) over frozen rowwise layers as one native call, in which gate and up are one product.

    The weights of gate and up are views of one tensor.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: SwiGLUState = self._stoneware  # type: ignore[assignment]
        if kwargs or len(args) != 1 or not _is_proved(state) or not isinstance(args[0], torch.Tensor):
            return super().forward(*args, **kwargs)
        (x,) = args
        modules = self._modules
        if [*modules.values()] != state.modules or _is_watched(state) or autocast_dtype(x) is not None:
            return super().forward(x)
        layers: list[Any] = [modules[name] for name in (*state.parts.gate_up, state.parts.down)]
        if any(type(one) is not Float8InferenceLinear or one._parameters["bias"] is not None for one in layers):
            return super().forward(x)
        down = layers.pop()
        is_compiling = torch.compiler.is_compiling()
        if len(layers) == 1:
            gate_up, scale_gate_up = layers[0].weight, layers[0].weight_scale_inv
        else:
            if not is_compiling and _addresses(layers) != state.addresses:
                parameters = _parameters(layers)
                if not state.joined_parameters or [*map(id, parameters)] == [*map(id, state.joined_parameters)]:
                    join(self)
                else:  # others, perhaps for a time, as torch.func.functional_call puts them there
                    return super().forward(x)
            if state.joined is None:
                return super().forward(x)
            gate_up, scale_gate_up = state.joined
        if is_compiling:
            return swiglu.frozen_by_ops(x, gate_up, scale_gate_up, down.weight, down.weight_scale_inv)
        given = () if state.handover is None else state.handover.take(x)
        parameters = down._parameters
        return swiglu.frozen(bool(given))(
            x, *given, gate_up, scale_gate_up, parameters["weight"], parameters["weight_scale_inv"]
        )

    def _apply(self, fn: Any, recurse: bool = True) -> FusedSwiGLU:
        super()._apply(fn, recurse)
        join(self)
        return self


def _parameters(layers: list[Any]) -> list[Any]:
    return [layer._parameters[name] for name in ("weight", "weight_scale_inv") for layer in layers]


def _addresses(layers: list[Any]) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in _parameters(layers))


def join(block: torch.nn.Module) -> None:
    """Puts the weights of gate and up, and their scales, one behind the other, and makes the layers' views of that.

    Within a CUDA graph capture nothing is copied, and the layers stay two products.
    """
    state: SwiGLUState = block._stoneware  # type: ignore[assignment]
    state.joined, state.addresses = None, ()
    state.joined_parameters = []
    layers: list[Any] = [block.get_submodule(name) for name in state.parts.gate_up]
    if len(layers) == 1 or any(type(layer) is not Float8InferenceLinear for layer in layers):
        return
    if layers[0].weight.is_meta or policy.is_capturing():
        return
    with torch.inference_mode(False), torch.no_grad():
        joined = []
        for name in ("weight", "weight_scale_inv"):
            parameters = [getattr(layer, name) for layer in layers]
            whole = torch.cat([one.data.view(torch.uint8) for one in parameters]).view(parameters[0].dtype)
            for one, part in zip(parameters, swiglu.halves_of(whole)):
                one.data = part
            joined.append(whole)
    state.joined, state.addresses = (joined[0], joined[1]), _addresses(layers)
    state.joined_parameters = _parameters(layers)


class FusedExperts(FusedBlock, Experts):
    """Experts of transformers that are called like `Experts`."""

    free = FusedBlock.free | {"fuse_wgrad_accumulation"}

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not self._stoneware.is_proved:  # type: ignore[union-attr]
            y: torch.Tensor = super(Experts, self).forward(hidden_states, top_k_index, top_k_weights)
            return y
        return Experts.forward(self, hidden_states, top_k_index, top_k_weights)


class FusedFloat8Experts(FusedBlock, Float8InferenceExperts):
    """Experts of transformers that are called like `Float8InferenceExperts`."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not self._stoneware.is_proved:  # type: ignore[union-attr]
            raise RuntimeError(
                "attributes of experts with fp8 weights must stay what they were when the model was converted, but one "
                "was set since; undo the conversion, set it, and convert again"
            )
        return Experts.forward(self, hidden_states, top_k_index, top_k_weights)


@dataclass(kw_only=True)
class OwnerState(State):
    """The handovers of the norms that a module has."""

    handovers: list[Handover] = field(default_factory=list)


class HandoverOwner(FusedBlock):
    """A module whose calls are those in which its norms hand over their results."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        state: OwnerState = self._stoneware  # type: ignore[assignment]
        for handover in state.handovers:
            handover.open()
        try:
            return super().forward(*args, **kwargs)
        finally:
            for handover in state.handovers:
                handover.close()
