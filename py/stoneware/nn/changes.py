"""The changes that `convert` makes to a model, in place, and how each is taken back.

`published_changes.py` has those of fp8 layers that other libraries loaded. `apply` makes a change. The old weights
are saved until all changes are made, so that `revert` can restore a module. Later, `undo` starts from the current
weights, and dequantizes the frozen ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch

from stoneware.nn import fused_blocks, fused_mlp, trained_blocks
from stoneware.nn.experts import WEIGHTS, Experts, Float8InferenceExperts
from stoneware.nn.handover import Route
from stoneware.nn.inference import Float8InferenceLinear, frozen_parameter
from stoneware.nn.linear import Float8Linear, Linear
from stoneware.nn.proofs import MLPParts, SwiGLUParts
from stoneware.nn.recipes import BF16
from stoneware.nn.trained_siblings import Siblings

HOST = "cpu"
"""The type of the device that gets the saved weights if their own device is full."""


class LoadedWeight(NamedTuple):
    """A weight that was quantized while it was loaded, like `Float8InferenceLinear.quantized` returns it."""

    values: torch.Tensor
    scale: torch.Tensor


class Change:
    """A change of one module.

    Attributes:
      name, module: the module and its name.
      label: its new class and recipe, for the report.
      result: its class after `apply`.
    """

    def __init__(self, name: str, module: Any, label: str) -> None:
        self.name, self.module, self.label = name, module, label
        self.result: type | None = None

    def apply(self) -> None:
        self.change()
        self.result = type(self.module)

    def change(self) -> None:
        raise NotImplementedError

    def revert(self) -> None:
        """Restores the module, also after an `apply` that failed."""
        raise NotImplementedError

    def undo(self) -> None:
        """Makes the module of its old class again, with the values that it has now."""
        self.revert()

    def has_form(self) -> bool:
        """Whether the old class has a form for the values that the module has now; otherwise `undo` is not called."""
        return True

    def spill(self) -> bool:
        """Moves what is saved for `revert` to the memory of the host; returns whether there was anything."""
        return False

    def settle(self) -> None:
        """Drops what is saved for `revert`."""


class TrainedLinear(Change):
    """torch.nn.Linear -> Linear or Float8Linear, with the same parameters."""

    def __init__(
        self, name: str, layer: torch.nn.Linear, recipe: str, *, fuse_wgrad_accumulation: bool, note: str = ""
    ) -> None:
        self.kind = Linear if recipe == BF16 else Float8Linear
        super().__init__(name, layer, self.kind.__name__ + ("" if recipe == BF16 else f", {recipe}") + note)
        self.attributes = {"recipe": recipe, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}

    def change(self) -> None:
        for name, value in self.attributes.items():
            setattr(self.module, name, value)
        become(self.module, self.kind)

    def revert(self) -> None:
        become(self.module, torch.nn.Linear)
        forget(self.module, self.attributes)


class FrozenWeights(Change):
    """A module whose weights become fp8. The old parameters are saved as long as the conversion can fail."""

    def __init__(self, name: str, module: Any, label: str) -> None:
        super().__init__(name, module, label)
        self.saved: list[_SavedParameter] = []

    def save(self, module: torch.nn.Module, name: str) -> None:
        """Saves a parameter that `change` is about to replace."""
        self.saved.append(_SavedParameter(module, name))

    def thaw(self) -> None:
        """Makes the module of its old class again, without the scales of its weights."""
        raise NotImplementedError

    def revert(self) -> None:
        self.thaw()
        for parameter in self.saved:
            setattr(parameter.module, parameter.name, parameter.restore())
        self.settle()

    def spill(self) -> bool:
        return bool(sum(parameter.spill() for parameter in self.saved))

    def settle(self) -> None:
        self.saved = []


class FrozenLinear(FrozenWeights):
    """torch.nn.Linear -> Float8InferenceLinear.

    Attributes:
      may_be_joined: whether a copy of the weight, joined with others, is the only one.
    """

    may_be_joined = True

    def __init__(self, name: str, layer: torch.nn.Linear, recipe: str) -> None:
        super().__init__(name, layer, f"{Float8InferenceLinear.__name__}, {recipe}")
        self.recipe, self.requires_grad = recipe, layer.weight.requires_grad

    def change(self) -> None:
        layer = self.module
        values, scale = Float8InferenceLinear.quantized(layer.weight.detach(), self.recipe)
        self.save(layer, "weight")
        layer.recipe, layer.compute_dtype = self.recipe, layer.weight.dtype
        layer.weight, layer.weight_scale_inv = frozen_parameter(values), frozen_parameter(scale)
        become(layer, Float8InferenceLinear)

    def undo(self) -> None:
        weight = self.module.dequantized()
        self.thaw()
        self.module.weight = torch.nn.Parameter(weight, self.requires_grad)

    def thaw(self) -> None:
        become(self.module, torch.nn.Linear)
        self.module._parameters.pop("weight_scale_inv", None)
        forget(self.module, ("recipe", "compute_dtype", "handover"))


class LoadedLinear(FrozenLinear):
    """torch.nn.Linear whose weight was quantized while it was loaded -> Float8InferenceLinear."""

    def __init__(self, name: str, layer: torch.nn.Linear, recipe: str, weight: LoadedWeight) -> None:
        super().__init__(name, layer, recipe)
        self.loaded = weight

    def change(self) -> None:
        layer = self.module
        layer.recipe, layer.compute_dtype = self.recipe, layer.weight.dtype
        layer.weight, layer.weight_scale_inv = frozen_parameter(self.loaded.values), frozen_parameter(self.loaded.scale)
        become(layer, Float8InferenceLinear)

    def revert(self) -> None:
        if isinstance(self.module, Float8InferenceLinear):
            self.undo()


class TrainedExperts(Change):
    """A module with the parameters of `Experts` -> one that calls like `Experts`."""

    def __init__(self, name: str, module: torch.nn.Module, *, fuse_wgrad_accumulation: bool) -> None:
        super().__init__(name, module, Experts.__name__)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation

    def change(self) -> None:
        if not isinstance(self.module, Experts):
            fused_blocks.fuse(self.module, fused_blocks.FusedExperts, fused_blocks.State())
        self.module.fuse_wgrad_accumulation = self.fuse_wgrad_accumulation

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)
        forget(self.module, ("fuse_wgrad_accumulation",))


class FrozenExperts(FrozenWeights):
    """A module with the parameters of `Experts` -> one that calls like `Float8InferenceExperts`."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module, Float8InferenceExperts.__name__)
        self.requires_grad = {weight: getattr(module, weight).requires_grad for weight in WEIGHTS}
        self.is_own = type(module) is Experts

    def change(self) -> None:
        for name in WEIGHTS:
            values, scale = Float8InferenceExperts.quantized(getattr(self.module, name).detach())
            self.save(self.module, name)
            setattr(self.module, name, frozen_parameter(values))
            self.module.register_buffer(f"{name}_scale", scale)
        if self.is_own:
            become(self.module, Float8InferenceExperts)
        else:
            fused_blocks.fuse(self.module, fused_blocks.FusedFloat8Experts, fused_blocks.State())

    def undo(self) -> None:
        weights = {name: self.module.dequantized(name) for name in WEIGHTS}
        self.thaw()
        for name, weight in weights.items():
            setattr(self.module, name, torch.nn.Parameter(weight, self.requires_grad[name]))

    def thaw(self) -> None:
        fused_blocks.unfuse(self.module)
        if self.is_own:
            become(self.module, Experts)
        for name in WEIGHTS:
            self.module._buffers.pop(f"{name}_scale", None)


