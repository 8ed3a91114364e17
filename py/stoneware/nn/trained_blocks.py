"""Blocks of other people's models that train as one node of autograd; see `fused_blocks` for what fusing means."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stoneware.nn import conditions, trained_swiglu
from stoneware.nn.fused_blocks import FusedBlock, State
from stoneware.nn.linear import Linear
from stoneware.nn.proofs import SwiGLUParts
from stoneware.nn.trained_siblings import Siblings


@dataclass(kw_only=True)
class TrainedSwiGLUState(State):
    """The proof of a `TrainedSwiGLU`.

    Attributes:
      parts: which submodules are its layers.
      modules: all submodules at the time of the proof.
      recipe: of the layers.
      parameters: of each layer, for gate, up (None if it is part of gate) and down.
    """

    parts: SwiGLUParts
    modules: list[torch.nn.Module | None]
    recipe: str
    parameters: tuple[dict[str, Any] | None, ...] = ()

    @functools.cached_property
    def holds(self) -> Callable[[], bool]:
        """holds() returns whether the block and its layers are unchanged since the proof, and have no hooks."""
        own = self.block._modules
        if [*own.values()] != self.modules:
            return lambda: False
        gate, *up = (own[name] for name in self.parts.gate_up)
        layers = [gate, *up, own[self.parts.down]]
        if not all(isinstance(layer, Linear) for layer in layers):
            return lambda: False
        self.parameters = gate._parameters, up[0]._parameters if up else None, layers[-1]._parameters
        others = [module for module in self.modules if module is not None and module not in layers]
        conditions_of_layers = conditions.of_layers(layers, others)
        conditions_of_layers["items"] += [(layer._parameters, "bias", None) for layer in layers]
        return self.check(submodules=[(self.block, *item) for item in own.items()], **conditions_of_layers)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parameters": ()}


class TrainedSwiGLU(FusedBlock):
    """down(silu(gate(x)) * up(x)) over layers that train with one recipe; see `trained_swiglu`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: TrainedSwiGLUState = self._stoneware  # type: ignore[assignment]
        if (
            kwargs
            or len(args) != 1
            or torch.compiler.is_compiling()
            or state.block is not self
            or not state.holds()
            or not isinstance(args[0], torch.Tensor)
        ):
            return super().forward(*args, **kwargs)
        gate, up, down = (None if parameters is None else parameters.get("weight") for parameters in state.parameters)
        if gate is None or down is None or (up is None) != (state.parameters[1] is None):  # parametrized
            return super().forward(*args, **kwargs)
        return trained_swiglu.call(args[0], gate, up, down, None, state.recipe)


@dataclass(kw_only=True)
class SiblingsState(State):
    """The proof that a module calls layers with the same argument.

    Attributes:
      siblings: these layers.
    """

    siblings: Siblings


class SiblingsOwner(FusedBlock):
    """A module whose layers of one argument are computed together during its calls in training."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: SiblingsState = self._stoneware  # type: ignore[assignment]
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or state.siblings.owner is not self
            or not state.holds()
        ):
            return super().forward(*args, **kwargs)
        state.siblings.begin()
        try:
            return super().forward(*args, **kwargs)
        finally:
            state.siblings.end()
