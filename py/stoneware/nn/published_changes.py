"""The changes of fp8 layers and experts that other libraries loaded (`published.py`).

Their weights stay. Scales that have another form in the checkpoint are replaced, and kept for `undo`, which puts them
back if the values are still those of the checkpoint. For values that were loaded since, the old form has no scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from stoneware.nn import folded_scales, fused_blocks
from stoneware.nn.changes import Change, FrozenLinear, FrozenWeights, become, forget
from stoneware.nn.experts import WEIGHTS, Float8InferenceExperts
from stoneware.nn.inference import Float8InferenceLinear, frozen_parameter
from stoneware.nn.published import ExpertsScales, PublishedWeight

_ALIGNMENT = 16
"""Bytes of which a matmul requires the address of a weight to be a multiple."""


class PublishedLinear(FrozenLinear):
    """An fp8 layer of another library -> Float8InferenceLinear, with the weight and the scales of the checkpoint.

    Of a weight whose scales are folded only what restores it is kept in the end.
    """

    def __init__(self, name: str, layer: Any, published: PublishedWeight) -> None:
        super().__init__(name, layer, published.recipe)
        self.label = ", ".join(filter(None, (self.label, published.folding)))
        self.kind, self.published, self.weight_attributes = type(layer), published, {**vars(layer.weight)}
        self.may_be_joined = published.weight is layer.weight or bool(published.folding)
        self.parameters: dict[str, torch.nn.Parameter | None] = {}
        self.attributes: dict[str, Any] = {}
        self.before: folded_scales.Before | None = None
        self.values = _Values((), ())

    def change(self) -> None:
        layer, published = self.module, self.published
        self.parameters = {**layer._parameters}
        weight, scale = published.weight, published.scale
        if published.folding:
            weight, scale, self.before = folded_scales.fold(weight, scale)
            self.save(layer, "weight")
            self.parameters["weight"] = None
        own = vars(layer)
        self.attributes = {name: own.pop(name) for name in published.attributes if name in own}
        for name, parameter in self.parameters.items():
            if name not in ("weight", "bias") and parameter is not None:
                del layer._parameters[name]
        layer.recipe, layer.compute_dtype = published.recipe, published.dtype
        layer.weight, layer.weight_scale_inv = _parameter(weight), _parameter(scale)
        # These parameters change with the layer, so that no other copy of a weight stays.
        self.published = replace(published, weight=layer.weight, scale=layer.weight_scale_inv)
        self.values = _Values((layer.weight, layer.weight_scale_inv), self.parameters.values())
        become(layer, Float8InferenceLinear)

    def has_form(self) -> bool:
        return self.values.are_those_of((self.module.weight, self.module.weight_scale_inv))

    def revert(self) -> None:
        self.put_back(self.saved[0].restore() if self.saved else None)
        self.settle()

    def undo(self) -> None:
        weight = None
        if self.before is not None:
            values = folded_scales.unfold(self.module.weight, self.module.weight_scale_inv, self.before)
            weight = torch.nn.Parameter(values, self.requires_grad)
            vars(weight).update(self.weight_attributes)
        self.put_back(weight)

    def put_back(self, weight: torch.nn.Parameter | None) -> None:
        """Makes the layer of its old class again, with this weight, or the old one."""
        layer, bias = self.module, self.module._parameters.get("bias")
        device = layer.weight.device
        layer._parameters.clear()
        for name, parameter in self.parameters.items():
            layer._parameters[name] = bias if name == "bias" else _moved(parameter, device)
        if weight is not None:
            layer._parameters["weight"] = weight
        become(layer, self.kind)
        forget(layer, ("recipe", "compute_dtype", "handover"))
        vars(layer).update(self.attributes)


class PublishedExperts(FrozenWeights):
    """`FP8Experts` of transformers -> one that calls grouped matmuls, with the weights of the checkpoint."""

    def __init__(self, name: str, module: torch.nn.Module, scales: ExpertsScales) -> None:
        label = ", ".join(filter(None, (Float8InferenceExperts.__name__, scales.recipe, scales.folding)))
        super().__init__(name, module, label)
        self.scales, self.is_folded = scales.scales, bool(scales.folding)
        self.requires_grad = {weight: getattr(module, weight).requires_grad for weight in WEIGHTS}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.before: dict[str, folded_scales.Before] = {}
        self.values = _Values((), ())

    def change(self) -> None:
        module = self.module
        for name in WEIGHTS:
            _parameter(getattr(module, name))
        for name in WEIGHTS:
            scale_name = f"{name}_scale_inv"
            scale = self.scales[scale_name]
            if self.is_folded:
                weight, scale, self.before[name] = folded_scales.fold(getattr(module, name), scale)
                self.save(module, name)
                setattr(module, name, frozen_parameter(weight))
            self.parameters[scale_name] = getattr(module, scale_name)
            setattr(module, scale_name, _parameter(scale))
        self.values = _Values(self.in_use(), self.parameters.values())
        fused_blocks.fuse(module, fused_blocks.FusedPublishedExperts, fused_blocks.State())

    def in_use(self) -> list[torch.Tensor]:
        """The scales, and the weights into which others are folded."""
        return [getattr(self.module, name) for name in (*self.parameters, *self.before)]

    def has_form(self) -> bool:
        return self.values.are_those_of(self.in_use())

    def undo(self) -> None:
        weights = {
            name: folded_scales.unfold(getattr(self.module, name), getattr(self.module, f"{name}_scale_inv"), before)
            for name, before in self.before.items()
        }
        self.thaw()
        for name, weight in weights.items():
            setattr(self.module, name, torch.nn.Parameter(weight, self.requires_grad[name]))

    def thaw(self) -> None:
        fused_blocks.unfuse(self.module)
        for name, parameter in self.parameters.items():
            setattr(self.module, name, _moved(parameter, self.module.down_proj.device))


@contextlib.contextmanager
def as_plain_layers(changes: Iterable[Change]) -> Iterator[None]:
    """Makes the layers of a `PublishedLinear` torch.nn.Linear meanwhile, which proofs take as such."""
    linears = [change for change in changes if isinstance(change, PublishedLinear)]
    forwards = {change: vars(change.module).pop("forward", None) for change in linears}
    try:
        for change in linears:
            change.module.__class__ = torch.nn.Linear
        yield
    finally:
        for change, forward in forwards.items():
            change.module.__class__ = change.kind
            if forward is not None:
                vars(change.module)["forward"] = forward


class _Values:
    """The values of parameters that replace others, by checksums.

    Args:
      current: the parameters in use.
      old: those that are put back.
    """

    def __init__(self, current: Iterable[torch.Tensor], old: Iterable[torch.Tensor | None]) -> None:
        self._old = list(old)
        self._sums = [None if self._is_old(each) else _checksum(each) for each in current]

    def are_those_of(self, current: Iterable[torch.Tensor]) -> bool:
        """Whether each parameter is itself an old one, or has the values from before."""
        return all(
            self._is_old(each) or (before is not None and torch.equal(_checksum(each), before))
            for each, before in zip(current, self._sums)
        )

    def _is_old(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self._old)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of the 32-bit words of each row and each column, in the memory of the host."""
    words = tensor.detach().contiguous().view(torch.int32)
    words = words.view(-1, words.shape[-1])
    return torch.cat([words.sum(dim) for dim in (0, 1)]).cpu()


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """The values as a frozen parameter; a parameter of the checkpoint stays the same object.

    Weights in the memory of the host may be views of a file, which begin at any byte; those are copied.
    """
    parameter = values if isinstance(values, torch.nn.Parameter) else frozen_parameter(values)
    if parameter.data_ptr() % _ALIGNMENT:
        parameter.data = parameter.data.clone()
    return parameter


def _moved(parameter: torch.nn.Parameter | None, device: torch.device) -> torch.nn.Parameter | None:
    """An old parameter on the device that its module has now."""
    if parameter is None or parameter.device == device:
        return parameter
    return torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