class FusedNorm(Change):
    """A norm that was proved to be RMSNorm -> one kernel."""

    def __init__(self, name: str, norm: torch.nn.Module, eps: float, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__(name, norm, "RMSNorm")
        self.eps, self.dtypes = eps, dtypes

    def change(self) -> None:
        state = fused_blocks.NormState(eps=self.eps, dtypes=self.dtypes)
        fused_blocks.fuse(self.module, fused_blocks.FusedRMSNorm, state)

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)


class FusedFeedForward(Change):
    """A feed-forward that was proved to be SwiGLU -> one native call; after its layers became fp8."""

    def __init__(self, name: str, block: torch.nn.Module, parts: SwiGLUParts, recipe: str) -> None:
        super().__init__(name, block, "SwiGLU")
        self.parts, self.recipe = parts, recipe
        self.hook: Any = None

    def change(self) -> None:
        modules = [*self.module._modules.values()]
        state = fused_blocks.SwiGLUState(parts=self.parts, recipe=self.recipe, modules=modules)
        fused_blocks.fuse(self.module, fused_blocks.FusedSwiGLU, state)
        self.hook = self.module.register_load_state_dict_post_hook(_join_again)
        fused_blocks.join(self.module)

    def revert(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        fused_blocks.unfuse(self.module)


class FusedTwoLayers(Change):
    """A feed-forward that was proved to be down(activation(up(x))) -> one native call without gradients; after its
    layers became those of the recipe."""

    def __init__(self, name: str, block: torch.nn.Module, parts: MLPParts, recipe: str) -> None:
        super().__init__(name, block, "MLP")
        self.parts, self.recipe = parts, recipe

    def change(self) -> None:
        modules = fused_mlp.submodules(self.module)
        state = fused_mlp.MLPState(parts=self.parts, recipe=self.recipe, modules=modules)
        fused_blocks.fuse(self.module, fused_mlp.FusedMLP, state)

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)


