"""Changes the linear layers, experts, norms and feed-forwards of a model into Stoneware's, in place, and back."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from stoneware.errors import quoted
from stoneware.nn import agreement, data_flow, proofs, published, trained_node, trained_siblings
from stoneware.nn.arguments import BITS_16, FLOATS, autocast_dtype, has_hooks, is_distributed
from stoneware.nn.changes import (
    Change,
    FrozenExperts,
    FrozenLinear,
    FusedFeedForward,
    FusedNorm,
    FusedTwoLayers,
    JoinedSiblings,
    LoadedLinear,
    LoadedWeight,
    NormHandover,
    NormOwner,
    TrainedExperts,
    TrainedFeedForward,
    TrainedLinear,
)
from stoneware.nn.checkpoints import Saving
from stoneware.nn.conversion import Conversion
from stoneware.nn.experts import WEIGHTS, Experts
from stoneware.nn.fused_blocks import FusedBlock
from stoneware.nn.inference import Float8InferenceLinear, dequantize, frozen_parameter
from stoneware.nn.linear import Linear
from stoneware.nn.published_changes import PublishedExperts, PublishedLinear, as_plain_layers
from stoneware.nn.recipes import BF16, RECIPES, ROWWISE, UNIT, why_not
from stoneware.nn.swiglu import ONE_CALL
from stoneware.specs.problem import check_bool, check_choice

Filter = Callable[[str, torch.nn.Module], bool]

_LOG = logging.getLogger("stoneware.nn")

HEADS = frozenset({"lm_head", "output", "embed_out", "score", "classifier", "router", "gate"})
"""Last names of layers that stay in 16 bits unless a filter selects them. Small differences between the logits
of a language model or a router matter."""

_FILTERED = "the filter refuses it"

_TRAINABLE = "; its weight requires a gradient, so each call quantizes it (frozen=True quantizes it once)"


def convert(
    model: torch.nn.Module,
    recipe: str = "rowwise",
    filter: Filter | None = None,
    *,
    frozen: bool | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> Conversion:
    """Makes a model's torch.nn.Linear layers compute with Stoneware's matmuls, in place.

    A module keeps its identity, hooks, buffers, attributes and names in the state_dict; only its class changes. Layers
    that train become `Float8Linear`, or `Linear` for recipe "bf16". They keep their Parameter objects, so an existing
    optimizer still works. Frozen layers become `Float8InferenceLinear`.

    The fp8 layers of checkpoints that transformers, compressed-tensors or torchao loaded also become
    `Float8InferenceLinear`, with the weights and the scales of the checkpoint, whatever the recipe. So do the fp8
    experts of transformers, which become grouped matmuls. Power-of-two scales of MXFP8 are folded into the weights, to
    blocks of 128x128; a layer stays if that would change a row or a column by more than 1.6 % of its norm.

    Blocks change only if their code proves that the replacement computes the same (`stoneware.nn.proofs`): experts of
    transformers (`Experts`, or `Float8InferenceExperts` if they are frozen and rowwise), norms (one kernel, and one in
    backward), and feed-forwards (in a frozen model one native call). All other blocks stay, with a reason.

    A linear layer stays if it is a subclass of torch.nn.Linear, has hooks, shares its weight with another module, has
    a size that the recipe refuses, or has a weight that other code reads and that would become fp8. Without a filter,
    heads and routers (HEADS) stay too.

    Either all changes are made, or an exception leaves the model unchanged. Until the end the old weights are kept, in
    the memory of the host if the device is full.

    Args:
      model: the model to change.
      recipe: "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp" or "blockwise".
      filter: (name, layer or experts) -> whether to change it; None takes all but heads and routers.
      frozen: whether weights are replaced by fp8 copies; None: those that require no gradient, if the model is in
        eval mode.
      fuse_wgrad_accumulation: see `Linear`; set on the layers that train.

    Returns:
      The changes, and the reasons why other modules stayed; `undo()` takes them back.

    Raises:
      TypeError: `model` is not a module, or an option is of another type.
      ValueError: an unknown recipe.
      torch.OutOfMemoryError: the device and the host have too little memory.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model={quoted(model)} must be a torch.nn.Module, not {type(model).__name__}; load it with from_pretrained"
        )
    check_choice("recipe", recipe, (BF16, *RECIPES))
    if filter is not None and not callable(filter):
        raise TypeError(
            f"filter={quoted(filter)} must be a function of a name and a layer, not {type(filter).__name__}; pass for "
            'example lambda name, layer: "lm_head" not in name'
        )
    if frozen is not None:
        check_bool("frozen", frozen)
    check_bool("fuse_wgrad_accumulation", fuse_wgrad_accumulation)
    return _convert(_Converter(model, recipe, filter, frozen=frozen, fuse_wgrad_accumulation=fuse_wgrad_accumulation))


