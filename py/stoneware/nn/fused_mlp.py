"""Feed-forwards of two layers that run as one native call; see `fused_blocks` for what fusing means."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stoneware.nn import conditions, mlp
from stoneware.nn.arguments import autocast_dtype
from stoneware.nn.fused_blocks import STATE, FusedBlock, State
from stoneware.nn.handover import Handover
from stoneware.nn.inference import Float8InferenceLinear
from stoneware.nn.linear import Linear
from stoneware.nn.proofs import MLPParts, is_same
from stoneware.nn.recipes import BF16


@dataclass(kw_only=True)
class MLPState(State):
    """The proof of a `FusedMLP`.

    Attributes:
      parts: which submodules are its layers, and the activation.
      recipe: of the layers.
      modules: names and submodules at the time of the proof, nested ones too.
      handover: may provide x in fp8.
      parameters: of the two layers of the calls for which `holds()`.
      contents, counts: the submodules of each module, and the keywords of each functools.partial, and how many there
        are in each. `holds()` compares those; an added one changes a count.
      forwards: each submodule with its class and the forward of this class, as they were at the first call.
    """

    parts: MLPParts
    recipe: str
    modules: list[tuple[str, torch.nn.Module]]
    handover: Handover | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    contents: list[dict[str, Any]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    forwards: list[tuple[torch.nn.Module, type, Any]] = field(default_factory=list)

    @functools.cached_property
    def holds(self) -> Callable[[], bool]:
        """holds() returns whether the block and its layers are unchanged since the proof, and have no hooks."""
        modules = dict(self.modules)
        layers: list[Any] = [modules[name] for name in (self.parts.up, self.parts.down)]
        kind = Linear if self.recipe == BF16 else Float8InferenceLinear
        if submodules(self.block) != self.modules or not all(type(layer) is kind for layer in layers):
            return lambda: False
        modules[""] = self.block
        self.parameters = tuple(layer._parameters for layer in layers)
        children = [module for module in self.block.modules() if module is not self.block]
        others = [module for module in self.block.modules() if module not in layers]
        self.contents = [module._modules for module in others]
        constants: list[Any] = [(vars(layer), "recipe", self.recipe) for layer in layers]
        constants += [(vars(modules[path]), name, value) for path, name, value in self.parts.attributes]
        for path, name, keywords in self.parts.keywords:
            own = getattr(vars(modules[path]).get(name), "keywords", {})
            self.contents.append(own)
            constants += [(own, keyword, value) for keyword, value in keywords]
            if len(own) != len(keywords):
                return lambda: False
        self.counts = [*map(len, self.contents)]
        # A pickle has other objects for the same constants.
        items = [
            (own, name, own.get(name) if is_same(own.get(name), value) else value) for own, name, value in constants
        ]
        items += [(vars(module), "_modules", module._modules) for module in others]
        items += [(vars(layer), "_parameters", layer._parameters) for layer in layers]
        if self.recipe == BF16:
            items += [(vars(layer), "fuse_wgrad_accumulation", False) for layer in layers]
        kinds = {path: type(module) for path, module in modules.items()} | {"": self.kind}
        methods = [(path, name, method or getattr(kinds[path], name)) for path, name, method in self.parts.methods]
        self.parts = replace(self.parts, methods=tuple(methods))
        self.forwards = self.forwards or [(child, type(child), type(child).forward) for child in children]
        return self.check(
            items,
            attributes=[(kinds[path], name, method) for path, name, method in methods],
            submodules=[(parent, *item) for parent in self.block.modules() for item in parent._modules.items()],
            forwards=self.forwards,
            hooks=[(child, name) for child in children for name in conditions.HOOKS],
        )

    def still_holds(self) -> bool:
        """`holds()` and the counts. A block that changed for a time is compared with the proof again."""
        if self.holds() and [*map(len, self.contents)] == self.counts:
            return True
        vars(self).pop("holds", None)
        return self.is_proved and self.holds()

    def __getstate__(self) -> dict[str, Any]:
        methods = tuple((path, name, None) for path, name, _ in self.parts.methods)
        parts = replace(self.parts, methods=methods)
        memory: dict[str, Any] = {"parameters": (), "contents": [], "counts": [], "forwards": []}
        return {**super().__getstate__(), "parts": parts, **memory}


def submodules(block: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The names and submodules of a block, nested ones too, in order."""
    return [*block.named_modules(remove_duplicate=False)][1:]


class FusedMLP(FusedBlock):
    """down(activation(up(x))) without gradients as one native call, with the activation in the kernel of up."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: MLPState | None = vars(self).get(STATE)  # a slice of a Sequential has none
        if (
            kwargs
            or len(args) != 1
            or state is None
            or torch.compiler.is_compiling()
            or state.block is not self
            or not state.still_holds()
            or not isinstance(args[0], torch.Tensor)
            or autocast_dtype(args[0]) is not None
        ):
            return super().forward(*args, **kwargs)
        (x,) = args
        up, down = state.parameters
        if "weight" not in up or "weight" not in down:  # parametrized
            return super().forward(x)
        activation = state.parts.activation
        if state.recipe == BF16:
            return mlp.plain(activation)(x, up["weight"], up["bias"], down["weight"], down["bias"])
        x_fp8 = () if state.handover is None else state.handover.take(x)
        operands = [own[name] for own in (up, down) for name in ("weight", "weight_scale_inv", "bias")]
        return mlp.frozen(state.recipe, activation, bool(x_fp8))(x, *operands, *x_fp8)