class TrainedFeedForward(Change):
    """A feed-forward that was proved to be SwiGLU -> one call; after its layers became those of one recipe."""

    def __init__(self, name: str, block: torch.nn.Module, parts: SwiGLUParts, recipe: str) -> None:
        super().__init__(name, block, "SwiGLU")
        self.parts, self.recipe = parts, recipe

    def change(self) -> None:
        modules = [*self.module._modules.values()]
        state = trained_blocks.TrainedSwiGLUState(parts=self.parts, modules=modules, recipe=self.recipe)
        fused_blocks.fuse(self.module, trained_blocks.TrainedSwiGLU, state)

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)


def _join_again(block: torch.nn.Module, incompatible_keys: object) -> None:
    if isinstance(block, fused_blocks.FusedSwiGLU):
        fused_blocks.join(block)


class JoinedSiblings(Change):
    """A module of which several layers read the same argument -> one that computes them together when it trains."""

    def __init__(self, name: str, owner: torch.nn.Module, layers: Sequence[str]) -> None:
        super().__init__(name, owner, " + ".join(layers))
        self.layers = layers

    def change(self) -> None:
        siblings = Siblings(self.module, self.layers)
        fused_blocks.fuse(self.module, trained_blocks.SiblingsOwner, trained_blocks.SiblingsState(siblings=siblings))
        for layer in self.layers:
            self.module.get_submodule(layer).siblings = siblings

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)
        for layer in self.layers:
            if (module := self.module._modules.get(layer)) is not None:
                forget(module, ("siblings",))


class NormOwner(Change):
    """A module whose norms hand over their results -> one that starts and ends the handovers of a call."""

    def __init__(self, name: str, owner: torch.nn.Module) -> None:
        super().__init__(name, owner, "")

    def change(self) -> None:
        fused_blocks.fuse(self.module, fused_blocks.HandoverOwner, fused_blocks.OwnerState())

    def revert(self) -> None:
        fused_blocks.unfuse(self.module)


class NormHandover(Change):
    """A fused norm hands its result in fp8 to the only layers that read it; after `NormOwner`."""

    def __init__(self, name: str, norm: torch.nn.Module, owner: Any, reader: str, layers: tuple[str, ...]) -> None:
        super().__init__(name, norm, "")
        self.owner, self.reader, self.layers = owner, reader, layers

    def change(self) -> None:
        norm_name = self.name.rpartition(".")[2]
        module = self.owner._modules[self.reader]
        state, handover = self.module._stoneware, self.owner._stoneware.norm_handover
        places = [(self.owner, norm_name), (self.owner, self.reader), *((module, layer) for layer in self.layers)]
        state.handover, state.route = handover, Route(self.owner, places)
        for reader in self._readers():
            if isinstance(reader, Float8InferenceLinear):
                reader.handover = handover
            else:
                reader._stoneware.handover = handover

    def revert(self) -> None:
        for reader in self._readers():
            if (state := vars(reader).get("_stoneware")) is not None:
                state.handover = None
            forget(reader, ("handover",))
        if (state := vars(self.module).get("_stoneware")) is not None:
            state.handover = state.route = None

    def _readers(self) -> list[Any]:
        module = self.owner._modules.get(self.reader)
        readers = [module._modules.get(layer) for layer in self.layers] if self.layers and module else [module]
        return [reader for reader in readers if reader is not None]


class _SavedParameter:
    """A parameter, or its copy in the memory of the host."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.parameter: torch.nn.Parameter | None = getattr(module, name)
        self.reference = weakref.ref(self.parameter)
        self.on_host: torch.Tensor | None = None

    def spill(self) -> bool:
        """Whether this leaves the device to others: a parameter that somebody else holds stays there."""
        parameter = self.parameter
        if parameter is None or parameter.device.type == HOST:
            return False
        self.device, self.requires_grad, self.attributes = parameter.device, parameter.requires_grad, vars(parameter)
        self.on_host, self.parameter = parameter.detach().cpu(), None
        return True

    def restore(self) -> torch.nn.Parameter:
        parameter = self.parameter if self.parameter is not None else self.reference()
        if parameter is None:
            assert self.on_host is not None  # it was spilled
            parameter = torch.nn.Parameter(self.on_host.to(self.device), self.requires_grad)
            vars(parameter).update(self.attributes)
        return parameter


def become(module: Any, kind: type) -> None:
    """Changes the class of a module, also for a hook of accelerate, which keeps the old forward."""
    module.__class__ = kind
    if "_hf_hook" in vars(module) and "_old_forward" in vars(module):
        vars(module)["_old_forward"] = MethodType(kind.forward, module)  # type: ignore[attr-defined]


def forget(module: torch.nn.Module, names: Any) -> None:
    for name in names:
        vars(module).pop(name, None)