def loadable(model: torch.nn.Module, recipe: str, filter: Filter | None = None) -> dict[str, torch.nn.Linear]:
    """The layers of a model without weights that `convert(..., frozen=True)` would change into Float8InferenceLinear.

    Args:
      model: with parameters on the device "meta".
      recipe, filter: like for `convert`.

    Returns:
      Name of a layer -> the layer.
    """
    converter = _Converter(model, recipe, filter, frozen=True)
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    return {
        name: layer
        for name, layer in layers.items()
        if converter.why_kept(name, layer, None, is_frozen=True, is_loaded=True) is None
    }


def convert_loaded(
    model: torch.nn.Module, recipe: str, filter: Filter | None, weights: Mapping[torch.nn.Linear, LoadedWeight]
) -> Conversion:
    """`convert(..., frozen=True)` of a model for whose weights of `loadable` the 16-bit values were never kept.

    Args:
      model, recipe, filter: like for `loadable`.
      weights: layer -> its quantized weight; the weight of the layer itself is on the device "meta", in 16 or 32 bits.
    """
    return _convert(_Converter(model, recipe, filter, frozen=True, weights=weights))


def _convert(converter: _Converter) -> Conversion:
    changes = converter.decide()
    _apply(changes)
    conversion = converter.conversion
    conversion._changes = changes
    num_trainable = sum(label.endswith(_TRAINABLE) for label in conversion.swapped.values())
    if num_trainable:
        _LOG.warning(
            "%d layers of a model in eval mode have weights that require gradients, and quantize them at each call; "
            "pass frozen=True to quantize them once, or frozen=False if the model will train",
            num_trainable,
        )
    return conversion


def _apply(changes: list[Change]) -> None:
    """Makes all changes, or none."""
    to_revert: list[Change] = []
    try:
        for change in changes:
            to_revert.append(change)
            try:
                change.apply()
            except torch.OutOfMemoryError:
                change.revert()
                if not sum(earlier.spill() for earlier in to_revert):
                    raise
                change.apply()
    except BaseException:
        for change in reversed(to_revert):
            change.revert()
        raise
    for change in changes:
        change.settle()


_ATTRIBUTES = frozenset({"recipe", "compute_dtype", "handover", "fuse_wgrad_accumulation", "siblings"})
"""Attributes of converted layers."""


