"""Swaps the linear layers and experts of a model for Stoneware's, and back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stoneware.nn import blocks
from stoneware.nn.arguments import FLOATS, has_hooks
from stoneware.nn.experts import WEIGHTS, Experts, Float8InferenceExperts
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.linear import Float8Linear, Linear
from stoneware.nn.recipes import BF16, RECIPES, why_not
from stoneware.nn.rms_norm import RMSNorm
from stoneware.nn.swiglu import HALVES, ONE_CALL, SwiGLU

Filter = Callable[[str, torch.nn.Module], bool]

_LOG = logging.getLogger("stoneware.nn")

HEADS = frozenset({"lm_head", "output", "embed_out", "score", "classifier", "router", "gate"})
"""Last names of layers that stay in 16 bits unless a filter says otherwise: the logits of a language
model and of a router decide by small differences."""


_OF_EXPERTS = Experts.__name__

_FILTERED = "the filter says no"

_OTHER_EXPERTS = (
    "sw.nn.Experts computes down(silu(gate(x)) * up(x)) in bfloat16 alone, of weights in memory whose sizes are "
    "multiples of 16, without biases and hooks"
)


@dataclass(kw_only=True)
class Conversion:
    """What `convert` did.

    Attributes:
      swapped: name of each linear layer that was swapped -> its new class and recipe.
      kept: name of each linear layer, or module of experts, that was not -> why.
      blocks: name of each norm, feed-forward or module of experts that was swapped as a whole -> its new class.
    """

    model: torch.nn.Module
    swapped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    _back: dict[str, tuple[type[torch.nn.Module], Callable[[Any], torch.nn.Module]]] = field(
        default_factory=dict, repr=False
    )
    """Name of each new module, in the order of the swaps -> its class, and what makes of it the one that stood
    there."""

    def undo(self) -> None:
        """Puts a torch.nn.Linear in the place of each layer that was swapped, and each other module back.

        It has the same parameters; a frozen fp8 weight is multiplied out in its old dtype, so that
        its rounding remains. What another module was put in the place of since stays, with a warning.
        """
        left = []
        for name, (kind, back) in reversed(self._back.items()):
            try:
                now = self.model.get_submodule(name)
            except AttributeError:  # it, or what it stood in, is gone
                now = None
            if isinstance(now, kind):
                _put(self.model, name, back(now))
            else:
                left.append(name)
        for known in (self._back, self.blocks, self.swapped):
            known.clear()
        if left:
            _LOG.warning(
                "undo left %s as it is: what convert put there was replaced or removed since; put the old module back "
                "by hand if you need it",
                ", ".join(reversed(left)),
            )

    def __str__(self) -> str:
        num_experts = sum(name.endswith(_OF_EXPERTS) for name in self.blocks.values())
        num_all = len(self.swapped) + len(self.kept) + num_experts
        layers = "linear layers and experts" if num_experts else "linear layers"
        lines = [f"swapped {len(self.swapped) + num_experts} of {num_all} {layers}"]
        for what, names in (("", self.swapped), ("kept ", self.kept), ("whole ", self.blocks)):
            grouped: dict[str, list[str]] = {}
            for name, said in names.items():
                grouped.setdefault(said, []).append(name)
            for said, members in grouped.items():
                shown = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
                lines.append(f"  {what}{shown}: {said}")
        return "\n".join(lines)


def convert(
    model: torch.nn.Module,
    recipe: str = "rowwise",
    filter: Filter | None = None,
    *,
    frozen: bool | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> Conversion:
    """Swaps a model's torch.nn.Linear layers in place.

    Layers that train become `Float8Linear`, or `Linear` for recipe "bf16"; they keep their Parameter
    objects, so that an optimizer made before goes on. Frozen ones become `Float8InferenceLinear`, one
    after another, so that the model's memory only falls. A layer stays as it is if it is a subclass of
    torch.nn.Linear, shares its weight with another module, has a size that the recipe refuses, is read by
    a torch.nn.TransformerEncoderLayer, or is a head or a router (HEADS) and no filter is given.

    Experts of transformers' kind, with `gate_up_proj` and `down_proj` as `Experts` has them, are swapped where
    a call with random numbers shows that they compute the same: for `Float8InferenceExperts` if they are
    frozen and rowwise, else for `Experts`, with their Parameter objects, in 16 bits.

    Around frozen rowwise layers two kinds of blocks are swapped, too, wherever a call with random numbers
    shows that they compute the same: a feed-forward of gate_proj, up_proj and down_proj becomes `SwiGLU`, and
    a norm `RMSNorm`, or torch.nn.RMSNorm where no such layer takes its result.

    Args:
      model: whose submodules are swapped.
      recipe: "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp" or "blockwise".
      filter: (name, layer or experts) -> whether to swap it; None takes all but heads and routers.
      frozen: whether weights become fp8 for good; None: if the model is in eval mode.
      fuse_wgrad_accumulation: of the layers that train.

    Returns:
      What was swapped and what was not, and why; `undo()` takes it back.

    Raises:
      ValueError: an unknown recipe; then nothing was swapped.
    """
    if recipe != BF16 and recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} must be one of {', '.join((BF16, *RECIPES))}; pass one of these")
    frozen = not model.training if frozen is None else frozen
    swaps = _Swaps(model, recipe, filter, frozen=frozen, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
    return swaps.all()


class _Swaps:
    """The arguments of `convert`, and what is done so far."""

    def __init__(
        self, model: torch.nn.Module, recipe: str, filter: Filter | None, *, frozen: bool, fuse_wgrad_accumulation: bool
    ) -> None:
        self.model, self.recipe, self.filter = model, recipe, filter
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.is_quantized = frozen and recipe != BF16
        self.is_one_call = frozen and recipe == ONE_CALL
        self.owners = _owners(model)
        self.done = Conversion(model=model)

    def all(self) -> Conversion:
        if isinstance(self.model, torch.nn.Linear) or blocks.has_experts(self.model):
            self.done.kept[""] = "the model itself has no place to put another in; wrap it in torch.nn.Sequential"
        feed_forwards = self.names_of(blocks.is_swiglu) if self.is_one_call else []
        for name in self.names_of(lambda module: isinstance(module, torch.nn.Linear), remove_duplicate=False):
            self.swap_linear(name, self.model.get_submodule(name))
        for name in self.names_of(blocks.has_experts):
            self.swap_experts(name, self.model.get_submodule(name))
        if self.is_one_call:
            for name in self.names_of(lambda module: not isinstance(module, torch.nn.RMSNorm)):
                self.swap_norm(name, self.model.get_submodule(name))
            for name in feed_forwards:
                if all(f"{name}.{part}" in self.done.swapped for part in (*HALVES, blocks.DOWN)):
                    self.swap_feed_forward(name)
        return self.done

    def names_of(self, is_one: Callable[[torch.nn.Module], bool], *, remove_duplicate: bool = True) -> list[str]:
        """Names, since who holds the modules holds the memory of those that were swapped."""
        found = self.model.named_modules(remove_duplicate=remove_duplicate)
        return [name for name, module in found if name and is_one(module)]

    def put_block(self, name: str, new: torch.nn.Module, was: torch.nn.Module) -> None:
        self.done.blocks[name] = type(new).__name__
        self.done._back[name] = type(new), functools.partial(_give_back, was)
        _put(self.model, name, new.train(was.training))

    def swap_linear(self, name: str, layer: Any) -> None:
        reason = self.why_kept(name, layer)
        if reason is not None:
            self.done.kept[name] = reason
            return
        if self.is_quantized:
            new: Any = Float8InferenceLinear.from_linear(layer, self.recipe)
        else:
            new = _like(Linear if self.recipe == BF16 else Float8Linear, layer, layer.weight)
            new.recipe, new.fuse_wgrad_accumulation = self.recipe, self.fuse_wgrad_accumulation
        self.done.swapped[name] = type(new).__name__ + ("" if self.recipe == BF16 else f", {self.recipe}")
        self.done._back[name] = type(new), functools.partial(_plain, layer.weight.requires_grad)
        _put(self.model, name, new)

    def why_kept(self, name: str, layer: torch.nn.Linear) -> str | None:
        if isinstance(self.model.get_submodule(name.rpartition(".")[0]), torch.nn.TransformerEncoderLayer):
            return "torch.nn.TransformerEncoderLayer reads the weights of its layers itself"
        if type(layer) is not torch.nn.Linear:
            return f"it is a {type(layer).__name__}, which may do more than torch.nn.Linear"
        if has_hooks(layer):
            return "it has hooks or a forward of its own, as tensor parallel plans add them; convert the model first"
        if self.filter is None and name.rpartition(".")[2] in HEADS:
            return "heads and routers stay in 16 bits; pass a filter to swap them"
        if self.filter is not None and not self.filter(name, layer):
            return _FILTERED
        shared = [owner for owner in self.owners[id(layer.weight)] if owner != name]
        if shared:
            return f"its weight is shared with {shared[0]}"
        weight = layer.weight
        if self.is_quantized and (weight.is_meta or weight.dtype not in FLOATS):
            return f"its weight is {weight.dtype} on {weight.device}, and only 16 or 32 bits in memory can be quantized"
        return why_not(self.recipe, layer.in_features, layer.out_features)

    def swap_experts(self, name: str, was: torch.nn.Module) -> None:
        if isinstance(was, Float8InferenceExperts) or (isinstance(was, Experts) and not self.is_one_call):
            return
        if self.filter is not None and not self.filter(name, was):
            self.done.kept[name] = _FILTERED
            return
        is_shared = any(self.owners[id(weight)] != [name] for weight in was.parameters(recurse=False))
        new = None if is_shared else blocks.experts_like(was)
        if new is None:
            self.done.kept[name] = "its weights are shared" if is_shared else _OTHER_EXPERTS
            return
        if self.is_one_call:
            new = Float8InferenceExperts.from_experts(new)
            _release(was)
        else:
            new.fuse_wgrad_accumulation = self.fuse_wgrad_accumulation
        self.put_block(name, new, was)

    def swap_norm(self, name: str, norm: Any) -> None:
        epsilon = blocks.rms_norm_epsilon(norm)
        if epsilon is None:
            return
        size = norm.weight.shape[0]
        parent = name.rpartition(".")[0]
        beside = [swapped for swapped in self.done.swapped if swapped.startswith(f"{parent}." if parent else "")]
        is_taken = any(self.model.get_submodule(one).in_features == size for one in beside)
        new = RMSNorm(size, epsilon, device="meta") if is_taken else torch.nn.RMSNorm(size, epsilon, device="meta")
        new.weight = norm.weight
        self.put_block(name, new, norm)

    def swap_feed_forward(self, name: str) -> None:
        """Puts SwiGLU in the place of a block whose layers were swapped."""
        was = self.model.get_submodule(name)
        down = was.get_submodule(blocks.DOWN)
        assert isinstance(down, Float8InferenceLinear)  # it was swapped
        new = SwiGLU(
            down.out_features, down.in_features, recipe=ONE_CALL, frozen=True, device="meta", dtype=down.compute_dtype
        )
        new.load_state_dict(was.state_dict(), assign=True, strict=False)
        _release(was)
        self.put_block(name, new, was)


def _release(module: torch.nn.Module) -> None:
    """Leaves parameters their shapes alone."""
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False)]:
            setattr(owner, name, torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad))


def _give_back(was: torch.nn.Module, new: torch.nn.Module) -> torch.nn.Module:
    """`was` with the parameters of the block that took its place."""
    state = new.state_dict(keep_vars=True)  # Parameters as they are
    if isinstance(new, Float8InferenceExperts):
        state = {name: new.dequantized(name) for name in WEIGHTS}
    was.load_state_dict(state, assign=True, strict=False)
    return was


def _plain(requires_grad: bool, layer: torch.nn.Linear) -> torch.nn.Linear:
    """The layer as a torch.nn.Linear; a weight that was frozen gets its old requires_grad."""
    weight = layer.weight
    if isinstance(layer, Float8InferenceLinear):
        weight = torch.nn.Parameter(layer.dequantized(), requires_grad)
    return _like(torch.nn.Linear, layer, weight)


def _like(kind: type[torch.nn.Linear], layer: torch.nn.Linear, weight: torch.Tensor) -> torch.nn.Linear:
    """A layer of another class with these parameters."""
    new = kind(layer.in_features, layer.out_features, bias=False, device="meta")
    new.weight, new.bias = weight, layer.bias
    return new.train(layer.training)


def _owners(model: torch.nn.Module) -> dict[int, list[str]]:
    """Of each parameter, the modules that have it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return owners


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
