"""Swaps the linear layers and experts of a model for Stoneware's, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stoneware.nn import blocks
from stoneware.nn.experts import WEIGHTS, Experts, Float8InferenceExperts
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.linear import Float8Linear, Linear
from stoneware.nn.recipes import BF16, RECIPES, named, why_not
from stoneware.nn.rms_norm import RMSNorm
from stoneware.nn.swiglu import HALVES, ONE_CALL, SwiGLU

Filter = Callable[[str, torch.nn.Module], bool]

HEADS = frozenset({"lm_head", "output", "embed_out", "score", "classifier", "router", "gate"})
"""Last names of layers that stay in 16 bits unless a filter says otherwise: the logits of a language
model and of a router decide by small differences."""


_OF_EXPERTS = Experts.__name__

_OTHER_EXPERTS = (
    "sw.nn.Experts computes down(silu(gate(x)) * up(x)) in bfloat16 alone, of sizes that are multiples of 16, "
    "without biases and hooks"
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
    _were: dict[str, torch.nn.Module] = field(default_factory=dict, repr=False)
    """What stood in the place of each block, its linear layers without their weights."""

    def undo(self) -> None:
        """Puts a torch.nn.Linear in the place of each layer that was swapped.

        It has the same parameters; a frozen fp8 weight is multiplied out in its old dtype, so that
        its rounding remains.
        """
        for name, was in self._were.items():
            block = self.model.get_submodule(name)
            if isinstance(block, SwiGLU):
                _take_apart(block, was)
            elif isinstance(block, Experts):
                _give_back(block, was)
            _put(self.model, name, was)
        self._were.clear()
        self.blocks.clear()
        for name in self.swapped:
            layer = self.model.get_submodule(name)
            assert isinstance(layer, torch.nn.Linear)  # it was put there
            weight = layer.weight
            if isinstance(layer, Float8InferenceLinear):
                weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
            _put(self.model, name, _like(torch.nn.Linear, layer, weight))
        self.swapped.clear()

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
    owners = _owners(model)
    done = Conversion(model=model)
    feed_forwards = [
        name
        for name, block in model.named_modules()
        if frozen and recipe == ONE_CALL and name and blocks.is_swiglu(block)
    ]
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if not name or not isinstance(layer, torch.nn.Linear):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        reason = _why_kept(name, layer, parent, recipe, filter, owners)
        if reason is not None:
            done.kept[name] = reason
            continue
        new = _swapped(layer, recipe, frozen=frozen)
        if fuse_wgrad_accumulation and isinstance(new, (Linear, Float8Linear)):
            new.fuse_wgrad_accumulation = True
        _put(model, name, new)
        done.swapped[name] = type(new).__name__ + ("" if recipe == BF16 else f", {recipe}")
    for name, module in list(model.named_modules()):
        if name and blocks.has_experts(module):
            _swap_experts(name, module, recipe, filter, owners, frozen, fuse_wgrad_accumulation, done)
    if frozen and recipe == ONE_CALL:
        _swap_norms(model, done)
        for name in feed_forwards:
            if all(f"{name}.{part}" in done.swapped for part in (*HALVES, blocks.DOWN)):
                _swap_feed_forward(model, name, done)
    return done


def _swap_experts(
    name: str,
    was: torch.nn.Module,
    recipe: str,
    filter: Filter | None,
    owners: dict[int, list[str]],
    frozen: bool,
    fuse_wgrad_accumulation: bool,
    done: Conversion,
) -> None:
    is_fp8 = frozen and recipe == ONE_CALL
    if isinstance(was, Float8InferenceExperts) or (isinstance(was, Experts) and not is_fp8):
        return
    if filter is not None and not filter(name, was):
        done.kept[name] = "the filter says no"
        return
    is_shared = any(owners[id(weight)] != [name] for weight in was.parameters())
    new = None if is_shared else blocks.experts_like(was)
    if new is None:
        done.kept[name] = "its weights are shared" if is_shared else _OTHER_EXPERTS
        return
    if is_fp8:
        new = Float8InferenceExperts.from_experts(new)
        for weight in WEIGHTS:
            setattr(was, weight, torch.nn.Parameter(was.get_parameter(weight).to("meta"), requires_grad=False))
    else:
        new.fuse_wgrad_accumulation = fuse_wgrad_accumulation
    done._were[name], done.blocks[name] = was, type(new).__name__
    _put(done.model, name, new)


def _give_back(experts: Experts, was: torch.nn.Module) -> None:
    """Gives experts that were swapped their weights again."""
    for name in WEIGHTS:
        weight = experts.get_parameter(name)
        if isinstance(experts, Float8InferenceExperts):
            weight = torch.nn.Parameter(experts.dequantized(name), requires_grad=False)
        setattr(was, name, weight)


def _swap_norms(model: torch.nn.Module, done: Conversion) -> None:
    for name, norm in list(model.named_modules()):
        epsilon = blocks.rms_norm_epsilon(norm) if name and not isinstance(norm, torch.nn.RMSNorm) else None
        if epsilon is None:
            continue
        size = norm.weight.shape[0]
        parent = name.rpartition(".")[0]
        beside = [swapped for swapped in done.swapped if swapped.startswith(f"{parent}." if parent else "")]
        is_taken = any(model.get_submodule(one).in_features == size for one in beside)
        new = RMSNorm(size, epsilon, device="meta") if is_taken else torch.nn.RMSNorm(size, epsilon, device="meta")
        new.weight = norm.weight
        done._were[name], done.blocks[name] = norm, type(new).__name__
        _put(model, name, new.train(norm.training))


def _swap_feed_forward(model: torch.nn.Module, name: str, done: Conversion) -> None:
    """Puts SwiGLU in the place of a block whose layers were swapped; `_take_apart` is its reverse."""
    was = model.get_submodule(name)
    gate, up, down = (was.get_submodule(part) for part in (*HALVES, blocks.DOWN))
    assert isinstance(down, Float8InferenceLinear)  # it was swapped
    new = SwiGLU(
        down.out_features, down.in_features, recipe=ONE_CALL, frozen=True, device="meta", dtype=down.compute_dtype
    )
    for parameter in ("weight", "weight_scale_inv"):
        joined = torch.cat([getattr(gate, parameter), getattr(up, parameter)])
        setattr(new.gate_up_proj, parameter, torch.nn.Parameter(joined, requires_grad=False))
        for layer in (gate, up):
            setattr(layer, parameter, torch.nn.Parameter(getattr(layer, parameter).to("meta"), requires_grad=False))
    new.down_proj = down
    done._were[name], done.blocks[name] = was, type(new).__name__
    _put(model, name, new.train(was.training))


def _take_apart(block: SwiGLU, was: torch.nn.Module) -> None:
    """Gives the layers of `was` their weights again."""
    for parameter in ("weight", "weight_scale_inv"):
        halves = getattr(block.gate_up_proj, parameter).chunk(2)
        for part, half in zip(HALVES, halves, strict=True):
            setattr(was.get_submodule(part), parameter, torch.nn.Parameter(half.clone(), requires_grad=False))
    was.add_module(blocks.DOWN, block.down_proj)


def _why_kept(
    name: str,
    layer: torch.nn.Linear,
    parent: torch.nn.Module,
    recipe: str,
    filter: Filter | None,
    owners: dict[int, list[str]],
) -> str | None:
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        return "torch.nn.TransformerEncoderLayer reads the weights of its layers itself"
    if type(layer) is not torch.nn.Linear:
        return f"it is a {type(layer).__name__}, which may do more than torch.nn.Linear"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks, as tensor parallel plans add them; convert the model first"
    if filter is None and name.rpartition(".")[2] in HEADS:
        return "heads and routers stay in 16 bits; pass a filter to swap them"
    if filter is not None and not filter(name, layer):
        return "the filter says no"
    shared = [owner for owner in owners[id(layer.weight)] if owner != name]
    if shared:
        return f"its weight is shared with {shared[0]}"
    return None if recipe == BF16 else why_not(named(recipe), layer.in_features, layer.out_features)


def _swapped(layer: torch.nn.Linear, recipe: str, *, frozen: bool) -> torch.nn.Linear:
    if recipe == BF16:
        return _like(Linear, layer, layer.weight)
    if frozen:
        return Float8InferenceLinear.from_linear(layer, recipe)
    new = _like(Float8Linear, layer, layer.weight)
    assert isinstance(new, Float8Linear)
    new.recipe = recipe
    return new


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