class _Converter:
    """Decides on all changes before the first is made."""

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: str,
        filter: Filter | None,
        *,
        frozen: bool | None,
        fuse_wgrad_accumulation: bool = False,
        weights: Mapping[torch.nn.Linear, LoadedWeight] | None = None,
    ) -> None:
        self.model, self.recipe, self.filter, self.frozen = model, recipe, filter, frozen
        self.weights = weights or {}
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.is_inference = not model.training if frozen is None else frozen
        self.owners = _owners(model)
        self.is_quantized = self.is_inference and recipe != BF16
        self.readers = data_flow.foreign(model) if self.is_quantized else {}
        self.conversion = Conversion(model=model)
        self.changes: dict[int, Change] = {}
        """id of a module -> its change."""
        self.proofs = proofs.Proofs()

    def decide(self) -> list[Change]:
        modules = [*self.model.named_modules()]
        for name, module in modules:
            if isinstance(module, torch.nn.Linear):
                self.decide_linear(name, module)
            elif _has_experts(module):
                self.decide_experts(name, module)
        with as_plain_layers(self.changes.values()):
            for name, module in modules:
                self.decide_block(name, module)
        for name, module in modules:
            self.decide_siblings(name, module)
        changes = [*self.changes.values()]
        handovers = [handover for name, module in modules for handover in self.handovers(name, module)]
        owners = {
            id(handover.owner): NormOwner(handover.name.rpartition(".")[0], handover.owner) for handover in handovers
        }
        changes += [*owners.values(), *handovers]
        if any(isinstance(change, (FrozenLinear, FrozenExperts, PublishedExperts)) for change in changes):
            changes.append(Saving(self.model))
        return changes

    def is_frozen(self, weights: Sequence[torch.Tensor]) -> bool:
        return self.is_inference and (self.frozen is True or not any(weight.requires_grad for weight in weights))

    def decide_linear(self, name: str, layer: torch.nn.Linear) -> None:
        loaded = self.weights.get(layer)
        if loaded is not None:
            self.changes[id(layer)] = LoadedLinear(name, layer, self.recipe, loaded)
            self.conversion.swapped[name] = self.changes[id(layer)].label
            return
        is_frozen = self.is_quantized and self.is_frozen([layer.weight])
        weight = published.find(layer) if self.is_quantized else None
        reason = self.why_kept(name, layer, weight, is_frozen=is_frozen)
        if reason is not None:
            self.conversion.kept[name] = reason
            return
        change: Change
        if isinstance(weight, published.PublishedWeight):
            change = PublishedLinear(name, layer, weight)
        elif is_frozen:
            change = FrozenLinear(name, layer, self.recipe)
        else:
            note = _TRAINABLE if self.is_inference and self.recipe != BF16 else ""
            change = TrainedLinear(
                name, layer, self.recipe, fuse_wgrad_accumulation=self.fuse_wgrad_accumulation, note=note
            )
        self.conversion.swapped[name] = change.label
        self.changes[id(layer)] = change

    def why_kept(
        self,
        name: str,
        layer: torch.nn.Linear,
        fp8: published.PublishedWeight | str | None,
        *,
        is_frozen: bool,
        is_loaded: bool = False,
    ) -> str | None:
        weight = layer.weight
        if name and isinstance(self.model.get_submodule(name.rpartition(".")[0]), torch.nn.TransformerEncoderLayer):
            return "torch.nn.TransformerEncoderLayer reads the weights of its layers itself"
        if isinstance(layer, (Linear, Float8InferenceLinear)):
            return f"it is a sw.nn.{type(layer).__name__} already; undo() the conversion that made it first"
        if type(layer) is not torch.nn.Linear and fp8 is None:
            return f"it is a {type(layer).__name__}, which may do more than torch.nn.Linear"
        clashes = sorted(_ATTRIBUTES & vars(layer).keys())
        if clashes:
            return f"it has an attribute {clashes[0]}, which converted layers use"
        if has_hooks(layer, is_forward_known=isinstance(fp8, published.PublishedWeight) and fp8.has_forward):
            return "it has hooks or a forward of its own, like those of tensor parallel plans; convert the model first"
        if self.filter is None and name.rpartition(".")[2] in HEADS:
            return "heads and routers stay in 16 bits; pass a filter to swap them"
        if self.filter is not None and not self.filter(name, layer):
            return _FILTERED
        others = [owner for owner, module in self.owners.get(_memory(weight), ()) if module is not layer]
        if others:
            return f"its weight is shared with {others[0]}"
        if fp8 is not None:
            return fp8 if isinstance(fp8, str) else None
        if type(weight.data) is not torch.Tensor and (is_frozen or not is_distributed(weight)):
            return f"its weight is a {type(weight.data).__name__}, not a plain tensor; convert the model first"
        if is_frozen:
            if weight.is_meta != is_loaded or weight.dtype not in FLOATS:
                return (
                    f"its weight is {weight.dtype} on {weight.device}, and only 16 or 32 bits in memory are quantized"
                )
            if id(layer) in self.readers:
                return f"{self.readers[id(layer)]} reads its weight and expects 16 bits"
        elif weight.dtype not in FLOATS:
            return f"its weight is {weight.dtype}, and a matmul takes 16 or 32 bits"
        elif self.recipe == BF16 and weight.dtype not in BITS_16 and autocast_dtype(weight) is None:
            return (
                f"its weight is {weight.dtype}, and recipe 'bf16' takes 16 bits; cast the model, or convert it under "
                "the torch.autocast that it runs under"
            )
        return why_not(self.recipe, layer.in_features, layer.out_features)

    def decide_experts(self, name: str, module: Any) -> None:
        weights = [getattr(module, weight) for weight in WEIGHTS]
        is_frozen = self.is_frozen(weights) and self.recipe == ROWWISE
        if isinstance(module, (FusedBlock, Experts)) and not (is_frozen and type(module) is Experts):
            return
        scales = published.find_experts(module) if self.is_quantized and published.is_experts(module) else None
        reason = self.why_experts_kept(name, module, weights, scales)
        if reason is not None:
            self.conversion.kept[name] = reason
            return
        change: Change
        if isinstance(scales, published.ExpertsScales):
            change = PublishedExperts(name, module, scales)
        elif is_frozen:
            change = FrozenExperts(name, module)
        else:
            change = TrainedExperts(name, module, fuse_wgrad_accumulation=self.fuse_wgrad_accumulation)
        self.conversion.blocks[name] = change.label
        self.changes[id(module)] = change

    def why_experts_kept(
        self,
        name: str,
        module: torch.nn.Module,
        weights: list[torch.nn.Parameter],
        fp8: published.ExpertsScales | str | None,
    ) -> str | None:
        if self.filter is not None and not self.filter(name, module):
            return _FILTERED
        if fp8 is not None:
            if any(owner is not module for weight in weights for _, owner in self.owners.get(_memory(weight), ())):
                return "its weights are shared"
            if has_hooks(module) or "forward" in vars(module):
                return "it has hooks or a forward of its own"
            return fp8 if isinstance(fp8, str) else None
        if len([*module.parameters()]) != len(WEIGHTS):
            return "sw.nn.Experts has no biases and no other parameters"
        for weight in weights:
            if any(owner is not module for _, owner in self.owners.get(_memory(weight), ())):
                return "its weights are shared"
            if weight.dtype != torch.bfloat16 or weight.is_meta or type(weight.data) is not torch.Tensor:
                return f"its weights are {weight.dtype} on {weight.device}, and sw.nn.Experts takes bfloat16 in memory"
        (num_experts, rows, hidden_size), down = weights[0].shape, weights[1].shape
        if (num_experts, hidden_size, rows) != (*down[:2], 2 * down[2]) or hidden_size % UNIT or down[2] % UNIT:
            return f"its sizes {[*weights[0].shape]} and {[*down]} are not those of sw.nn.Experts, multiples of {UNIT}"
        if type(module) is Experts:
            return "it has hooks or a forward of its own" if has_hooks(module) else None
        try:
            self.proofs.of(proofs.experts, module)
        except proofs.NoProof as error:
            return f"nothing proves that it computes what sw.nn.Experts does: {error}"
        return None

    def decide_block(self, name: str, module: torch.nn.Module) -> None:
        """A norm, or a feed-forward whose layers are frozen or train, all with one recipe."""
        if isinstance(module, FusedBlock) or hasattr(module, "_stoneware"):
            return
        parameters = [parameter for parameter, _ in module.named_parameters()]
        layers = [child for child in module.children() if isinstance(child, torch.nn.Linear)]
        try:
            if type(module).__name__.endswith("RMSNorm") and "weight" in parameters and not layers:
                self.changes[id(module)] = FusedNorm(name, module, *agreement.rms_norm(self.proofs, module))
                self.conversion.blocks[name] = "RMSNorm"
            elif len(layers) == 2 and self.decide_two_layers(name, module, layers):
                return
            elif len(layers) in (2, 3) and (change := self.feed_forward(layers)) is not None:
                parts = self.proofs.of(proofs.swiglu, module)
                with self.dequantized(layers):
                    agreement.check_swiglu(self.proofs, module, parts)
                self.changes[id(module)] = change(name, module, parts)
                self.conversion.blocks[name] = "SwiGLU"
        except proofs.NoProof as error:
            is_norm = type(module).__name__.endswith("RMSNorm")
            if is_norm or {*module._modules} >= {"gate_proj", "up_proj", "down_proj"}:
                self.conversion.kept_blocks[name] = str(error)

    def decide_two_layers(self, name: str, module: torch.nn.Module, layers: list[torch.nn.Linear]) -> bool:
        """Whether a module is a feed-forward of two layers for inference, which then changes."""
        own = {id(parameter) for layer in layers for parameter in layer.parameters()}
        recipe = self.inference_recipe(layers)
        if recipe is None or any(id(parameter) not in own for parameter in module.parameters()):
            return False
        try:
            parts = self.proofs.of(proofs.mlp, module)
            with self.dequantized(layers):
                agreement.check_mlp(self.proofs, module, parts)
        except proofs.NoProof:
            return False  # it may be another feed-forward
        self.changes[id(module)] = FusedTwoLayers(name, module, parts, recipe)
        self.conversion.blocks[name] = "MLP"
        return True

    def inference_recipe(self, layers: list[torch.nn.Linear]) -> str | None:
        """The recipe of layers that run without gradients; None if they have several, or train."""
        changes = [self.changes.get(id(layer)) for layer in layers]
        if self.is_inference and self.recipe == BF16 and all(type(change) is TrainedLinear for change in changes):
            return None if self.fuse_wgrad_accumulation else BF16
        recipes = {change.recipe if isinstance(change, FrozenLinear) else None for change in changes}
        return recipes.pop() if len(recipes) == 1 else None

    @contextlib.contextmanager
    def dequantized(self, layers: list[torch.nn.Linear]) -> Iterator[None]:
        """Gives layers whose weights are in fp8 already weights in 16 or 32 bits meanwhile."""
        before = {}
        try:
            for layer in layers:
                change = self.changes.get(id(layer))
                if isinstance(change, PublishedLinear):
                    try:
                        values = change.published.dequantized()
                    except torch.OutOfMemoryError as error:
                        raise proofs.NoProof("its weights in 16 bits do not fit into the memory") from error
                elif layer in self.weights:
                    values = dequantize(*self.weights[layer], layer.weight.dtype)
                else:
                    continue
                before[layer], layer.weight = layer.weight, frozen_parameter(values)
            yield
        finally:
            for layer, weight in before.items():
                layer.weight = weight

    def decide_siblings(self, name: str, module: torch.nn.Module) -> None:
        """A module of which several layers read the same argument, and train with the recipe of `trained_node`."""
        if self.recipe != trained_node.RECIPE or self.fuse_wgrad_accumulation:
            return
        trained = {*filter(self.is_trained, module.children())}
        if len(trained) < 2:
            return
        if id(module) in self.changes or isinstance(module, FusedBlock) or hasattr(module, "_stoneware"):
            return
        layers = data_flow.siblings(module, trained.__contains__)
        if layers is not None and len(layers) <= trained_siblings.MOST:
            change = JoinedSiblings(name, module, [child for child in module._modules if child in layers])
            self.changes[id(module)] = change
            self.conversion.blocks[name] = change.label

    def feed_forward(self, layers: list[torch.nn.Linear]) -> Callable[..., Change] | None:
        """The change of a feed-forward of these layers, if one call can run them."""
        changes = [self.changes.get(id(layer)) for layer in layers]
        recipe = self.inference_recipe(layers)
        if recipe in ONE_CALL and all(isinstance(change, FrozenLinear) and change.may_be_joined for change in changes):
            return functools.partial(FusedFeedForward, recipe=recipe)
        if not self.fuse_wgrad_accumulation and all(self.is_trained(layer) for layer in layers):
            return functools.partial(TrainedFeedForward, recipe=self.recipe)
        return None

    def is_trained(self, layer: torch.nn.Module) -> bool:
        return isinstance(self.changes.get(id(layer)), TrainedLinear)

    def handovers(self, name: str, norm: torch.nn.Module) -> Iterator[NormHandover]:
        """The change of a norm whose result only rowwise layers read."""
        if not name or not isinstance(self.changes.get(id(norm)), FusedNorm) or has_hooks(norm):
            return
        parent, _, last = name.rpartition(".")
        owner = self.model.get_submodule(parent)
        if id(owner) in self.changes or hasattr(owner, "_stoneware"):
            return

        def is_reader(module: torch.nn.Module) -> bool:
            change = self.changes.get(id(module))
            is_block = isinstance(change, (FusedFeedForward, FusedTwoLayers)) and change.recipe == ROWWISE
            is_layer = isinstance(change, FrozenLinear) and change.recipe == ROWWISE
            return (is_block or is_layer) and not has_hooks(module)

        reader = data_flow.reader(owner, last, is_reader)
        if reader is not None:
            yield NormHandover(name, norm, owner, reader.name, reader.layers)


def _has_experts(module: torch.nn.Module) -> bool:
    """Whether it holds the weights of many experts, under the names of transformers."""
    weights = [getattr(module, name, None) for name in WEIGHTS]
    return all(
        isinstance(weight, torch.nn.Parameter) and not is_lazy(weight) and weight.ndim == 3 for weight in weights
    )


def _owners(model: torch.nn.Module) -> dict[Any, list[tuple[str, torch.nn.Module]]]:
    """The modules that have a parameter or a buffer in each memory."""
    owners: dict[Any, list[tuple[str, torch.nn.Module]]] = {}
    for name, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in tensors:
            owners.setdefault(_memory(tensor), []).append((name, module))
    return owners


def _memory(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that share memory."""
    is_plain = not is_lazy(tensor) and tensor.layout == torch.strided and type(tensor.data) is torch.Tensor
    if not is_plain or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.untyped_storage().data_ptr()
