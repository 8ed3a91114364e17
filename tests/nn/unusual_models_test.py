"""Conversions that fail leave a model as it was, and unusual parts of a model do not stop one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_forms import (
    FEED_FORWARDS,
    HIDDEN,
    OWNER,
    OWNING,
    Form,
    PickledMLP,
    PickledOwner,
    PickledRMSNorm,
    module_of,
    near,
    types_of,
)

from stoneware import nn
from stoneware.nn import inference


def snapshot(model: torch.nn.Module) -> Any:
    """Classes, attributes and tensors of a model, by identity, and the bits of its tensors."""
    places = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            items = [*value.items()] if isinstance(value, dict) else []
            places += [(name, type(module), attribute, [(key, id(item)) for key, item in items] or id(value))]
    return places, {name: tensor.view(torch.uint8).clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("num_calls", range(1, 8))
def test_an_exception_leaves_the_model_as_it_was(error, num_calls, monkeypatch):
    names = types_of(Reader=FEED_FORWARDS["Llama"], Owner=Form(OWNER, OWNING))
    model = torch.nn.Sequential(names["Owner"](), names["Reader"]()).bfloat16().train()
    places, bits = snapshot(model)
    calls = itertools.count(1)
    quantize = inference.quantize

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= num_calls:
            raise error
        return quantize(*args, **kwargs)

    monkeypatch.setattr(inference, "quantize", failing)
    with pytest.raises(error):
        nn.convert(model, "rowwise", frozen=True)
    found = snapshot(model)
    assert found[0] == places
    assert all(torch.equal(bits[name], tensor) for name, tensor in found[1].items())


def test_an_interrupt_in_the_code_of_a_block_leaves_the_model_as_it_was():
    module = module_of(FEED_FORWARDS["Llama"].with_operation("gate", "raise KeyboardInterrupt"))
    model = torch.nn.Sequential(module).bfloat16().train()
    places, _ = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        nn.convert(model, "rowwise", frozen=True)
    assert snapshot(model)[0] == places


# Models of which a part is unusual.


class Wrapper(torch.nn.Module):
    """Calls a linear layer by a function."""

    def __init__(self, call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.call(self.linear, x) if self.call else self.linear(input=x)
        return y


class LocalName(Wrapper):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.linear
        return torch.nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lambda: Wrapper(lambda layer, x: layer(input=x)),
        lambda: Wrapper(lambda layer, x: torch.nn.functional.linear(x, layer.weight, layer.bias)),
        LocalName,
    ],
    ids=["a keyword", "a function that reads the weight", "a local name"],
)
def test_layers_are_called_like_those_of_torch(model, frozen):
    model = torch.nn.Sequential(model()).bfloat16()
    nn.convert(model, "rowwise", frozen=frozen)
    if frozen and model[0].call and "weight" in model[0].call.__code__.co_names:
        # No method of a class of the model reads the weight, so nothing shows that it must stay in 16 bits.
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(16, HIDDEN).bfloat16())
        return
    assert model(torch.randn(16, HIDDEN).bfloat16()).shape == (16, HIDDEN)


def feed_forward() -> Any:
    return torch.nn.Sequential(module_of(FEED_FORWARDS["Llama"])).bfloat16().requires_grad_(False)


def with_a_lazy_layer(model: Any) -> None:
    model.append(torch.nn.LazyLinear(HIDDEN))


def with_a_sparse_buffer(model: Any) -> None:
    model.register_buffer("mask", torch.eye(3).to_sparse())


def with_a_scripted_layer(model: Any) -> None:
    model.append(torch.jit.script(torch.nn.SiLU()))


@pytest.mark.parametrize("change", [with_a_lazy_layer, with_a_sparse_buffer, with_a_scripted_layer])
def test_unusual_parts_do_not_stop_a_conversion(change):
    model = feed_forward()
    change(model)
    assert nn.convert(model, "rowwise", frozen=True).blocks == {"0": "SwiGLU"}


def test_a_model_is_converted_moved_and_loaded_under_autocast():
    model = feed_forward()
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.convert(model, "rowwise", frozen=True).blocks
        model.to("cpu").load_state_dict(model.state_dict())
        model(torch.randn(5, HIDDEN).bfloat16())


def test_a_class_that_registers_its_subclasses_does_not_see_that_of_a_block():
    registered = []

    class Registered(PickledMLP):
        def __init_subclass__(cls, *, name: str) -> None:
            registered.append(name)

    class Block(Registered, name="block"):
        pass

    model = torch.nn.Sequential(Block()).bfloat16()
    assert nn.convert(model, "rowwise", frozen=True).blocks
    assert registered == ["block"]


def test_attributes_of_the_same_names_are_given_back():
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), PickledRMSNorm(HIDDEN, eps=1e-5)).bfloat16()
    names = ("recipe", "compute_dtype", "handover", "fuse_wgrad_accumulation", "_stoneware")
    for module in model:
        for name in names:
            setattr(module, name, "mine")
    nn.convert(model, "rowwise", frozen=True).undo()
    assert [[getattr(module, name) for name in names] for module in model] == [["mine"] * len(names)] * 2


def test_functional_call_leaves_the_tensors_it_is_given():
    model = feed_forward()
    nn.convert(model, "rowwise", frozen=True)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    assert torch.equal(torch.func.functional_call(model, tensors, (x,)), y)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses
    assert torch.equal(model(x), y)


def test_a_replica_of_data_parallel_computes_the_same():
    model = torch.nn.Sequential(PickledOwner()).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", frozen=True)

    def replica(module: Any) -> Any:
        new = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            if parameter is None:
                new._parameters[name] = None
            else:
                setattr(new, name, parameter.detach())
        for name, child in module._modules.items():
            new._modules[name] = replica(child)
        return new

    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    assert near(replica(model)(x), y)
    assert torch.equal(model(x), y)


def test_a_model_is_exported():
    model = torch.nn.Sequential(PickledOwner()).bfloat16().requires_grad_(False)
    nn.convert(model, "rowwise", frozen=True)
    x = torch.randn(5, HIDDEN).bfloat16()
    assert near(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_forward_of_its_own_below_a_hook_that_replaces_it_is_kept():
    """Like the hooks of accelerate, which keep what they replace."""
    layer = torch.nn.Linear(HIDDEN, HIDDEN)
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)
    layer._hf_hook, layer._old_forward = object(), layer.forward
    layer.forward = lambda x: layer._old_forward(x)
    model = torch.nn.Sequential(layer).bfloat16()
    x = torch.randn(5, HIDDEN).bfloat16()
    y = model(x)
    nn.convert(model, "rowwise", frozen=True)
    assert (model(x) - y).norm() < 0.1 * y.norm()
